"""Ranks of a launched run that end themselves: when nobody watches them any more, or a later attempt has begun.

A node that is cut off from the network may go on for long, with the run folder still in reach. Nobody can end its ranks
from outside, so each ends itself within half a minute, and a later attempt may rely on that. Rank 0 watches the run
folder (see `lease`); every rank watches its agent, which writes the time into a file of the node, a few bytes that are
mapped into memory: no rank but the first looks at the shared file system.
"""

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ingot.errors import EXIT_FAULT

VARIABLE = "INGOT_AGENT_FILE"
FENCE_SECONDS = 30.0
CHECK_SECONDS = 1.0
GRACE_SECONDS = 10.0  # after this process or the whole machine was suspended, for the others to catch up
_FORMAT = struct.Struct("<d")  # of the machine's monotonic clock, which all processes share


def watch_agent() -> None:
    """End this process half a minute after its agent last wrote the time. Does nothing without such a file."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), _FORMAT.size, prot=mmap.PROT_READ)

    def watch() -> None:
        end_when_silent(lambda: float(_FORMAT.unpack_from(content)[0]), threading.Event(), "the agent of this node")

    threading.Thread(target=watch, name="ingot-agent-watch", daemon=True).start()


class AgentClock:
    """For the agent: the file in which it shows its ranks that it is alive. It stays mapped, as theirs do, so that it
    does not matter if somebody cleans the temporary folder."""

    def __init__(self, path: Path):
        path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self._content = mmap.mmap(file.fileno(), _FORMAT.size)
        self.show()

    def show(self) -> None:
        _FORMAT.pack_into(self._content, 0, time.monotonic())

    def close(self) -> None:
        self._content.close()


def end_when_silent(last: Callable[[], float], ended: threading.Event, who: str) -> None:
    """Return when `ended` is set; end the process when `last`, the time of the last sign of life, is too long ago."""
    before, grace = time.monotonic(), 0.0
    while not ended.wait(CHECK_SECONDS):
        now = time.monotonic()
        if now - before > 5 * CHECK_SECONDS:
            grace = now + GRACE_SECONDS
        before = now
        if now - last() > FENCE_SECONDS and now > grace:
            end_process(f"{who} has given no sign of life for {now - last():.0f} s")


def end_process(reason: str) -> None:
    """End this process now, without saving, flushing or unlocking anything."""
    text = f"this rank ends itself: {reason}\n"
    try:
        os.write(sys.stderr.fileno(), text.encode())
    finally:
        os._exit(EXIT_FAULT)
