"""The bundle: core.yaml lists tasks as LLM Foundry does, eval_meta_data.csv has the accuracy of a random guess, and
eval_data holds the records."""

import csv
from dataclasses import dataclass
from pathlib import Path

from ingot.config.evaluation import TaskConfig
from ingot.errors import ConfigError
from ingot.evaluation.tasks.run import check_names
from ingot.evaluation.tasks.task_files import tasks_from_yaml

LIST, BASELINES, RECORDS = "core.yaml", "eval_meta_data.csv", "eval_data"
_TASK, _BASELINE = "Eval Task", "Random baseline"  # columns
_KINDS = ("multiple_choice", "schema", "language_modeling")


@dataclass(frozen=True)
class CoreTask:
    """A task of the bundle."""

    config: TaskConfig
    baseline: float  # accuracy of a random guess, 0 to 1

    @property
    def shots(self) -> int:
        return self.config.num_fewshot[0]


def load_bundle(folder: Path) -> list[CoreTask]:
    """The tasks of a bundle."""
    for name in (LIST, BASELINES):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name} does not exist; a CORE bundle has {LIST}, {BASELINES} and {RECORDS}/")
    tasks = tasks_from_yaml(folder / LIST, folder / RECORDS if (folder / RECORDS).is_dir() else None)
    check_names(tasks)
    baselines = _read_baselines(folder / BASELINES)
    found = []
    for task in tasks:
        if task.label not in baselines:
            raise ConfigError(f"{folder / BASELINES}: no row for the task {task.label} of {LIST}")
        if task.icl_task_type not in _KINDS:
            raise ConfigError(
                f"{folder / LIST}: {task.label} is a {task.icl_task_type} task; CORE has {', '.join(_KINDS)}"
            )
        if len(task.num_fewshot) > 1:
            raise ConfigError(f"{folder / LIST}: {task.label} has several numbers of examples; CORE takes one")
        found.append(CoreTask(task, baselines[task.label]))
    return found


def _read_baselines(file: Path) -> dict[str, float]:
    found = {}
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        missing = [name for name in (_TASK, _BASELINE) if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(f"{file}:1: no column {missing[0]!r}")
        for row in reader:
            try:
                percent = float(row[_BASELINE] or "")
            except ValueError:
                raise ConfigError(
                    f"{file}:{reader.line_num}: {_BASELINE} is {row[_BASELINE]!r}, not a number"
                ) from None
            if not 0 <= percent < 100:
                raise ConfigError(f"{file}:{reader.line_num}: {_BASELINE} is {percent}; it is a percentage below 100")
            found[row[_TASK]] = percent * 0.01
    return found
