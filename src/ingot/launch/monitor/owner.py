"""Who trains in a run folder, by the file that its rank 0 touches every few seconds. Ages come from the folder's own
file system, so it does not matter whether the clock of a login node is right."""

import json
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ingot.storage.small_files import read_text
from ingot.training.runtime.lease import BEAT_SECONDS, EXPIRY_SECONDS, FUTURE_SECONDS
from ingot.training.runtime.run_files import OWNER

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class LivingOwner:
    """A process that was alive a moment ago."""

    host: str
    pid: int
    job: str
    """Of Slurm; empty outside one."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", job {self.job}" if self.job else "")


def living_owner(run: Path) -> LivingOwner | None:
    """The process that trains in a folder, if there is one."""
    path = run / OWNER
    try:
        content = json.loads(read_text(path))
        owner = LivingOwner(str(content["host"]), int(content["pid"]), str(content.get("job") or ""))
        if owner.host == socket.gethostname():
            return owner if start_ticks(owner.pid) == str(content["started"]) else None
        age = _age_seconds(path)
        is_recent = _is_touched(path) if age is None or age < -FUTURE_SECONDS else age < EXPIRY_SECONDS
        return owner if is_recent else None
    except (OSError, ValueError, KeyError, TypeError):  # it has just ended, or is being replaced
        return None


def start_ticks(pid: int) -> str | None:
    """When a living process of this machine started, in clock ticks since boot."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _age_seconds(path: Path) -> float | None:
    """Since the file was touched, by the clock of its file system; None if that cannot be asked, because this user may
    not write there or the disk is full."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock-") as now:
            return (os.stat(now.name).st_mtime_ns - path.stat().st_mtime_ns) / 1e9
    except FileNotFoundError:
        raise
    except OSError:
        return None


def _is_touched(path: Path) -> bool:
    """Whether the file is touched within the time in which a living owner does so."""
    before, end = path.stat().st_mtime_ns, time.monotonic() + 1.5 * BEAT_SECONDS
    while time.monotonic() < end:
        if path.stat().st_mtime_ns != before:
            return True
        time.sleep(_POLL_SECONDS)
    return False
