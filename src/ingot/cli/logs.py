"""`ingot logs`"""

import time
from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.status import Run
from ingot.launch.monitor.logs import check_rank, error_lines, log_files, new_lines
from ingot.launch.monitor.status import find_run, read_status

ASK_SECONDS = 5.0  # between questions to the cluster, so as not to burden it
app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing lines as they are written.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Log of this rank. Default: the main log.")] = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="Causes, then the log of the rank that failed last.")
    ] = False,
) -> None:
    """Show or follow the logs of a run.

    Examples:
      ingot logs runs/mpt-30b -f
      ingot logs runs/mpt-30b --errors
    """
    folder = find_run(run)
    if errors:
        print("\n".join(error_lines(folder)))
        return
    if rank is not None and not follow:  # it may begin in a moment
        check_rank(folder, rank)
    positions: dict[str, int] = {}
    status, asked = None, 0.0
    while True:
        if follow and time.monotonic() - asked > ASK_SECONDS:
            status, asked = read_status(folder), time.monotonic()
        for line in new_lines(log_files(folder, rank), positions):
            print(line, flush=True)
        if not follow:
            return
        if status is not None and status.over:
            print(f"state: {status.state}")
            return
        time.sleep(0.5)
