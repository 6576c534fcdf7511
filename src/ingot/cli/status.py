"""`ingot status`"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand
from ingot.launch.monitor.status import find_run, read_status

Run = Annotated[str, typer.Argument(metavar="RUN_OR_JOB", help="Run folder, or id of a job launched from here.")]
app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def status(run: Run, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show state, step, loss, speed and failures of a run.

    Of a launched run also since when it is in that state, what happens next
    and why, its attempts with cause and node, and the command that helps.

    Examples:
      ingot status runs/mpt-30b
      ingot status 12345 --json
    """
    found = read_status(find_run(run))
    print(json.dumps(asdict(found)) if as_json else "\n".join(found.lines()))
