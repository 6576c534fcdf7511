"""`ingot eval --harness`: a finished model on tasks of lm-evaluation-harness."""

import difflib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from ingot.errors import ConfigError, DataError, IngotError
from ingot.evaluation.lm_eval.model import IngotLM
from ingot.evaluation.tasks.offline import open_report, pick_device
from ingot.version import __version__


@dataclass(frozen=True)
class HarnessRequest:
    """What to evaluate on."""

    tasks: tuple[str, ...]  # names or patterns, task files, folders of task files
    include: Path | None = None  # a folder of task files that may be named
    shots: int | None = None
    limit: int | None = None
    with_samples: bool = False


@dataclass
class HarnessReport:
    """What the harness found."""

    path: Path
    step: int | None  # of the checkpoint; None for a Hugging Face folder
    run: Path | None
    results: dict[str, Any]  # as `lm_eval.simple_evaluate` returns them

    def metrics(self) -> dict[str, float]:
        """Every metric under the harness's name for it."""
        return {
            f"{task}/{name}": float(value)
            for task, values in self.results["results"].items()
            for name, value in values.items()
            if isinstance(value, int | float) and "," in name
        }

    def tables(self) -> Iterator[str]:
        """The harness's tables."""
        step = "" if self.step is None else f", step {self.step}"
        yield f"\n{self.path}{step}"
        yield make_table(self.results)
        if self.results.get("groups"):
            yield make_table(self.results, "groups")

    def to_json(self) -> dict[str, Any]:
        """What is written to RUN/evaluations/STEP-harness.json: the harness's results, and where they are from."""
        versions = {"ingot": __version__, "lm_eval": lm_eval.__version__}
        found = {"model": str(self.path), "step": self.step, "metrics": self.metrics(), "packages": versions}
        text = json.dumps(found | self.results, default=handle_non_serializable, ensure_ascii=False)
        return dict(json.loads(text))


def find_tasks(request: HarnessRequest) -> tuple[list[str], TaskManager]:
    """The tasks that some names mean, as the harness takes them, and its list of all tasks."""
    files: list[str] = []
    names: list[str] = []
    for name in request.tasks:
        path = Path(name)
        if path.is_dir():
            found = sorted(str(file) for file in path.glob("*.yaml"))
            if not found:
                raise ConfigError(f"{path}: no .yaml file in this folder")
            files += found
        elif path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise ConfigError(f"{path}: no such task file")
            files.append(name)
        else:
            names += [part for part in name.split(",") if part]
    # reading the harness's own thousands of task files takes seconds
    manager = TaskManager(include_path=str(request.include) if request.include else None, include_defaults=bool(names))
    matched: list[str] = []
    for name in names:
        fitting = manager.match_tasks([name])
        if not fitting:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; lm-eval ls tasks lists them"
            raise ConfigError(f"lm-evaluation-harness {lm_eval.__version__} has no task {name}{hint}")
        matched += [task for task in fitting if task not in matched]
    return [*matched, *files], manager


def score_with_harness(path: Path, request: HarnessRequest, device: str) -> HarnessReport:
    """Load a model and let the harness score it."""
    pick_device(device)
    opened = open_report(path)
    _quiet()
    names, manager = find_tasks(request)
    tasks = _load(names, manager)
    results = lm_eval.simple_evaluate(
        IngotLM(opened.path, device=device), tasks=tasks, task_manager=manager, num_fewshot=request.shots,
        limit=request.limit, log_samples=request.with_samples,
    )  # fmt: skip
    assert results is not None  # it is None on ranks other than 0, and there are none
    return HarnessReport(opened.path, opened.step, opened.run, dict(results))


def _quiet() -> None:
    """The harness logs what `ingot eval` says by itself."""
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _load(names: list[str], manager: TaskManager) -> list[Any]:
    """The tasks with their data, or the names where groups have to be put together again."""
    try:
        loaded = manager.load(names)
    except IngotError:
        raise
    except Exception as error:  # datasets, templates and task code fail in their own ways
        raise DataError(f"the tasks {', '.join(names)} cannot be read: {_first_line(error)}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise ConfigError(
                f"task {name} runs code that the model writes; to allow it, use `python -m ingot.evaluation.lm_eval "
                "--model ingot` with --confirm_run_unsafe_code"
            )
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(f"task {name} asks about pictures or sound, and models here read text")
    return names if loaded.get("groups") else list(loaded["tasks"].values())


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
