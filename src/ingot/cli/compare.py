"""`ingot compare`"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ingot.cli.commands import OptionCommand
from ingot.errors import ConfigError
from ingot.report.terminal.comparison import compare as compare_runs
from ingot.report.terminal.comparison import comparison_table

app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Run folders.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how runs differ: config keys, last and best metrics.

    Examples:
      ingot compare runs/a runs/b
      ingot compare runs/a runs/b runs/c --json
    """
    if len(runs) < 2:
        raise ConfigError(f"compare needs two runs or more, not only {runs[0]}")
    found = compare_runs(runs)
    if as_json:
        print(json.dumps(found))
        return
    screen = Console(highlight=False)
    if found["config"]:
        print("Config keys that differ:")
        screen.print(comparison_table(found["runs"], found["config"]))
    else:
        print("The configs are equal.")
    print("\nMetrics:")
    screen.print(comparison_table(found["runs"], found["metrics"]))
