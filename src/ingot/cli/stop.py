"""`ingot stop`"""

from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.status import Run
from ingot.launch.monitor.status import find_run
from ingot.launch.monitor.stop import stop_run

app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def stop(
    run: Run, now: Annotated[bool, typer.Option("--now", help="End its jobs now, even if they have not saved.")] = False
) -> None:
    """Ask a run to save and stop.

    It stops after its current step, and a job that waits in the queue ends
    when it starts. The same command, or `ingot launch resume`, continues
    it. A run that is not running is left as it is.

    Examples:
      ingot stop runs/mpt-30b
      ingot stop 12345 --now
    """
    print(stop_run(find_run(run), now))
