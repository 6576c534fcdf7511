"""`ingot eval --tasks`: scores of one or several models, as tables, lines or JSON."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.config.evaluation import EvalOptions
from ingot.errors import ConfigError
from ingot.launch.processes import run_processes
from ingot.parallel.rank_env import find_rank_env

if TYPE_CHECKING:
    from ingot.evaluation.tasks.offline import ModelReport


def evaluate_tasks(paths: Sequence[Path], given: EvalOptions, as_json: bool) -> None:
    """Score models, here or in --nproc processes, and print what they got."""
    if given.plot and len(paths) < 2:
        raise ConfigError("--plot draws scores over steps; name several checkpoints, such as RUN/checkpoints/*")
    env = find_rank_env()
    if given.nproc > 1 and env.world == 1:
        flags = [*_flags(given), *(["--json"] if as_json else [])]
        sys.exit(run_processes(["eval", *map(str, paths), *flags], given.nproc))
    reports = _score(paths, given, shows=env.rank == 0)
    if env.rank > 0:
        return
    from ingot.evaluation.tasks.offline import write_report

    for report in reports:
        say_where(write_report(report, given.out, given.questions))
    if as_json:
        print(json.dumps([report.to_json(given.questions) for report in reports]))
        return
    from ingot.evaluation.tasks.tables import draw_curves, model_tables, progress_table

    for report in reports:
        print("\n".join(model_tables(report)))
    if len(reports) > 1:
        print("\n".join(progress_table(reports)))
    if given.plot:
        draw_curves(reports, given.plot)
        print(f"\nthe curves are in {given.plot}")


@contextmanager
def progress_bar(shows: bool = True) -> Iterator[tuple[Callable[[str], None], Callable[[str, int, int], None]]]:
    """A bar on stderr: how to print a line above it, and how to say what is done and how far."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shows) as bar:
        shown = bar.add_task("", total=None)

        def say(line: str) -> None:
            if shows:
                bar.console.print(line, highlight=False, soft_wrap=True)

        yield say, lambda what, done, total: bar.update(shown, description=what, completed=done, total=total)


def say_where(written: Path | None) -> None:
    """Name the file that the scores are in."""
    if written:
        print(f"scores are in {written}", file=sys.stderr)


def _score(paths: Sequence[Path], given: EvalOptions, shows: bool) -> "list[ModelReport]":
    from ingot.evaluation.processes import joined_processes
    from ingot.evaluation.tasks.offline import TaskRequest, evaluate_model

    with progress_bar(shows) as (say, progress):
        request = TaskRequest.of(given.tasks, given.gauntlet, given.num_fewshot, given.limit, say)
        with joined_processes():
            reports = [evaluate_model(path, request, given.device, say, progress) for path in paths]
    steps = [report.step for report in reports if report.step is not None]
    if len(steps) == len(reports) and len({report.run for report in reports}) == 1:
        reports.sort(key=lambda report: report.step or 0)  # a shell sorts 1000 before 200
    return reports


def _flags(given: EvalOptions) -> list[str]:
    """The options as one would type them for a single process."""
    flags: list[str] = []
    for name, value in given.model_dump(mode="json", exclude_unset=True, exclude={"nproc"}).items():
        flags += [f"--{name.replace('_', '-')}"]
        flags += value if isinstance(value, list) else [] if value is True else [str(value)]
    return flags
