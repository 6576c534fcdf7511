"""A heartbeat that the supervisor reads without the cooperation of the process.

A rank writes the time of its last progress, what it is doing and how long the next progress may take into a few bytes
of a memory-mapped file. A rank that is stopped, holds the GIL or hangs in a collective stops writing, and its agent
notices. (The timeout of the collective would fire after ten minutes and name no rank.)

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
START, STEP, EVALUATION, SAVE = PHASES = ("start", "step", "evaluation", "save")
START_SECONDS = 600.0  # for imports, before a rank can say how long it may take
SLOW_FACTOR = 10  # times the longest step so far
WARM_UP_STEPS = 2  # that may compile, so they are part of the start
FORMAT = struct.Struct("<dddqqdqq")  # the fields of Beat, with the phase as its index
BEAT, COUNTS = struct.Struct("<dddqqd"), struct.Struct("<qq")
COUNT_SECONDS = 0.5
PROGRESS_BYTES = 1 << 20  # read or written: a start or a save that moves data is not hanging


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of a rank."""

    at: float
    allowed: float  # seconds until the next
    started: float  # when the rank started
    batch: int
    phase: str
    own_seconds: float  # of its own work on a batch, without waiting for others; 0 if nobody has measured it
    world_collectives: int  # collectives of all ranks that this one has joined
    collectives: int  # collectives that it has joined, over all groups

    def late(self, now: float) -> float:
        """Seconds beyond what is allowed; negative if on time."""
        return now - self.at - self.allowed


@dataclass(frozen=True)
class HangBudgets:
    """Seconds without progress after which a rank counts as hung, by phase."""

    start: float = START_SECONDS
    step: float = 120.0
    save: float = 420.0

    def of(self, phase: str) -> float:
        return max(self.step, {START: self.start, STEP: self.step}.get(phase, self.save))


class Heartbeat:
    """The writing side. Does nothing unless a supervisor set INGOT_HEARTBEAT_FILE."""

    def __init__(self, budgets: HangBudgets):
        self.budgets, self.phase, self.allowed, self.longest = budgets, START, budgets.of(START), 0.0
        self.started = self.last = time.monotonic()
        self.batch, self.steps, self.is_measured, self.own_seconds = -1, 0, False, 0.0
        self.map: mmap.mmap | None = None
        if path := os.environ.get(VARIABLE):
            with open(path, "r+b") as file:
                self.map = mmap.mmap(file.fileno(), FORMAT.size)
            threading.Thread(target=self._keep_counting, name="ingot-heartbeat", daemon=True).start()
        self.alive()

    def step(self, batch: int) -> None:
        """A batch begins. After the first two, which may compile, the longest step limits the next."""
        now = time.monotonic()
        if self.steps >= WARM_UP_STEPS:
            if self.is_measured:
                self.longest = max(self.longest, now - self.last)
            self.phase, self.allowed = STEP, max(self.budgets.step, SLOW_FACTOR * self.longest)
        self.last, self.batch, self.steps, self.is_measured = now, batch, self.steps + 1, True
        self.alive()

    def alive(self) -> None:
        """Progress other than a step: a batch of an evaluation, a part of a checkpoint."""
        if self.map is not None:
            beat = time.monotonic(), self.allowed, self.started, self.batch, PHASES.index(self.phase)
            BEAT.pack_into(self.map, 0, *beat, self.own_seconds)

    def begin(self, phase: str) -> None:
        """An evaluation or a save follows: it has its own limit, and does not count as a step."""
        self.phase, self.allowed, self.is_measured = phase, self.budgets.of(phase), False
        self.alive()

    def _keep_counting(self) -> None:
        """Keep writing how many collectives this rank has joined (once it hangs in one, it cannot be asked), and beat
        while a start or a save reads or writes."""
        assert self.map is not None
        moved = bytes_moved()
        while True:
            time.sleep(COUNT_SECONDS)
            COUNTS.pack_into(self.map, BEAT.size, *collectives_joined())
            if self.phase in (START, SAVE) and (now := bytes_moved()) - moved >= PROGRESS_BYTES:
                moved = now
                self.alive()


def bytes_moved() -> int:
    """Bytes that this process has read and written, files and sockets alike; 0 where the system does not say."""
    try:
        with open("/proc/self/io") as file:
            fields = dict(line.split(": ") for line in file)
    except OSError:
        return 0
    return sum(int(fields.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))


def collectives_joined() -> tuple[int, int]:
    """The sequence number of the group of all processes, and the sum of those of all groups."""
    # None until some thread has imported torch
    groups = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    counts = {}
    for group in list(groups.pg_map) if groups is not None else []:
        with suppress(RuntimeError):  # the backend does not count
            counts[group] = group._get_sequence_number_for_group()
    return (counts.get(groups.default_pg, 0) if groups is not None else 0), sum(counts.values())


def parse_beat(content: bytes) -> Beat | None:
    """The last beat, by the content of a rank's file."""
    if len(content) < FORMAT.size:
        return None
    at, allowed, started, batch, phase, *counts = FORMAT.unpack(content[: FORMAT.size])
    return Beat(at, allowed, started, batch, PHASES[phase % len(PHASES)], *counts) if at else None


def make_file(path: Path, allowed: float | None = None) -> None:
    """Create a heartbeat file, before its rank starts. allowed: seconds until the rank must have written to it; None
    for a command that writes none."""
    now = time.monotonic()
    first = (now, allowed, now, -1, PHASES.index(START), 0.0, 0, 0) if allowed is not None else None
    path.write_bytes(FORMAT.pack(*first) if first is not None else bytes(FORMAT.size))


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
