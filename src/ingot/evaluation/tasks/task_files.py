"""Which tasks a command or a config means: YAML lists as LLM Foundry writes them, bare JSON Lines files, names."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ingot.config.error_messages import Origins
from ingot.config.evaluation import GauntletConfig, TaskConfig
from ingot.config.files import read_config_file
from ingot.config.load import validate
from ingot.errors import ConfigError, DataError
from ingot.storage.names import plain_name_from
from ingot.storage.object_store import is_url

SHIPPED = "ingot.evaluation.tasks.shipped"
# the type of a task by the fields of its records
_FIELDS = {
    ("context_options", "continuation"): "schema",
    ("query", "choices"): "multiple_choice",
    ("context", "continuation"): "language_modeling",
    ("context", "answer"): "generation_task_with_answers",
}


def load_tasks(
    given: Sequence[str | TaskConfig], shots: int | None = None, folder: Path | None = None, option: str = "--tasks"
) -> list[TaskConfig]:
    """The tasks that are meant by YAML files with `icl_tasks`, .jsonl files or URLs, names of shipped tasks, or tasks
    written out. Relative paths are looked for in `folder` first, then in the working directory. `option` is where the
    names were given, for messages."""
    tasks = [task for item in given for task in _load(item, folder, option)]
    if shots is not None:
        tasks = [task.model_copy(update={"num_fewshot": (shots,)}) for task in tasks]
    return tasks


def load_gauntlet(given: str | GauntletConfig, folder: Path | None = None) -> tuple[GauntletConfig, Origins]:
    """The `eval_gauntlet` of a YAML file, and the FILE:LINE of each key; or one written out."""
    if not isinstance(given, str):
        return given, Origins()
    path = Path(_find(given, folder, "gauntlet"))
    values, lines = _read(path)
    found = values.get("eval_gauntlet", values)
    prefix = "eval_gauntlet." if "eval_gauntlet" in values else ""
    origins = Origins({key.removeprefix(prefix): line for key, line in lines.items()})
    gauntlet = _check(GauntletConfig, found, origins, str(path))
    assert isinstance(gauntlet, GauntletConfig)
    return gauntlet, origins


def shipped_tasks() -> dict[str, str]:
    """The small tasks that come with ingot: name and what it asks."""
    values, _ = _read(Path(str(files(SHIPPED) / "tasks.yaml")))
    return {task["label"]: task.pop("description") for task in values["icl_tasks"]}


def is_text(name: str) -> bool:
    """Whether a file holds plain text or text records instead of questions: it is scored by perplexity."""
    path = Path(name)
    if is_url(name) or not path.is_file() or path.suffix in (".yaml", ".yml"):
        return False
    return path.suffix != ".jsonl" or set(_first_record(path)) >= {"text"}


def _load(given: str | TaskConfig, folder: Path | None, option: str) -> list[TaskConfig]:
    if isinstance(given, TaskConfig):
        return [given.model_copy(update={"dataset_uri": _find(given.dataset_uri, folder, f"task {given.label}")})]
    path = _existing(given, folder)
    if path is not None and path.suffix in (".yaml", ".yml"):
        return tasks_from_yaml(path)
    if path is not None or is_url(given):
        return [_from_records(given if path is None else str(path))]
    shipped = shipped_tasks()
    if given in shipped:
        tasks = tasks_from_yaml(Path(str(files(SHIPPED) / "tasks.yaml")))
        return [task for task in tasks if task.label == given]
    if Path(given).suffix:
        _find(given, folder, option)
    raise ConfigError(
        f"{given} is neither a file (a YAML list of tasks, a .jsonl file) nor a task that ships with ingot: "
        f"{', '.join(shipped)}"
    )


def tasks_from_yaml(path: Path, records: Path | None = None) -> list[TaskConfig]:
    """The `icl_tasks` of a YAML file. Their files are relative to the folder `records`, by default that of the file."""
    values, lines = _read(path)
    listed = values.get("icl_tasks")
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: has no list `icl_tasks`")
    tasks = []
    for number, item in enumerate(listed):
        prefix = f"icl_tasks.{number}."
        if not isinstance(item, dict):
            raise ConfigError(f"{lines[prefix[:-1]]}: a task must be a mapping of keys to values, not {item!r}")
        item = {key: value for key, value in item.items() if key != "description"}
        own = Origins({key.removeprefix(prefix): line for key, line in lines.items() if key.startswith(prefix)})
        task = _check(TaskConfig, item, own, f"{path}: task {number + 1} ({item.get('label', 'without a label')})")
        assert isinstance(task, TaskConfig)
        uri = _find(task.dataset_uri, records or path.parent, f"{own.of('dataset_uri')}: task {task.label}")
        tasks.append(task.model_copy(update={"dataset_uri": uri}))
    return tasks


def _existing(name: str, folder: Path | None) -> Path | None:
    paths = [folder / name] if folder and not is_url(name) else []
    return next((path for path in (*paths, Path(name)) if path.exists()), None)


def _find(uri: str, folder: Path | None, where: str) -> str:
    """A relative path, looked for in a folder first, then in the working directory."""
    if is_url(uri):
        return uri
    if (found := _existing(uri, folder)) is not None:
        return str(found)
    here = Path(uri).absolute()
    if folder is None or folder.absolute() == here.parent or Path(uri).is_absolute():
        raise ConfigError(f"{where}: {here} does not exist")
    raise ConfigError(f"{where}: neither {folder / uri} nor {here} exists")


def _from_records(name: str) -> TaskConfig:
    """A task from a bare file: its type from the fields, its label from the name."""
    if is_url(name):
        raise ConfigError(f"{name}: a URL needs a YAML file with its icl_task_type; see LLM Foundry's icl_tasks")
    fields = _first_record(Path(name))
    kind = next((kind for needed, kind in _FIELDS.items() if set(needed) <= set(fields)), None)
    if kind is None:
        wanted = "; ".join(" + ".join(needed) for needed in _FIELDS)
        raise DataError(
            f"{name}:1: these fields make no task: {', '.join(fields) or 'none'}; a task needs one of {wanted}"
        )
    label = plain_name_from(Path(name).stem)
    return TaskConfig(label=label, dataset_uri=name, icl_task_type=kind, num_fewshot=(0,))


def _first_record(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as stream:
            line = next((line for line in stream if line.strip()), "")
        values = json.loads(line) if line else {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}:1: not valid JSON: {error}") from None
    if not line:
        raise DataError(f"{path}: is empty")
    return values if isinstance(values, dict) else {}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from omegaconf import OmegaConf

    file = read_config_file(path)
    values = OmegaConf.to_container(file.content, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}, file.lines


def _check(schema: type[BaseModel], values: Any, origins: Origins, where: str) -> BaseModel:
    try:
        return validate(schema, values, origins)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
