"""Progress: a bar or a percentage on a terminal, a line now and then elsewhere, nothing in the first two seconds."""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from ingot.plurals import count_of

if TYPE_CHECKING:
    from rich.progress import Progress

_QUIET_SECONDS = 2.0
_LINE_SECONDS = 10.0

T = TypeVar("T")


def follow(
    what: str, items: Iterable[T], size: Callable[[T], int] = lambda item: 1, total: int | None = None
) -> Iterator[T]:
    """Yield the items; after two seconds, print the share that is done to standard error, in the first process.

    total: the sum of all sizes, where the items are not a sequence.
    """
    total, done = sum(map(size, items)) if total is None else total, 0
    pause, end = (0.2, "\r") if sys.stderr.isatty() else (_LINE_SECONDS, "\n")
    shown = time.monotonic() + _QUIET_SECONDS - pause
    for item in items:
        yield item
        done += size(item)
        if time.monotonic() - shown >= pause and os.environ.get("RANK", "0") == "0":
            shown = time.monotonic()
            print(f"{what}: {min(done / max(total, 1), 1.0):.0%}", end=end, file=sys.stderr, flush=True)


class PrepareProgress:
    """Counts what workers report and shows it. Safe to call from several threads."""

    def __init__(self, show: Callable[[str], None] | None = None):
        self._show = show
        self._lock = threading.Lock()
        self._bar: Progress | None = None

    def say(self, line: str) -> None:
        """Show one line."""
        if self._show:
            self._show(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def start(self, total: int, resumed: int = 0) -> None:
        """Begin to count; total: bytes of all input files."""
        self.total, self.done, self.skipped = max(total, 1), 0, 0
        self.counts: Counter[str] = Counter()
        self.began = self.last_line = time.monotonic()
        if resumed:
            self.say(f"continuing: {count_of(resumed, 'piece')} already done")

    def advance(self, counts: dict[str, int]) -> None:
        """Count encoded documents, their bytes and their units."""
        with self._lock:
            self.counts.update(counts)
        self.refresh()

    def consumed(self, size: int, earlier: bool = False) -> None:
        """Count bytes of input files that are finished, by this run or an earlier one."""
        with self._lock:
            self.done += size
            self.skipped += size if earlier else 0

    def refresh(self) -> None:
        """Show the state, at most every few seconds."""
        now = time.monotonic()
        if now - self.began < _QUIET_SECONDS:
            return
        with self._lock:
            if self._show is None and sys.stderr.isatty():
                self._draw(now)
            elif now - self.last_line >= _LINE_SECONDS:
                self.last_line = now
                self.say(f"{min(self.done / self.total, 1.0):.0%} {self._rates(now)}")

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _rates(self, now: float) -> str:
        seconds = max(now - self.began, 1e-6)
        rates = {what: count / seconds for what, count in self.counts.items()}
        text = f"{rates.get('documents', 0):,.0f} docs/s, {rates.get('bytes', 0) / 1e6:,.1f} MB/s, "
        text += f"{rates.get('units', 0) / 1e6:,.2f} M tokens/s"
        if (fresh := self.done - self.skipped) > 0:
            text += f", {timedelta(seconds=int((self.total - self.done) * seconds / fresh))} left"
        return text

    def _draw(self, now: float) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=self.total)
            self._bar.start()
        self._bar.update(self._task, completed=min(self.done, self.total), description=self._rates(now))
