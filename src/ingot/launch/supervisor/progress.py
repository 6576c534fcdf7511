"""How far a run is, by its folder, and why it stops."""

import asyncio
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ingot.checkpoint.manifest import CHECKPOINTS, MANIFEST
from ingot.launch.supervisor.records import StopReason
from ingot.storage.small_files import OddFile, read_bytes, read_text
from ingot.training.runtime.run_files import STOP, STOPPED


@dataclass
class StopFlag:
    """Whether somebody wants the run to stop, and why."""

    reason: StopReason | None = None
    detail: str = ""
    is_over: bool = False
    """Whether the time to stop is over, too."""
    lost: dict[str, str] = field(default_factory=dict)
    """Nodes for whose loss the cluster ends the job, which nobody has asked it to do, and how they were lost."""
    event: asyncio.Event = field(default_factory=asyncio.Event)
    """The run has to end, for either reason."""
    signal: asyncio.Task[None] | None = None
    """Finds out what a signal means."""

    async def settled(self) -> None:
        """Once it is known what a signal means that has come."""
        if self.signal is not None:
            await asyncio.shield(self.signal)

    def lose(self, nodes: Mapping[str, str]) -> None:
        self.lost |= nodes
        self.event.set()

    def terminate(self) -> None:
        """Slurm's last warning: a few seconds are left (KillWait), which save nothing that has not been saved by now if
        the ranks were asked before."""
        if not self.set("signal", "SIGTERM"):
            self.is_over = self.reason == "time-limit"

    def set(self, reason: StopReason, detail: str = "") -> bool:
        """Returns whether this is the first request."""
        if self.reason is not None:
            return False
        self.reason, self.detail = reason, detail
        self.event.set()
        return True


MOST_CHARACTERS = 200  # of the file STOP


def progress_of(run: Path, verb: str) -> int:
    """The newest checkpoint of a training run, or the pieces that a preparation has done."""
    return newest_checkpoint(run) if verb == "train" else pieces_done(run)


def checkpoint_files(run: Path) -> set[tuple[str, int, int]]:
    """What tells the checkpoints of a run from others that are at the same place later."""
    found = set()
    for path in (run / CHECKPOINTS).glob(f"*/{MANIFEST}"):
        with suppress(OSError):
            status = path.stat()
            found.add((path.parent.name, status.st_ino, status.st_mtime_ns))
    return found


def newest_checkpoint(run: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    return max((int(p.parent.name) for p in (run / CHECKPOINTS).glob(f"[0-9]*/{MANIFEST}")), default=0)


def pieces_done(run: Path) -> int:
    """Pieces in the journals of the preparation that this folder belongs to."""
    pieces = 0
    with suppress(FileNotFoundError, OddFile):  # a preparation removes them when it ends
        for path in run.parent.glob(".*.partial/journal*.jsonl"):
            pieces += read_bytes(path, math.inf).count(b'"task": "tokenize"')
    return pieces


def is_stop_there(run: Path) -> bool:
    """Whether the file STOP is there; a disk that cannot be asked now is asked again later."""
    try:
        return (run / STOP).exists()
    except OSError:  # such as a stale handle
        return False


def who_asked(run: Path) -> str:
    """Who created the file STOP: `ingot stop` writes down who and when."""
    with suppress(OSError, UnicodeDecodeError):
        if said := read_text(run / STOP).strip()[:MOST_CHARACTERS].partition("\n")[0]:
            return f"{STOP} by {said}"
    return f"{STOP} in the run folder"


def stop_reason_of(run: Path) -> tuple[StopReason, str] | None:
    """Why a run saved and stopped though the supervisor has not asked it to; None if it does not say."""
    if (run / STOP).exists():
        return "user", who_asked(run)
    try:
        reason = str(json.loads(read_text(run / STOPPED))["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if reason.startswith("SIG"):
        return "signal", reason
    return "wall-time", "" if "max_wall_time" in reason else reason
