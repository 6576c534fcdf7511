"""Short messages between the ranks of a run, through the key-value store of the rendezvous.

Not collectives: a save runs in its own thread next to the training step, and the collectives of two threads would be
matched in any order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from ingot.errors import CheckpointError, IngotError
from ingot.parallel.rendezvous import World

TIMEOUT = timedelta(hours=2)  # long enough for the slowest disk; the launcher detects ranks that have died
OK, FAILED = "=", "!"  # first character of an answer
T = TypeVar("T")


class Coordinator(ABC):
    """All ranks of a run, seen from one of them. Each thread needs its own, from `for_topic`."""

    rank = 0
    world_size = 1
    last_save_seconds: float | None = None
    """How long to wait for a save in flight when this rank ends; None for as long as it takes."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @abstractmethod
    def for_topic(self, topic: str) -> "Coordinator":
        """A coordinator of the same ranks, for another thread; all ranks use the same topic there."""

    @abstractmethod
    def gather_and_decide(self, text: str, decide: Callable[[list[str]], list[str]]) -> str:
        """Send a text to rank 0, where `decide` turns the texts of all ranks into one answer for each.

        All ranks must call this in the same order. If `decide` fails, every rank raises an error.
        """

    def broadcast(self, make: Callable[[], bytes]) -> bytes:
        """What `make` returns on rank 0, on every rank; an error there is raised on all.

        A collective, in which the ranks pass the bytes on to one another: not for other threads than the main one.
        """
        return make()

    def run_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Do something on every rank; the first error on any of them is raised on all."""
        problem = ""
        try:
            result = action()
        except (IngotError, OSError) as error:  # the other ranks must not wait for this one in vain
            problem = str(error) or type(error).__name__
        if problem := self.gather_and_decide(problem, lambda texts: [next(filter(None, texts), "")] * len(texts)):
            raise CheckpointError(problem)
        return result


class LocalCoordinator(Coordinator):
    """The only rank of a run."""

    def for_topic(self, topic: str) -> Coordinator:
        return self

    def gather_and_decide(self, text: str, decide: Callable[[list[str]], list[str]]) -> str:
        return decide([text])[0]


class StoreCoordinator(Coordinator):
    """One of several ranks that share a store."""

    last_save_seconds = 30.0  # the others may have failed, and a save needs them all

    def __init__(self, world: World, topic: str = "checkpoint"):
        self.rank, self.world_size, self._world = world.rank_env.rank, world.rank_env.world, world
        self._round = 0
        # its own connection: waiting on the shared one would block the other threads of this process
        self._store: Any = dist.PrefixStore(f"ingot/{topic}", world.store.clone())  # type: ignore[attr-defined]  # not in torch's stubs

    def for_topic(self, topic: str) -> Coordinator:
        return StoreCoordinator(self._world, topic)

    def gather_and_decide(self, text: str, decide: Callable[[list[str]], list[str]]) -> str:
        sent, answered = ([f"{self._round}/{way}/{rank}" for rank in range(self.world_size)] for way in ("to", "from"))
        self._round += 1
        self._store.set(sent[self.rank], text)
        if self.is_first:
            self._store.wait(sent, TIMEOUT)
            texts = [text.decode() for text in self._store.multi_get(sent)]
            try:
                answers = [OK + answer for answer in decide(texts)]
            except Exception as error:
                self._store.multi_set(answered, [f"{FAILED}rank 0 failed: {error}"] * self.world_size)
                raise
            self._store.multi_set(answered, answers)
        self._store.wait([answered[self.rank]], TIMEOUT)
        answer = self._store.get(answered[self.rank]).decode()
        for key in (sent[self.rank], answered[self.rank]):  # rank 0 has read the first, or it had not answered
            self._store.delete_key(key)
        if answer.startswith(FAILED):
            raise CheckpointError(answer.removeprefix(FAILED))
        return answer.removeprefix(OK)

    def broadcast(self, make: Callable[[], bytes]) -> bytes:
        data, problem = b"", ""
        if self.is_first:
            try:
                data = make()
            except (IngotError, OSError) as error:
                problem = str(error) or type(error).__name__
                data = problem.encode()
        sizes = torch.tensor([len(data), bool(problem), xxhash.xxh3_64_intdigest(data) >> 1])
        dist.broadcast(sizes, 0)
        size, failed, digest = sizes.tolist()
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(content, 0)
        data = content.numpy().tobytes()
        intact = xxhash.xxh3_64_intdigest(data) >> 1 == digest
        problem = data.decode() if failed and intact else "" if intact else f"rank {self.rank} received damaged data"
        if problem := self.gather_and_decide(problem, lambda texts: [next(filter(None, texts), "")] * len(texts)):
            raise CheckpointError(problem)
        return data
