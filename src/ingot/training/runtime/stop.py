"""Stop requests: the run saves after the current step and ends, on all ranks after the same step.

SIGTERM, SIGUSR2, SIGHUP (the terminal is lost), one SIGINT (Ctrl-C), a file STOP in the run folder and `max_wall_time`
request a stop; a second SIGINT, or one during start-up, stops immediately. A request may reach only one rank, so all
ranks reduce a flag in the background while a step runs and read it afterwards. Nothing on the device waits for it.

Lookups are a load on a shared file system. Only rank 0 looks for the file, and in a job with a supervisor no rank does
while steps run: the supervisor looks, and has its agents send USR2.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ingot.parallel.executors.base import Executor
from ingot.parallel.rank_env import EPOCH
from ingot.training.runtime.hangup import ignores_hangup, leave_terminal
from ingot.training.runtime.heartbeat import VARIABLE as HEARTBEAT
from ingot.training.runtime.run_files import STOP

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
STOP_FILE_SECONDS = 1.0  # between checks for the file STOP

# by number, so that a maximum over the ranks agrees on one
REASONS = ("", "max_wall_time is over", "the file STOP is in the run folder", *(s.name for s in SIGNALS))


def start_compilers() -> None:
    """Start torch's compiler processes with stop signals blocked.

    `timeout` and batch systems signal a whole process group. This process treats the signal as a request, but it would
    kill the compilers, and torch would wait for their results forever.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited by new processes
    try:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def say(text: str) -> None:
    """Write a line to standard error from a signal handler: without buffers, which the handler may have interrupted.
    On a terminal it replaces the progress bar, which is drawn again below."""
    clear = "\r\x1b[2K" if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{clear}{text}\n".encode())


class StopRequest:
    """Receives stop requests of this rank. Signals are only handled if it is created in the main thread."""

    def __init__(self, folder: Path, max_seconds: float | None, rank: int = 0, is_alone: bool = False):
        self.folder, self.is_first = folder, rank == 0
        self.looks = self.is_first and not os.environ.get(EPOCH)
        """Whether this rank looks for the file STOP while steps run, once for all."""
        self.doing = ""
        """What must end before the run can stop, such as `step 12`; empty during start-up."""
        self.answers = is_alone and HEARTBEAT not in os.environ
        """Whether this process answers Ctrl-C; if a launcher supervises it, the launcher does."""
        self.deadline = time.monotonic() + max_seconds if max_seconds is not None else None
        self.number = 0
        self.last_check = 0.0
        self.old_handlers: dict[signal.Signals, object] = {}
        if threading.current_thread() is threading.main_thread():
            self.old_handlers = {s: signal.signal(s, self._handle) for s in SIGNALS if not ignores_hangup(s)}

    def close(self) -> None:
        """The run has ended. A request that comes after that must not kill a process that a launcher watches: it would
        look like a failure."""
        for number, handler in self.old_handlers.items():
            signal.signal(number, signal.SIG_IGN if HEARTBEAT in os.environ else handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before, self.number = self.number, REASONS.index(signal.Signals(number).name)
        if number == signal.SIGINT:
            if before == self.number or (self.answers and not self.doing):
                raise KeyboardInterrupt
            if self.answers:  # a second Ctrl-C may arrive while this is written
                say(f"finishing {self.doing}, then saving; press Ctrl-C again to stop now")
        if number == signal.SIGHUP:
            leave_terminal()

    def _local_request(self) -> int:
        now = time.monotonic()
        if not self.number and self.deadline is not None and now >= self.deadline:
            self.number = 1
        if self.looks and not self.number and now - self.last_check >= STOP_FILE_SECONDS:
            self.last_check = now
            self.number = 2 if (self.folder / STOP).exists() else 0
        return self.number

    def before_first_step(self, executor: Executor) -> str:
        """Why not to start at all, the same on every rank: a file STOP created during start-up. Signals and wall time
        count after a step, so that a run that is restarted again and again makes progress."""
        own = 2 if self.is_first and (self.folder / STOP).exists() else 0
        return REASONS[int(max(flag for (flag,) in executor.all_gather([own])))]

    def after_step(self, executor: Executor) -> str:
        """Why the run must stop now, the same on every rank; empty to continue."""
        return REASONS[executor.any_rank(self._local_request())]
