"""`ingot sync`"""

import os
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand
from ingot.report.trackers.sync import sync_run

app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def sync(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    to: Annotated[str, typer.Option("--to", help="wandb, mlflow, comet, trackio or tensorboard.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the tracker, as in loggers.NAME.")
    ] = None,
) -> None:
    """Send what a run has logged to an experiment tracker.

    Sends the rows of metrics.jsonl that the tracker does not have yet, in
    the same tracker run as before.

    Examples:
      ingot sync runs/first --to mlflow tracking_uri=http://127.0.0.1:5000
      ingot sync runs/first --to wandb project=my-project
    """
    print(sync_run(run, to, settings or [], list(os.environ)))
