"""Joining the processes of a run, and finding out at once if they do not belong together.

Everything before the first collective goes through the key-value store of the rendezvous: it says who is missing and
who differs, where a collective would only hang.
"""

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ingot.errors import ConfigError, IngotError
from ingot.parallel.rank_env import STORE_FD, RankEnv


class WorldError(IngotError):
    """The processes of a run did not come together."""

    exit_code = 1


@dataclass(frozen=True)
class World:
    """The processes of a run, joined."""

    rank_env: RankEnv
    store: dist.Store
    timeout: timedelta

    def agree(self, what: str, value: dict[str, Any]) -> None:
        """Fail on all ranks, with both values shown, unless `value` is the same everywhere."""
        rank, size = self.rank_env.rank, self.rank_env.world
        self.store.set(f"ingot/{what}/{rank}", json.dumps(value, sort_keys=True))
        if rank == 0:
            verdict = next(filter(None, (self._compare(what, value, other) for other in range(1, size))), "")
            self.store.set(f"ingot/{what}/verdict", verdict or "same")
        else:
            self._wait(f"ingot/{what}/verdict", [0])
            verdict = self.store.get(f"ingot/{what}/verdict").decode()
        if verdict not in ("", "same"):
            raise ConfigError(verdict)

    def _compare(self, what: str, mine: dict[str, Any], other: int) -> str:
        missing = list(range(other, self.rank_env.world))
        self._wait(f"ingot/{what}/{other}", missing)
        theirs = json.loads(self.store.get(f"ingot/{what}/{other}"))
        for key in mine.keys() | theirs.keys():
            if mine.get(key) != theirs.get(key):
                return f"rank 0 and rank {other} differ in {key}: {mine.get(key)} and {theirs.get(key)}"
        return ""

    def _wait(self, key: str, expected: list[int]) -> None:
        try:
            self.store.wait([key], self.timeout)
        except dist.DistStoreError:
            step = key.rpartition("/")[0]
            missing = [r for r in expected if not self.store.check([f"{step}/{r}"])]
            names = ", ".join(map(str, missing or expected))
            raise WorldError(
                f"after {self.timeout.total_seconds():g} s, {len(missing or expected)} of {self.rank_env.world} "
                f"processes had not arrived at {self.rank_env.address}:{self.rank_env.port}: rank {names} (seen from "
                f"rank {self.rank_env.rank}); look at their logs, or raise parallel.join_timeout"
            ) from None


def join_world(rank_env: RankEnv, device: torch.device, timeout_seconds: float) -> World:
    """Meet the other processes, make sure that all are there and count the same, and start torch's collectives."""
    timeout = timedelta(seconds=timeout_seconds)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent already serves the store
    try:
        descriptor = os.environ.get(STORE_FD)
        store: dist.Store = dist.TCPStore(
            rank_env.address,
            rank_env.port if rank_env.world > 1 else 0,
            is_master=rank_env.rank == 0 and not agent,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=int(descriptor) if descriptor is not None else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise WorldError(
                f"port {rank_env.port} is in use on this machine; choose another with --master_port or MASTER_PORT"
            ) from None
        raise WorldError(
            f"rank {rank_env.rank} found no rank 0 at {rank_env.address}:{rank_env.port} within {timeout_seconds:g} s; "
            "check MASTER_ADDR and MASTER_PORT, and that rank 0 is running"
        ) from None
    # each life of the processes has its own keys: torchrun's store outlives a restart
    store = dist.PrefixStore(f"life-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    world = World(rank_env, store, timeout)
    world.agree("arrival", {"the number of processes": rank_env.world})
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank_env.rank, world_size=rank_env.world,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    return world


def leave_world() -> None:
    """End the collectives. Without the barrier, a process that leaves early can abort the others at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
