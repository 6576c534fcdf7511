"""A heartbeat that the supervisor reads without the cooperation of the process.

A rank writes the time of its last progress, and how long the next may take, into a few bytes of a memory-mapped file.
A rank that is stopped, holds the GIL or hangs in a collective stops writing, and the supervisor notices. (The timeout
of the collective would fire after ten minutes and name no rank.)

Times are from the machine's monotonic clock, which all processes share.
"""

import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "INGOT_HEARTBEAT_FILE"
STACKS_VARIABLE = "INGOT_STACKS_FILE"
START_FACTOR = 30  # times the timeout, before the first step: imports, compilation, reading a checkpoint
SLOW_FACTOR = 10  # times the longest step so far
FORMAT = struct.Struct("<dddqqq")  # the fields of Beat
BEAT, COUNTS = struct.Struct("<dddq"), struct.Struct("<qq")
COUNT_SECONDS = 0.5


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of a rank."""

    at: float
    allowed: float  # seconds until the next
    started: float  # when the rank started
    batch: int
    world_collectives: int  # collectives of all ranks that this one has joined
    collectives: int  # collectives that it has joined, over all groups

    def late(self, now: float) -> float:
        """Seconds beyond what is allowed; negative if on time."""
        return now - self.at - self.allowed


class Heartbeat:
    """The writing side. Does nothing unless a supervisor set INGOT_HEARTBEAT_FILE."""

    def __init__(self, timeout: float):
        self.timeout, self.longest, self.allowed = timeout, 0.0, START_FACTOR * timeout
        self.started = self.last = time.monotonic()
        self.batch, self.steps = -1, 0
        self.map: mmap.mmap | None = None
        if path := os.environ.get(VARIABLE):
            with open(path, "r+b") as file:
                self.map = mmap.mmap(file.fileno(), FORMAT.size)
            threading.Thread(target=self._count_collectives, name="ingot-heartbeat", daemon=True).start()
        self.alive()

    def step(self, batch: int) -> None:
        """A batch begins. After the first two, which may compile, the longest step limits the next."""
        now = time.monotonic()
        if self.steps >= 2:
            self.longest = max(self.longest, now - self.last)
            self.allowed = max(self.timeout, SLOW_FACTOR * self.longest)
        self.last, self.batch, self.steps = now, batch, self.steps + 1
        self.alive()

    def alive(self) -> None:
        """Progress other than a step: a batch of an evaluation, a part of a checkpoint."""
        if self.map is not None:
            BEAT.pack_into(self.map, 0, time.monotonic(), self.allowed, self.started, self.batch)

    def pause(self) -> None:
        """An evaluation or a save follows: allow it more time, and do not count it as a step."""
        self.allowed, self.steps = START_FACTOR * self.timeout, min(self.steps, 1)
        self.alive()

    def _count_collectives(self) -> None:
        """Keep writing how many collectives this rank has joined; once it hangs in one, it cannot be asked."""
        assert self.map is not None
        while True:
            time.sleep(COUNT_SECONDS)
            COUNTS.pack_into(self.map, BEAT.size, *collectives_joined())


def collectives_joined() -> tuple[int, int]:
    """The sequence number of the group of all processes, and the sum of those of all groups."""
    # None until some thread has imported torch
    groups = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    counts = {}
    for group in list(groups.pg_map) if groups is not None else []:
        with suppress(RuntimeError):  # the backend does not count
            counts[group] = group._get_sequence_number_for_group()
    return (counts.get(groups.default_pg, 0) if groups is not None else 0), sum(counts.values())


def read_beat(path: Path) -> Beat | None:
    """The last beat in a file; None before the first."""
    content = path.read_bytes()
    if len(content) < FORMAT.size:
        return None
    beat = Beat(*FORMAT.unpack(content[: FORMAT.size]))
    return beat if beat.at else None


def make_file(path: Path) -> None:
    """Create a heartbeat file, before its rank starts."""
    path.write_bytes(bytes(FORMAT.size))


def dump_stacks_on_request() -> None:
    """Write the stacks of all threads when the supervisor sends SIGUSR1, and when this process crashes.

    The handler is C code, so it works while another thread holds the GIL.
    """
    path = os.environ.get(STACKS_VARIABLE)
    if path is None:
        faulthandler.enable()
        return
    file = open(path, "a")  # noqa: SIM115  (open until the process ends)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
