"""A lost terminal (a closed SSH connection): SIGHUP means save and stop, like SIGTERM."""

import os
import signal
import stat


def ignores_hangup(number: signal.Signals) -> bool:
    """Whether this is SIGHUP and nohup started the run: the signal stays ignored and the run continues."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def leave_terminal() -> None:
    """Redirect terminal output to /dev/null: writing to a lost terminal fails and would end the run before it has
    saved. Files and pipes are kept."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
