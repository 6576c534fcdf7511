"""A sign of life that can be seen from outside, without the help of the process that gives it.

A process writes the time of its last progress, and how long the next may take, into a few bytes of a mapped file. Its
supervisor reads them: a process that is stopped, holds the interpreter's lock or waits for ever in a collective stops
writing, and is found all the same. (A collective's own timeout would find it after ten minutes, and name nobody.)

Times are of the machine's monotonic clock, which its processes share.
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
START_FACTOR = 30  # before the first step: imports, compilation, reading a checkpoint
SLOW_FACTOR = 10  # of the longest step seen
FORMAT = struct.Struct("<dddqqq")  # last beat, seconds that the next may take, start, batch, two counts of collectives
BEAT, COUNTS = struct.Struct("<dddq"), struct.Struct("<qq")
COUNT_SECONDS = 0.5


@dataclass(frozen=True)
class Beat:
    """What a process said last."""

    at: float
    allowed: float
    started: float
    batch: int
    world_collectives: int  # how many it has joined of those that all processes join
    collectives: int  # how many it has joined, over all groups

    def late(self, now: float) -> float:
        """Seconds beyond what was allowed; negative while all is well."""
        return now - self.at - self.allowed


class Heartbeat:
    """The writing side. Does nothing where no supervisor asked for it."""

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
        """A batch begins. After the first two, which may compile, steps tell how long the next may take."""
        now = time.monotonic()
        if self.steps >= 2:
            self.longest = max(self.longest, now - self.last)
            self.allowed = max(self.timeout, SLOW_FACTOR * self.longest)
        self.last, self.batch, self.steps = now, batch, self.steps + 1
        self.alive()

    def alive(self) -> None:
        """Something other than a step moved on: a batch of an evaluation, a part of a checkpoint."""
        if self.map is not None:
            BEAT.pack_into(self.map, 0, time.monotonic(), self.allowed, self.started, self.batch)

    def pause(self) -> None:
        """An evaluation or a save follows: it may take its time, which says nothing about the next step."""
        self.allowed, self.steps = START_FACTOR * self.timeout, min(self.steps, 1)
        self.alive()

    def _count_collectives(self) -> None:
        """Keep writing how many collectives this process has joined: it cannot be asked when it hangs in one."""
        assert self.map is not None
        while True:
            time.sleep(COUNT_SECONDS)
            COUNTS.pack_into(self.map, BEAT.size, *collectives_joined())


def collectives_joined() -> tuple[int, int]:
    """The sequence number of the group of all processes, and the sum of those of all groups."""
    # None before torch has been imported, by another thread perhaps
    groups = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    counts = {}
    for group in list(groups.pg_map) if groups is not None else []:
        with suppress(RuntimeError):  # a backend that does not count
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
    path.write_bytes(bytes(FORMAT.size))


def dump_stacks_on_request() -> None:
    """Write the stacks of all threads when the supervisor sends SIGUSR1, and when this process crashes.

    The handler is C code: it works while another thread holds the interpreter's lock.
    """
    path = os.environ.get(STACKS_VARIABLE)
    if path is None:
        faulthandler.enable()
        return
    file = open(path, "a")  # noqa: SIM115  (open until the process ends)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
