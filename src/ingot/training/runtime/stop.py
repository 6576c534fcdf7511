"""Asking a run to stop: it saves after the step at hand and ends, on all processes after the same step.

TERM, USR2, HUP (the terminal is gone), one INT (Ctrl-C), a file STOP in the run folder and `max_wall_time` all mean
that. A second INT means: now. A request may reach one process only, so it is spread over all: a flag is reduced in the
background while a step runs, and looked at after it. Nothing on the device waits for it.
"""

import signal
import threading
import time
from pathlib import Path
from types import FrameType

from ingot.parallel.executors.base import Executor
from ingot.training.runtime.hangup import ignores_hangup, leave_terminal
from ingot.training.runtime.run_files import STOP

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
STOP_FILE_SECONDS = 1.0  # how often the run folder is looked at

# numbered, so that the greatest of all processes can be found by a reduction
REASONS = ("", "max_wall_time is over", "the file STOP is in the run folder", *(s.name for s in SIGNALS))


def start_compilers() -> None:
    """Start torch's processes that compile kernels, deaf to the signals that ask for a stop.

    Such a signal goes to a whole process group where `timeout` or a batch system sends it. This process takes it as a
    request; theirs would end, and torch waits for ever for what they were to compile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a new process inherits it
    try:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """Listens for requests on this process. Signal handlers belong to the main thread; elsewhere there are none."""

    def __init__(self, folder: Path, max_seconds: float | None):
        self.folder = folder
        self.deadline = time.monotonic() + max_seconds if max_seconds is not None else None
        self.number = 0
        self.looked = 0.0
        self.before: dict[signal.Signals, object] = {}
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self._handle) for s in SIGNALS if not ignores_hangup(s)}

    def close(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.number == REASONS.index("SIGINT"):
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            leave_terminal()
        self.number = REASONS.index(signal.Signals(number).name)

    def _look(self) -> int:
        now = time.monotonic()
        if not self.number and self.deadline is not None and now >= self.deadline:
            self.number = 1
        if not self.number and now - self.looked >= STOP_FILE_SECONDS:
            self.looked = now
            self.number = 2 if (self.folder / STOP).exists() else 0
        return self.number

    def before_first_step(self, executor: Executor) -> str:
        """Why not to begin at all, the same on every process: a file STOP that was made while the run started. Signals
        and wall time count after the step: a run that is started again and again gets on by a step each time."""
        own = 2 if (self.folder / STOP).exists() else 0
        return REASONS[int(max(flag for (flag,) in executor.all_gather([own])))]

    def after_step(self, executor: Executor) -> str:
        """Why the run must stop now, the same on every process; empty to go on."""
        return REASONS[executor.any_rank(self._look())]
