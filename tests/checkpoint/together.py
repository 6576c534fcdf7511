"""Several ranks in one process: each is a thread."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ingot.errors import CheckpointError
from ingot.parallel.coordinator import Coordinator

T = TypeVar("T")


class Together(Coordinator):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, texts: list[str], answers: list[str], meet: threading.Barrier):
        self.rank, self.world_size = rank, len(texts)
        self.texts, self.answers, self.meet = texts, answers, meet
        self.sent = 0

    @classmethod
    def ranks(cls, world: int) -> list["Together"]:
        texts, answers, meet = [""] * world, [""] * world, threading.Barrier(world)
        return [cls(rank, texts, answers, meet) for rank in range(world)]

    def for_topic(self, topic: str) -> Coordinator:
        return self

    def gather_and_decide(self, text: str, decide: Any) -> str:
        self.texts[self.rank], self.sent = text, self.sent + len(text)
        self.meet.wait(60)
        if self.rank == 0:
            try:
                self.answers[:] = ["=" + answer for answer in decide(list(self.texts))]
            except Exception as error:
                self.answers[:] = [str(error)] * self.world_size
        self.meet.wait(60)
        answer = self.answers[self.rank]
        self.meet.wait(60)
        if not answer.startswith("="):
            raise CheckpointError(answer)
        return answer[1:]

    def broadcast(self, make: Callable[[], bytes]) -> bytes:
        text = make().decode() if self.rank == 0 else ""
        return self.gather_and_decide(text, lambda texts: texts[:1] * len(texts)).encode()


def on_all_ranks(coordinators: list[Together], work: Callable[[Together], T]) -> list[T]:
    """What `work` returns on each rank."""
    found: list[Any] = [None] * len(coordinators)

    def run(coordinator: Together) -> None:
        found[coordinator.rank] = work(coordinator)

    threads = [threading.Thread(target=run, args=(coordinator,)) for coordinator in coordinators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
