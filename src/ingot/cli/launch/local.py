"""`ingot launch local`"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ingot.cli.launch.common import LOCAL, Arguments, Config, Dialect, DryRun, Updates, load_spec, training_spec
from ingot.cli.options import options_from

if TYPE_CHECKING:
    from ingot.launch.spec import LaunchSpec


@options_from(load_spec, fields=LOCAL)
def local(
    arguments: Arguments = None,
    config: Config = None,
    updates: Updates = None,
    dialect: Dialect = None,
    dry_run: DryRun = False,
    **options: Any,
) -> None:
    """Run on this machine what each node of a cluster would run: same spec, same profile, same restarts.

    Example: ingot launch local mpt-125m data=./my-copy-c4 --profile cpu --processes-per-node 2
    """
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    options = {"nodes": 1, "gpus_per_node": gpus, **options}
    run_here(training_spec(arguments, config, updates, dialect, options), dry_run)


def run_here(spec: "LaunchSpec", dry_run: bool) -> None:
    """Run a spec on this machine, or print it; ends the command."""
    from ingot.launch.protocol import LaunchFolder
    from ingot.launch.supervisor.local import run_processes
    from ingot.launch.supervisor.local_ranks import Node
    from ingot.launch.supervisor.node_agent import NodeAgent

    if dry_run:
        print(spec.model_dump_json(indent=1))
        return
    spec.write()
    run = Path(spec.run_folder)
    LaunchFolder(run).add_job("local", str(os.getpid()))
    env = {**os.environ, **NodeAgent(spec, os.environ).variables()}
    os.chdir(spec.workdir)  # `resume` may be run from another folder
    node = Node(spec.processes, spec.processes)
    raise typer.Exit(run_processes([spec.verb, *spec.arguments], node, run, env))
