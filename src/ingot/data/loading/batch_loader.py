"""Prepares batches ahead of use.

Global batch b is positions b*G to (b+1)*G of the order, and a rank takes its own part of each. The same samples are in
the same global batch for any number of ranks, and starting at batch b is arithmetic, not replay. One thread that
gathers from memory maps outpaces any GPU; worker processes lose more in their pipes than they gain.
"""

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from ingot.data.loading.token_dataset import Dataset

ORDER_CHUNK = 4096  # positions computed at a time: numpy is cheap by the thousand
JOIN_SECONDS = 5  # a thread stuck in a download must not block the exit


@dataclass(frozen=True)
class Batch:
    """A rank's part of a global batch."""

    tokens: np.ndarray  # int64 [n, S]
    labels: np.ndarray  # int64 [n, S]
    samples: np.ndarray  # sample ids, int64 [n]


class BatchLoader:
    """Endless batches over the epochs of a dataset."""

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
        """Global batches `start`, `start + 1`, ..., prepared by a thread that ends with the iterator."""
        # Two queues, which are written in C: a condition variable would cost as much as gathering a small batch.
        ready: SimpleQueue[Batch | BaseException] = SimpleQueue()
        free_slots: SimpleQueue[None] = SimpleQueue()
        closed = threading.Event()

        def prepare() -> None:
            try:
                source = self._prepare(start)
                while True:
                    free_slots.get()
                    if closed.is_set():
                        return
                    ready.put(next(source))
            except BaseException as error:
                ready.put(error)

        for _ in range(self.prefetch):
            free_slots.put(None)
        thread = threading.Thread(target=prepare, name="ingot-loader", daemon=True)
        thread.start()
        try:
            while not isinstance(batch := ready.get(), BaseException):
                free_slots.put(None)
                yield batch
            raise batch
        finally:
            closed.set()
            free_slots.put(None)
            thread.join(JOIN_SECONDS)

    def ids(self, start: int, count: int) -> np.ndarray:
        """Sample ids of this rank's part of the `count` global batches from `start` on: [count, n]."""
        first = np.arange(start, start + count, dtype=np.int64)[:, None] * self.batch_samples
        return self.order.take(first + self._part)

    def _prepare(self, start: int) -> Iterator[Batch]:
        chunk = max(1, ORDER_CHUNK // max(1, len(self._part)))
        while True:
            for ids in self.ids(start, chunk):
                self.dataset.announce(self.order, start * self.batch_samples)
                yield Batch(*self.dataset.gather(ids), ids)
                start += 1
