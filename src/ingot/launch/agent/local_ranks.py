"""Which ranks this machine starts, by the options or the variables of Composer's launcher."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import ConfigError
from ingot.parallel.rank_env import DEFAULT_PORT


@dataclass(frozen=True)
class Node:
    """This machine's share of a run's ranks."""

    processes: int
    world: int
    node_rank: int = 0
    address: str = "127.0.0.1"
    port: int | None = None
    """None on a single machine: any free port."""

    @property
    def first_rank(self) -> int:
        return self.node_rank * self.processes

    @property
    def is_alone(self) -> bool:
        return self.world == self.processes


def find_node(
    nproc: int | None,
    world_size: int | None,
    node_rank: int | None,
    address: str | None,
    port: int | None,
    devices: Callable[[], int],
    env: Mapping[str, str] = os.environ,
) -> Node:
    """How many ranks to start here, and where they meet."""
    if "RANK" not in env:  # with RANK, a launcher has started this very process
        nproc = nproc if nproc is not None else _number(env, "LOCAL_WORLD_SIZE")
        world_size = world_size if world_size is not None else _number(env, "WORLD_SIZE")
        node_rank = node_rank if node_rank is not None else _number(env, "NODE_RANK")
        address = address or env.get("MASTER_ADDR")
        port = port or _number(env, "MASTER_PORT")
    processes = nproc if nproc is not None else devices()
    world = world_size if world_size is not None else processes
    if processes < 1 or world < 1:
        raise ConfigError(f"--nproc {processes}, --world_size {world}: there must be at least one process")
    if world % processes:
        raise ConfigError(f"--world_size {world} must be a multiple of --nproc {processes}")
    node = node_rank or 0
    if not 0 <= node < world // processes:
        raise ConfigError(
            f"--node_rank {node}: {world} processes, {processes} on each machine, make machines 0 to "
            f"{world // processes - 1}"
        )
    if world == processes:
        return Node(processes, world)
    if address is None or node_rank is None:
        raise ConfigError("several machines need --master_addr (the first machine's) and --node_rank (this one's)")
    return Node(processes, world, node, address, port or DEFAULT_PORT)


def count_gpus() -> int:
    """GPUs of this machine, without loading torch."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _number(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"the environment variable {name}={value!r} is not a number") from None
