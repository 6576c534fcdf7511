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

    place: RankEnv
    store: dist.Store
    timeout: timedelta

    def agree(self, what: str, value: dict[str, Any]) -> None:
        """Fail on all ranks, with both values shown, unless `value` is the same everywhere."""
        rank, size = self.place.rank, self.place.world
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
        missing = list(range(other, self.place.world))
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
                f"after {self.timeout.total_seconds():g} s, {len(missing or expected)} of {self.place.world} processes "
                f"had not arrived at {self.place.address}:{self.place.port}: rank {names} (seen from rank "
                f"{self.place.rank}); look at their logs, or raise parallel.join_timeout"
            ) from None


def join_world(place: RankEnv, device: torch.device, timeout_seconds: float) -> World:
    """Meet the other processes, make sure that all are there and count the same, and start torch's collectives."""
    timeout = timedelta(seconds=timeout_seconds)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent already serves the store
    try:
        descriptor = os.environ.get(STORE_FD)
        store: dist.Store = dist.TCPStore(
            place.address,
            place.port if place.world > 1 else 0,
            is_master=place.rank == 0 and not agent,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=int(descriptor) if descriptor is not None else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise WorldError(
                f"port {place.port} is in use on this machine; choose another with --master_port or MASTER_PORT"
            ) from None
        raise WorldError(
            f"rank {place.rank} found no rank 0 at {place.address}:{place.port} within {timeout_seconds:g} s; check "
            "MASTER_ADDR and MASTER_PORT, and that rank 0 is running"
        ) from None
    # each life of the processes has its own keys: torchrun's store outlives a restart
    store = dist.PrefixStore(f"life-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    world = World(place, store, timeout)
    world.agree("arrival", {"the number of processes": place.world})
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.world,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    return world


def leave_world() -> None:
    """End the collectives. Without the barrier, a process that leaves early can abort the others at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
