"""`ingot status`, `ingot logs`, `ingot stop`"""

import json
import time
from dataclasses import asdict
from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(metavar="RUN_OR_JOB", help="Run folder, or id of a job launched from here.")]


def status(run: Run, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """How a run is doing: state, step, loss, speed, last checkpoint, failures and their first causes.

    Example: ingot status runs/mpt-30b
    """
    from ingot.launch.status import find_run, read_status

    found = read_status(find_run(run))
    print(json.dumps(asdict(found)) if as_json else "\n".join(found.lines()))


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines are written.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="One rank's own log.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="First causes, then the logs of failed ranks.")] = False,
) -> None:
    """Show the logs of a run. Without options: the first rank's.

    Example: ingot logs runs/mpt-30b --errors
    """
    from ingot.launch.logs import error_lines, log_files, new_lines
    from ingot.launch.status import find_run, read_status

    folder = find_run(run)
    if errors:
        print("\n".join(error_lines(folder)))
        return
    places: dict[str, int] = {}
    asked = 0.0
    while True:
        over = False
        if follow and time.monotonic() - asked > 5:  # so as not to burden the cluster
            status, asked = read_status(folder), time.monotonic()
            over = status.over
        for line in new_lines(log_files(folder, rank), places):
            print(line, flush=True)
        if not follow:
            return
        if over:
            print(f"state: {status.state}")
            return
        time.sleep(0.5)


def stop(run: Run, now: Annotated[bool, typer.Option("--now", help="End its jobs now, saved or not.")] = False) -> None:
    """Ask a run to save and stop after its current step; the same command, or `ingot launch resume`, continues it.

    Example: ingot stop runs/mpt-30b
    """
    from ingot.launch.job_states import stop_run
    from ingot.launch.status import find_run

    print(stop_run(find_run(run), now))
