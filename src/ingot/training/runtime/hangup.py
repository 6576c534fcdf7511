"""When the terminal goes away (a closed SSH connection): HUP asks to save and stop, as TERM does."""

import os
import signal
import stat


def ignores_hangup(number: signal.Signals) -> bool:
    """Whether this is HUP and the run was started with nohup: it stays ignored, and the run goes on."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def leave_terminal() -> None:
    """Send what is still printed nowhere: writing to a terminal that is gone fails, and would end the run before it
    has saved. Files and pipes are kept."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
