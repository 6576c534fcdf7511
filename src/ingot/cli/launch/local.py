"""`ingot launch local`"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ingot.cli.launch.slurm import (
    Arguments,
    Config,
    Dialect,
    DryRun,
    Env,
    Gpus,
    Name,
    Processes,
    ProfileName,
    Secret,
    Updates,
    common_options,
    run_arguments,
)

if TYPE_CHECKING:
    from ingot.launch.spec import LaunchSpec


def local(
    arguments: Arguments = None,
    config: Config = None,
    updates: Updates = None,
    gpus_per_node: Gpus = None,
    processes_per_node: Processes = None,
    profile: ProfileName = None,
    name: Name = None,
    env: Env = None,
    secret: Secret = None,
    dialect: Dialect = None,
    dry_run: DryRun = False,
) -> None:
    """Run on this machine what would run on each node of a cluster: same spec, same profile, same restarts.

    Example: ingot launch local mpt-125m data=./my-copy-c4 --profile cpu --processes-per-node 2
    """
    from ingot.launch.build_spec import place_training

    if gpus_per_node is None:  # those of this machine, not of the profile's
        gpus_per_node = len(list(Path("/dev").glob("nvidia[0-9]*")))
    given = {"nodes": 1, "gpus_per_node": gpus_per_node, "processes_per_node": processes_per_node, "profile": profile,
             "name": name, "env": env, "secret": secret, "mounts": None}  # fmt: skip
    spec, notes = place_training(run_arguments(arguments, config, updates), common_options(given), dialect)
    for note in notes:
        print(note, file=sys.stderr)
    run_here(spec, dry_run)


def run_here(spec: "LaunchSpec", dry_run: bool) -> None:
    """Run a spec on this machine; ends the command."""
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
    os.chdir(spec.workdir)  # of the command that was first given
    node = Node(spec.processes, spec.processes)
    raise typer.Exit(run_processes([spec.verb, *spec.arguments], node, run, env))
