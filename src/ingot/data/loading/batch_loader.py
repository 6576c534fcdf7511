"""Batches ahead of use.

Global batch b is positions b*G to (b+1)*G of the order; a rank takes its own part of each. So the same samples stand
in the same global batch for any number of ranks, and starting at batch b is arithmetic, not replay. One thread that
gathers from memory maps outruns any GPU; worker processes, the usual way, spend more on their pipes than they gain.
"""

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from ingot.data.loading.token_dataset import Dataset

ORDER_CHUNK = 4096  # positions computed at a time: the order is numpy, cheap by the thousand
JOIN_SECONDS = 5  # a thread that is stuck in a download must not hold an exit


@dataclass(frozen=True)
class Batch:
    """A rank's part of a global batch."""

    tokens: np.ndarray  # int64 [n, S]
    labels: np.ndarray  # int64 [n, S]
    samples: np.ndarray  # int64 [n], sample ids


class BatchLoader:
    """Endless batches over the epochs of a data set."""

    def __init__(
        self,
        dataset: Dataset,
        batch_samples: int,
        *,
        seed: int,
        shuffle: bool,
        part: tuple[int, int] | None = None,
        prefetch: int = 4,
    ):
        low, high = part or (0, batch_samples)
        if not 0 <= low <= high <= batch_samples or prefetch < 1:
            raise ValueError(f"part {part} is not within a global batch of {batch_samples}, or prefetch < 1")
        self.dataset, self.batch_samples, self.prefetch = dataset, batch_samples, prefetch
        self.order = dataset.order(seed, shuffle)
        self._part = np.arange(low, high, dtype=np.int64)

    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """Global batches `start`, `start + 1`, ..., prepared by a thread that ends when the iterator does."""
        # Two queues, since those are written in C: a condition variable costs as much as gathering a small batch.
        ready: SimpleQueue[Batch | BaseException] = SimpleQueue()
        room: SimpleQueue[None] = SimpleQueue()
        closed = threading.Event()

        def prepare() -> None:
            try:
                source = self._prepare(start)
                while True:
                    room.get()
                    if closed.is_set():
                        return
                    ready.put(next(source))
            except BaseException as error:
                ready.put(error)

        for _ in range(self.prefetch):
            room.put(None)
        thread = threading.Thread(target=prepare, name="ingot-loader", daemon=True)
        thread.start()
        try:
            while not isinstance(batch := ready.get(), BaseException):
                room.put(None)
                yield batch
            raise batch
        finally:
            closed.set()
            room.put(None)
            thread.join(JOIN_SECONDS)

    def ids(self, start: int, count: int) -> np.ndarray:
        """The sample ids of this rank's part of `count` global batches from `start` on: [count, n]."""
        first = np.arange(start, start + count, dtype=np.int64)[:, None] * self.batch_samples
        return self.order.take(first + self._part)

    def _prepare(self, start: int) -> Iterator[Batch]:
        chunk = max(1, ORDER_CHUNK // max(1, len(self._part)))
        while True:
            for ids in self.ids(start, chunk):
                self.dataset.announce(self.order, start * self.batch_samples)
                yield Batch(*self.dataset.gather(ids), ids)
                start += 1
