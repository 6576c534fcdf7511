"""Batches ahead of use.

Global batch b is positions b*G to (b+1)*G of the order; a rank takes its own part of each. So the same samples stand
in the same global batch for any number of ranks, and starting at batch b is arithmetic, not replay. One thread that
gathers from memory maps outruns any GPU; worker processes, the usual way, spend more on their pipes than they gain.
"""

import threading
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from ingot.data.dataset import Dataset

ORDER_CHUNK = 4096  # positions computed at a time: the order is numpy, cheap by the thousand


@dataclass(frozen=True)
class Batch:
    """A rank's part of a global batch."""

    tokens: np.ndarray  # int64 [n, S]
    labels: np.ndarray  # int64 [n, S]
    samples: np.ndarray  # int64 [n], sample ids


class Loader:
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
        ahead = _Ahead(self._prepare(start), self.prefetch)
        try:
            while True:
                yield ahead.next()
        finally:
            ahead.close()

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


class _Ahead:
    """A thread that keeps up to `depth` results of an iterator ready."""

    def __init__(self, source: Iterator[Batch], depth: int):
        self._ready: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(source, depth), name="ingot-loader", daemon=True)
        self._thread.start()

    def _run(self, source: Iterator[Batch], depth: int) -> None:
        try:
            for batch in source:
                with self._changed:
                    self._ready.append(batch)
                    self._changed.notify()
                    while len(self._ready) >= depth and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify()

    def next(self) -> Batch:
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            batch = self._ready.popleft()
            self._changed.notify()
            return batch

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
