"""`ingot eval --tasks`: scores of one or several models, as tables, lines or JSON."""

import json
import sys
from collections.abc import Sequence
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
    if given.include_path:
        raise ConfigError("--include-path is about --harness; name the files after --tasks")
    if given.plot and len(paths) < 2:
        raise ConfigError("--plot draws scores over steps; name several checkpoints, such as RUN/checkpoints/*")
    env = find_rank_env()
    if given.nproc > 1 and env.world == 1:
        flags = [*_flags(given), *(["--json"] if as_json else [])]
        sys.exit(run_processes(["eval", *map(str, paths), *flags], given.nproc))
    reports = _score(paths, given, shows=env.rank == 0)
    if env.rank > 0:
        return
    for report in reports:
        _write(report, given)
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


def _score(paths: Sequence[Path], given: EvalOptions, shows: bool) -> "list[ModelReport]":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from ingot.evaluation.processes import join_processes
    from ingot.evaluation.tasks.offline import TaskRequest, evaluate_model

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shows) as bar:

        def say(line: str) -> None:
            if shows:
                bar.console.print(line, highlight=False, soft_wrap=True)

        request = TaskRequest.of(given.tasks, given.gauntlet, given.num_fewshot, given.limit, say)
        join_processes()
        shown = bar.add_task("", total=None)
        reports = [
            evaluate_model(
                path, request, given.device, say,
                lambda what, done, total: bar.update(shown, description=what, completed=done, total=total),
            )
            for path in paths
        ]  # fmt: skip
    steps = [report.step for report in reports if report.step is not None]
    if len(steps) == len(reports) and len({report.run for report in reports}) == 1:
        reports.sort(key=lambda report: report.step or 0)  # a shell sorts 1000 before 200
    return reports


def _write(report: "ModelReport", given: EvalOptions) -> None:
    from ingot.evaluation.tasks.offline import write_report

    written = write_report(report, given.out, given.questions)
    if written:
        print(f"scores are in {written}", file=sys.stderr)


def _flags(given: EvalOptions) -> list[str]:
    """The options as one would type them for a single process."""
    flags: list[str] = []
    for name, value in given.model_dump(mode="json", exclude_unset=True, exclude={"nproc"}).items():
        flags += [f"--{name.replace('_', '-')}"]
        flags += value if isinstance(value, list) else [] if value is True else [str(value)]
    return flags
