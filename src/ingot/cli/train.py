"""`ingot train`"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.errors import EXIT_CONTINUE, ConfigError

if TYPE_CHECKING:
    from ingot.config.run import RunConfig


def train(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RECIPE_OR_FILES [KEY=VALUE]...", help="Recipe, config files, overrides.")
    ],
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing the run.")] = False,
    dialect: Annotated[
        str | None, typer.Option(help="Whose keys the files have: foundry, neox, megatron. Default: seen from them.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", help="Processes on this machine. Default: one per GPU.")
    ] = None,
    world_size: Annotated[int | None, typer.Option("--world_size", help="Processes on all machines.")] = None,
    node_rank: Annotated[int | None, typer.Option("--node_rank", help="Number of this machine, from 0.")] = None,
    master_addr: Annotated[str | None, typer.Option("--master_addr", help="Address of machine 0.")] = None,
    master_port: Annotated[int | None, typer.Option("--master_port", help="A free port of machine 0.")] = None,
) -> None:
    """Train a model. The same command again continues an interrupted run.

    Under torchrun or srun it joins the processes that it finds; alone, it starts one per GPU, or --nproc.

    Example: ingot train mpt-125m data=./my-copy-c4 max_duration=4800ba save_folder=runs/first

    Example: ingot train mpt-1b data=./my-copy-c4 --nproc 8 parallel.tensor=2
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # torch's newer name for the same
        # before torch is loaded: a model that fills a GPU has no room for fragments
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from ingot.config.recipes import check_recipe
    from ingot.launch.supervisor.local import run_processes
    from ingot.launch.supervisor.local_ranks import find_node
    from ingot.migrate import load_run_config
    from ingot.parallel.memory_estimate import StepShape, choose_layout
    from ingot.parallel.rank_env import find_rank_env
    from ingot.training.runtime.heartbeat import dump_stacks_on_request

    check_recipe(arguments)
    config = load_run_config(arguments, dialect)
    place = find_rank_env()
    if place.world > 1 and (nproc or world_size):
        raise ConfigError(f"a launcher has already started {place.world} processes; leave out --nproc and --world_size")
    if place.world == 1 and "RANK" not in os.environ:
        node = find_node(nproc, world_size, node_rank, master_addr, master_port, lambda: _devices(config))
        batch = config.global_train_batch_size
        choose_layout(config.parallel, node.world, config.model, batch, StepShape.of(config), node=node.processes)
        if node.world > 1 or nproc is not None:  # asked for, one process too gets a supervisor
            options = [*(["--fresh"] if fresh else []), *(["--dialect", dialect] if dialect else [])]
            command = ["train", *options, "--", *arguments]
            sys.exit(run_processes(command, node, Path(config.run_folder)))
    from ingot.api import train as run

    dump_stacks_on_request()
    result = run(config, fresh)
    if place.rank == 0:
        print(f"run folder: {result.folder}")
    if result.stopped:
        if place.rank == 0:
            print("the same command continues", file=sys.stderr)
        sys.exit(EXIT_CONTINUE)


def _devices(config: "RunConfig") -> int:
    """One process per GPU; on a CPU one process uses all cores."""
    if config.device == "cpu" or not Path("/dev/nvidia1").exists():  # torch loads late if it cannot matter
        return 1
    import torch

    return max(1, torch.cuda.device_count())
