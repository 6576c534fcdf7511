"""`ingot train`"""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.options import options_from
from ingot.cli.script_options import PANELS, RunArguments, ScriptSettings, script_arguments
from ingot.config.recipes import check_recipe
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.launch.agent.local_ranks import count_gpus, find_node
from ingot.launch.agent.rank_main import prepare_torch, train_rank
from ingot.launch.local.run import run_processes
from ingot.launch.register import note_train, register_train
from ingot.migrate import load_run_config
from ingot.parallel.memory_estimate import StepShape, choose_layout
from ingot.parallel.rank_env import find_rank_env
from ingot.training.runtime.early_checks import check_early, may_have_gpu
from ingot.training.runtime.lease import clear_stop_request

SEVERAL_MACHINES = "Several machines"
app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
@options_from(ScriptSettings, panels=PANELS)
def train(
    arguments: RunArguments,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing the run.")] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", help="Processes on this machine. Default: one per GPU.")
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option(help="Format of the config files: foundry, neox or megatron. Default: detected from their keys."),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option("--world_size", help="Processes on all machines.", rich_help_panel=SEVERAL_MACHINES),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node_rank", help="Number of this machine, from 0.", rich_help_panel=SEVERAL_MACHINES),
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master_addr", help="Address of machine 0.", rich_help_panel=SEVERAL_MACHINES)
    ] = None,
    master_port: Annotated[
        int | None, typer.Option("--master_port", help="A free port of machine 0.", rich_help_panel=SEVERAL_MACHINES)
    ] = None,
    **options: Any,
) -> None:
    """Train a model, or continue an interrupted run.

    The same command again continues from the newest checkpoint. Under
    torchrun or srun it joins the processes that it finds; otherwise it
    starts one per GPU, or --nproc. `ingot config keys` lists all keys.
    For another stack's files, peer_version=RELEASE chooses whose defaults
    are filled in, and conf_dir=FOLDER is where they are (NeoX's -d).

    Examples:
      ingot train mpt-125m data=./my-data max_duration=4800ba
      ingot train mpt-1b data=./my-data --nproc 8 parallel.tensor=2
    """
    prepare_torch()
    check_recipe(arguments)
    arguments = [*arguments, *script_arguments(options)]
    flags = [*(["--fresh"] if fresh else []), *(["--dialect", dialect] if dialect else [])]
    command = ["train", *flags, "--", *arguments]
    sys.exit(
        start(load_run_config(arguments, dialect), command, fresh, nproc, world_size, node_rank, master_addr,
              master_port)
    )  # fmt: skip


def start(
    config: RunConfig,
    command: list[str],
    fresh: bool,
    nproc: int | None = None,
    world_size: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> int:
    """Train in this process, or in several that each run `ingot COMMAND`. Return the exit code."""
    here = find_rank_env()
    if here.world > 1 and (nproc or world_size):
        raise ConfigError(f"a launcher has already started {here.world} processes; leave out --nproc and --world_size")
    if here.world == 1 and "RANK" not in os.environ:
        node = find_node(nproc, world_size, node_rank, master_addr, master_port, lambda: _devices(config))
        batch = config.global_train_batch_size
        work = StepShape.of(config)
        layout, _ = choose_layout(config.parallel, node.world, config.model, batch, work, node=node.processes)
        check_early(config, fresh, layout, node.processes, may_have_gpu())
        if node.world > 1 or nproc is not None:  # asked for, one process too gets a supervisor
            run = Path(config.run_folder)
            if node.is_alone:
                register_train(run)
            return run_processes(command, node, run, command=_to_continue(command, node.processes))
    if here.rank == 0:
        clear_stop_request(Path(config.run_folder))
        note_train(Path(config.run_folder))
    return train_rank(config, fresh)


def _to_continue(command: list[str], nproc: int) -> str:
    """What the user types to continue the run."""
    words = [word for word in command[1:] if word not in ("--fresh", "--")]
    return shlex.join(["ingot", "train", "--nproc", str(nproc), *words])


def _devices(config: RunConfig) -> int:
    """One process per GPU; on a CPU one process uses all cores."""
    if config.device == "cpu" or count_gpus() < 2:  # torch loads late if it cannot matter
        return 1
    import torch

    return max(1, torch.cuda.device_count())
