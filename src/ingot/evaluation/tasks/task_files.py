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


def load_tasks(names: Sequence[str], shots: int | None = None) -> list[TaskConfig]:
    """The tasks that some names mean: YAML files with `icl_tasks`, .jsonl files or URLs, names of shipped tasks."""
    tasks = [task for name in names for task in _load(name)]
    if shots is not None:
        tasks = [task.model_copy(update={"num_fewshot": (shots,)}) for task in tasks]
    return tasks


def load_gauntlet(name: str) -> GauntletConfig:
    """The `eval_gauntlet` of a YAML file."""
    values, lines = _read(Path(name))
    found = values.get("eval_gauntlet", values)
    prefix = "eval_gauntlet." if "eval_gauntlet" in values else ""
    gauntlet = _check(GauntletConfig, found, {k.removeprefix(prefix): v for k, v in lines.items()}, name)
    assert isinstance(gauntlet, GauntletConfig)
    return gauntlet


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


def _load(name: str) -> list[TaskConfig]:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(path)
    if path.is_file() or is_url(name):
        return [_from_records(name)]
    shipped = shipped_tasks()
    if name in shipped:
        tasks = _from_yaml(Path(str(files(SHIPPED) / "tasks.yaml")))
        return [task for task in tasks if task.label == name]
    raise ConfigError(
        f"{name} is neither a file (a YAML list of tasks, a .jsonl file) nor a task that ships with ingot: "
        f"{', '.join(shipped)}"
    )


def _from_yaml(path: Path) -> list[TaskConfig]:
    values, lines = _read(path)
    listed = values.get("icl_tasks")
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: has no list `icl_tasks`")
    tasks = []
    for number, item in enumerate(listed):
        prefix = f"icl_tasks.{number}."
        item = {key: value for key, value in item.items() if key != "description"}
        own = {key.removeprefix(prefix): line for key, line in lines.items() if key.startswith(prefix)}
        task = _check(TaskConfig, item, own, f"{path}: task {number + 1} ({item.get('label', 'without a label')})")
        assert isinstance(task, TaskConfig)
        tasks.append(task.model_copy(update={"dataset_uri": _find(task.dataset_uri, path, task.label)}))
    return tasks


def _find(uri: str, file: Path, label: str) -> str:
    """A relative path, looked for next to the YAML file first, then in the working directory."""
    if is_url(uri) or Path(uri).is_absolute():
        return uri
    places = [file.parent / uri, Path(uri)]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise ConfigError(f"{file}: task {label}: neither {places[0]} nor {places[1].absolute()} exists")
    return str(found)


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


def _check(schema: type[BaseModel], values: dict[str, Any], lines: dict[str, str], where: str) -> BaseModel:
    try:
        return validate(schema, values, Origins(lines))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
