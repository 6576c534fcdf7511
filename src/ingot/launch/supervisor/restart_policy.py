"""Whether a failed run is worth another attempt: a pure function of what happened since somebody started it.

`failures.jsonl` in the run folder keeps that: a line per start by a user, a line per failure. Every launcher, on every
node, reads the same lines and comes to the same answer. Blind retries mostly fail again: a user's error is final at
once, the same unforeseen error is final when it comes twice, and any failure after three attempts without a new
checkpoint.
"""

import json
import os
import socket
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from ingot.checkpoint.manifest import CHECKPOINTS
from ingot.errors import EXIT_FAULT, EXIT_GIVEN_UP, EXIT_USER_ERROR
from ingot.training.runtime.run_files import FAILURES

NO_PROGRESS_LIMIT = 3  # attempts without a new checkpoint
BACK_OFF_SECONDS = (0.0, 2.0, 10.0)  # before a new attempt, by attempts without progress
FINAL = ("user", "data", "numeric")  # would fail again
START = "start"


@dataclass(frozen=True)
class Verdict:
    """What to do after a failure."""

    again: bool
    reason: str = ""
    exit_code: int = EXIT_FAULT
    wait: float = 0.0
    """Seconds before the next attempt."""


def judge(history: list[dict[str, Any]]) -> Verdict:
    """What to do, given the failures since the last start."""
    if not history:
        return Verdict(True)
    last = history[-1]
    if last["kind"] in FINAL:
        return Verdict(False, "", EXIT_USER_ERROR)
    # by attempt: of several nodes that lost a peer at the same moment, each may have written a line
    idle = len({failure["attempt"] for failure in takewhile(lambda failure: not failure["progress"], history[::-1])})
    earlier = [f for f in history[:-1] if f["kind"] == "program" and f["message"] == last["message"]
               and f["attempt"] != last["attempt"]]  # fmt: skip
    if last["kind"] == "program" and earlier and idle:
        return Verdict(False, "the same error twice: trying again would not help", EXIT_GIVEN_UP)
    if idle >= NO_PROGRESS_LIMIT:
        return Verdict(False, f"{idle} attempts have led to no new checkpoint: giving up", EXIT_GIVEN_UP)
    return Verdict(True, wait=BACK_OFF_SECONDS[idle - 1] if idle else 0.0)


def newest_checkpoint(run: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    return max((int(p.parent.name) for p in (run / CHECKPOINTS).glob("[0-9]*/manifest.json")), default=0)


def mark_start(run: Path) -> None:
    """Somebody started the run: what failed before does not count any more."""
    _append(run, {"kind": START})


def node_name() -> str:
    """What the cluster calls this machine: the name to leave it out by."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def record(
    run: Path, *, attempt: str, rank: int, batch: int, kind: str, message: str, progress: bool, host: str | None = None
) -> None:
    """Keep a failure, of this machine or of the one named; an empty name blames none."""
    host = node_name() if host is None else host
    _append(run, {"attempt": attempt, "host": host, "rank": rank, "batch": batch, "kind": kind, "message": message,
                  "progress": progress})  # fmt: skip


def read_failures(run: Path) -> list[dict[str, Any]]:
    """The failures since the last start."""
    history: list[dict[str, Any]] = []
    for line in read_history(run):
        history = [] if line["kind"] == START else [*history, line]
    return history


def read_history(run: Path) -> list[dict[str, Any]]:
    """All lines, starts too; a line that was cut off by a crash is left out."""
    try:
        text = (run / FAILURES).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            content = json.loads(line)
            if isinstance(content, dict) and "kind" in content:
                found.append(content)
        except ValueError:
            continue
    return found


def _append(run: Path, line: dict[str, Any]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    content = {"time": datetime.now().isoformat(timespec="milliseconds")} | line
    with (run / FAILURES).open("a", encoding="utf-8") as file:  # one small write: lines of several nodes do not mix
        file.write(json.dumps(content) + "\n")
