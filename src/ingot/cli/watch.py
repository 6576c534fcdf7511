"""`ingot watch`"""

import time
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ingot.cli.commands import OptionCommand
from ingot.cli.status import Run
from ingot.launch.monitor.status import find_run, read_status
from ingot.report.terminal.curve import draw_curve
from ingot.storage.json_lines import read_json_lines
from ingot.training.runtime.run_files import METRICS

app = typer.Typer(add_completion=False)
LOSS = "loss/train/total"
HEIGHT = 10  # lines of the curve
MOST_BYTES = 16_000_000  # of the metrics: the end of a long run


@app.command(cls=OptionCommand)
def watch(
    run: Run,
    seconds: Annotated[float, typer.Option(min=0.2, help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the view once and end.")] = False,
) -> None:
    """Show the loss curve and state of a run, live in the terminal.

    Ends when the run does, or with Ctrl-C, which the run does not notice.

    Examples:
      ingot watch runs/first
      ingot watch runs/first --once
    """
    folder, screen = find_run(run), Console(highlight=False)

    def view() -> tuple[Group, bool]:
        losses = [row[LOSS] for row in read_json_lines(folder / METRICS, MOST_BYTES) if row.get(LOSS) is not None]
        status = read_status(folder)
        curve = draw_curve(losses, min(screen.width, 120) - 1, HEIGHT)
        return Group(*map(Text, [str(folder), *curve, *status.lines()])), status.over

    shown, is_over = view()
    if once or not screen.is_terminal:
        screen.print(shown)
        return
    with Live(shown, console=screen, auto_refresh=False) as live:
        while not is_over:
            time.sleep(seconds)
            shown, is_over = view()
            live.update(shown, refresh=True)
