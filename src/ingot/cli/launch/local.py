"""`ingot launch local`"""

import os
from pathlib import Path
from typing import Any

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.launch.common import LOCAL, PANELS, Arguments, DryRun, RunOptions, make_training_spec
from ingot.cli.options import options_from
from ingot.launch.agent.environment import launch_variables
from ingot.launch.agent.local_ranks import Node, count_gpus
from ingot.launch.local.run import run_processes
from ingot.launch.register import register_local
from ingot.launch.spec import LaunchSpec

app = typer.Typer(add_completion=False)


@app.command("local", cls=OptionCommand)
@options_from(RunOptions, LaunchSpec, fields={*RunOptions.model_fields, *LOCAL}, panels=PANELS)
def local(arguments: Arguments = None, dry_run: DryRun = False, **options: Any) -> None:
    """Run on this machine as one node of a cluster would.

    The spec, the profile and the restarts are the same.

    Examples:
      ingot launch local mpt-125m data=./my-data
      ingot launch local mpt-125m data=./my-data --profile cpu \\
        --processes-per-node 2
    """
    here = {"nodes": 1, "gpus_per_node": count_gpus()}
    run_here(make_training_spec(arguments, here | options, is_here=True), dry_run)


def run_here(spec: LaunchSpec, dry_run: bool) -> None:
    """Run a spec on this machine, or print it; ends the command."""
    if dry_run:
        print(spec.model_dump_json(indent=1))
        return
    register_local(spec)
    run = Path(spec.run_folder)
    env = {**os.environ, **launch_variables(spec)}
    os.chdir(spec.workdir)  # `resume` may be run from another folder
    node = Node(spec.processes, spec.processes)
    raise typer.Exit(run_processes([spec.verb, *spec.arguments], node, run, env))
