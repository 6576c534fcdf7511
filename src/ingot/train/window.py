"""Where the time between two rows of metrics went."""

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
