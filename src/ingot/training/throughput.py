"""Where the time between two rows of metrics went, and which process the others wait for."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Window:
    """Counts batches and the seconds that the loop did not spend on them."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.batches = 0
        self.data = self.checkpoint = 0.0

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the seconds within as waiting for `data` or `checkpoint`."""
        began = time.perf_counter()
        yield
        setattr(self, what, getattr(self, what) + time.perf_counter() - began)

    @property
    def seconds(self) -> float:
        """All of it."""
        return time.perf_counter() - self.start


class StragglerWatch:
    """Names a process that takes longer than the others for what it does by itself, row after row.

    In a step that all finish together, all take as long; so what counts is the time not spent waiting in collectives.
    """

    FACTOR, ROWS, QUIET = 1.5, 5, 100  # of the median; rows in a row; rows before it is said again

    def __init__(self) -> None:
        self.rank, self.rows, self.silent = -1, 0, 0

    def look(self, own: list[float]) -> str:
        """Given each rank's own seconds per batch: a warning, or nothing."""
        slowest = max(range(len(own)), key=own.__getitem__)
        usual = statistics.median(own)
        late = own[slowest] > self.FACTOR * usual and own[slowest] - usual > 0.02
        self.rows = self.rows + 1 if late and slowest == self.rank else int(late)
        self.rank = slowest if late else -1
        self.silent = max(0, self.silent - 1)
        if self.rows < self.ROWS or self.silent:
            return ""
        self.silent = self.QUIET
        return (
            f"rank {slowest} is slower than the others: {own[slowest]:.3f} s of its own per batch, they {usual:.3f} s"
        )
