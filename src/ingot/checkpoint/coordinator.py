"""What the processes of a run say to each other about checkpoints, as short texts through the store of the rendezvous.

Not by collectives: a save goes on behind the training step, and collectives of two threads would meet in any order.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ingot.errors import CheckpointError, IngotError
from ingot.parallel.rendezvous import World

TIMEOUT = timedelta(hours=2)  # of the slowest disk; that a process has died is for its supervisor to find
FAILED = "failed: "
T = TypeVar("T")


class Coordinator:
    """All processes of a run, or the only one, seen from one of them. Each thread of it has its own."""

    def __init__(self, world: World | None = None, topic: str = "checkpoint"):
        self.rank = world.place.rank if world is not None else 0
        self.count = world.place.world if world is not None else 1
        self._round = 0
        self._store: dist.Store | None = None
        if world is not None and self.count > 1:
            # its own connection: a wait on the one that all share would hold up everybody else in this process
            self._store = dist.PrefixStore(f"ingot/{topic}", world.store.clone())  # type: ignore[attr-defined]

    @property
    def first(self) -> bool:
        return self.rank == 0

    def ask(self, text: str, decide: Callable[[list[str]], str | list[str]]) -> str:
        """Every process says something, the first hears all and answers: all alike, or each by its own.

        All processes must call this in the same order; a failure to decide fails on all.
        """
        if self._store is None:
            answer = decide([text])
            return answer if isinstance(answer, str) else answer[0]
        number, store = self._round, self._store
        self._round += 1
        store.set(f"{number}/{self.rank}", text)
        if self.first:
            names = [f"{number}/{rank}" for rank in range(self.count)]
            store.wait(names, TIMEOUT)
            try:
                answers = decide([said.decode() for said in store.multi_get(names)])
            except Exception as error:
                store.set(f"{number}/all", FAILED + str(error))
                raise
            if isinstance(answers, str):
                store.set(f"{number}/all", "=" + answers)
            else:
                for rank, answer in enumerate(answers):
                    store.set(f"{number}/to/{rank}", answer)
                store.set(f"{number}/all", "each")
        store.wait([f"{number}/all"], TIMEOUT)
        heard = store.get(f"{number}/all").decode()
        if heard.startswith(FAILED):
            raise CheckpointError(f"rank 0 {heard}")
        answer = heard[1:] if heard.startswith("=") else store.get(f"{number}/to/{self.rank}").decode()
        for name in (f"{number - 2}/{self.rank}", f"{number - 2}/to/{self.rank}"):  # everybody is past that round
            store.delete_key(name)
        if self.first:
            store.delete_key(f"{number - 2}/all")
        return answer

    def agree(self, action: Callable[[], T]) -> T:
        """Do something on every process; the first problem that any of them had is raised on all."""
        own = "-"
        try:
            result = action()
        except (IngotError, OSError) as error:  # whatever it is, the others must not wait for an answer in vain
            own = str(error)
        if problem := self.ask(own, lambda said: next((text for text in said if text != "-"), "")):
            raise CheckpointError(problem)
        return result
