"""`ingot report`"""

from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand
from ingot.errors import ConfigError
from ingot.report.page.live import serve
from ingot.report.page.page import write_report

app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; with --live also a folder of them.")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="HTML file. Default: report.html in the run.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve the page and update it while a run goes on.")] = False,
    port: Annotated[int, typer.Option(help="Port for --live; 0 for any free one.", min=0, max=65535)] = 8321,
    host: Annotated[str, typer.Option(help="Address for --live. Others can read the report at 0.0.0.0.")] = "127.0.0.1",
) -> None:
    """Show runs in a browser, as one file or live.

    One HTML file with curves, tables and config that needs no network.
    Several runs are drawn into the same charts.

    Examples:
      ingot report runs/first
      ingot report runs/a runs/b -o compare.html
      ingot report runs/ --live
    """
    if live:
        serve(runs, host, port, lambda address: print(f"{address} (Ctrl-C ends)", flush=True))
        return
    if len(runs) > 1 and out is None:
        raise ConfigError("several runs need a name for their report: -o report.html")
    target = out or runs[0] / "report.html"
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; name a file, such as {target / 'report.html'}")
    write_report(runs, target)
    print(f"wrote {target}")
