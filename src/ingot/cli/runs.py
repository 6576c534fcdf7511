"""`ingot runs`"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ingot.cli.commands import OptionCommand
from ingot.launch.monitor.status import read_status
from ingot.report.terminal.run_table import find_run_folders, run_line, table_of

app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def runs(
    root: Annotated[Path, typer.Argument(help="Folder of run folders.")] = Path("runs"),
    state: Annotated[str | None, typer.Option(help="Only runs whose state begins so, such as running.")] = None,
    name: Annotated[str | None, typer.Option(help="Only runs whose name contains this.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List runs with state, step, loss, speed and last checkpoint.

    Examples:
      ingot runs
      ingot runs /fsx/runs --state running --json
    """
    lines = [run_line(folder, read_status(folder).state) for folder in find_run_folders(root)]
    shown = [line for line in lines if line.state.startswith(state or "") and (name or "") in line.name]
    if as_json:
        print(json.dumps([asdict(line) for line in shown]))
    elif not shown:
        print(f"no such runs in {root}")
    else:
        Console(highlight=False).print(table_of(shown))
