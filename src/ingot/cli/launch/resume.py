"""`ingot launch resume`"""

from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.launch.common import DryRun
from ingot.cli.launch.local import run_here
from ingot.cli.launch.slurm import submit
from ingot.launch.kubernetes.objects import find_kind, new_launch_id, render
from ingot.launch.monitor.status import find_run
from ingot.launch.protocol import LaunchFolder
from ingot.launch.submit import spec_to_resume, submit_to_kubernetes

app = typer.Typer(add_completion=False)


@app.command("resume", cls=OptionCommand)
def resume(
    run: Annotated[str, typer.Argument(metavar="RUN_OR_JOB", help="Run folder, or id of a job.")],
    time: Annotated[str | None, typer.Option("--time", "-t", help="Another time limit (Slurm).")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", "-x", help="A node not to use, in addition; repeatable.")
    ] = None,
    use: Annotated[
        list[str] | None, typer.Option("--use", help="A node to use again that was excluded; repeatable.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Launch a run again, without the nodes that failed.

    It continues from its last checkpoint.

    Examples:
      ingot launch resume runs/mpt-30b
      ingot launch resume 12345 --time 48:00:00 --dry-run
      ingot launch resume runs/mpt-30b --use n17
    """
    folder = find_run(run).absolute()
    spec, back_end = spec_to_resume(folder, time, exclude or (), use or ())
    if back_end == "slurm":
        submit(spec, dry_run)
    elif back_end == "local":
        run_here(spec, dry_run)
    else:
        kind, files = find_kind(back_end.rpartition("/")[2]), LaunchFolder(folder).kept_files()
        if dry_run:
            print(render(spec, kind, new_launch_id(), files), end="")
        else:
            print(submit_to_kubernetes(spec, kind, files)[1])
