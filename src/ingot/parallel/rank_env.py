"""Which of how many processes this is, from the variables that torchrun, Slurm's srun or our own launcher set."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ingot.errors import ConfigError

DEFAULT_PORT = 29500
ATTEMPT = "INGOT_ATTEMPT"  # of our own launcher, in the environment of the processes that it starts
ENDED_EPOCH = "INGOT_ENDED_EPOCH"  # of an earlier attempt whose first ranks have ended, as their agent has confirmed
EPOCH = "INGOT_EPOCH"  # of the attempt: higher than that of any earlier attempt of the run
COPY_FDS = "INGOT_COPY_FDS"  # descriptors of the memory that keeps copies of the state, one for each local rank
PEER_COPY_BYTES = "INGOT_PEER_COPY_BYTES"  # set if another node keeps copies: bytes of other nodes' that this one keeps
STORE_FD = "INGOT_STORE_FD"  # rank 0 of our own launcher: the descriptor of a socket that already listens


@dataclass(frozen=True)
class RankEnv:
    """A process among the processes of a run."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT


def find_rank_env(env: Mapping[str, str] = os.environ) -> RankEnv:
    """The rank of this process; alone in its world if nothing says otherwise."""
    if "RANK" in env and "WORLD_SIZE" in env:
        names = {"rank": "RANK", "world": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_world": "LOCAL_WORLD_SIZE"}
        address = env.get("MASTER_ADDR", "127.0.0.1")
    elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:  # set by srun, not in a batch script or salloc shell
        names = {"rank": "SLURM_PROCID", "world": "SLURM_STEP_NUM_TASKS", "local_rank": "SLURM_LOCALID"}
        hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
        address = env.get("MASTER_ADDR") or first_host(hosts) or "127.0.0.1"
    else:
        return RankEnv()
    number = {field: _integer(env, name) for field, name in names.items() if name in env}
    if match := re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "")):  # such as 8(x4); torchrun says its own
        number.setdefault("local_world", int(match[0]))
    # jobs of one cluster account that share a node must not share a port
    port = _integer(env, "MASTER_PORT") if "MASTER_PORT" in env else DEFAULT_PORT
    if "SLURM_JOB_ID" in env and "MASTER_PORT" not in env:
        port = 20000 + _integer(env, "SLURM_JOB_ID") % 10000
    found = RankEnv(**number, address=address, port=port)
    if not 0 <= found.rank < found.world:
        raise ConfigError(f"{names['rank']}={found.rank} is out of range for {names['world']}={found.world}")
    return found


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list, such as n[01-03,7],m1."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+))?([^,\[\]]*)?", nodes)
    return match[1] + (match[2] or "") if match else ""


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(f"the environment variable {name}={env[name]!r} is not a number") from None
