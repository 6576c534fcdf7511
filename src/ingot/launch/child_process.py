"""A child process that never outlives the one that started it."""

import ctypes
import signal
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # before a fork: other threads may hold locks
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """In a new process, before it runs: end it when the thread that started it ends, with its launcher (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
