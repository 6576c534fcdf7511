"""`failures.jsonl` in the run folder: a line per start by a user and a line per failure, for people. What a supervisor
goes by is in `state_file`."""

import json
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

from ingot.storage.json_lines import read_json_lines
from ingot.storage.small_files import open_to_append
from ingot.training.runtime.run_files import FAILURES

START = "start"
NODE_NAME_VARIABLE = "INGOT_NODE_NAME"
"""In a pod: the machine that it is on."""


def node_name() -> str:
    """What the cluster calls this machine: the name to exclude it by."""
    return os.environ.get(NODE_NAME_VARIABLE) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def mark_start(run: Path) -> None:
    """A user started the run: earlier failures no longer count."""
    _append(run, {"kind": START})


def record(
    run: Path, *, attempt: str, rank: int, batch: int, kind: str, message: str, progress: bool, host: str | None = None
) -> None:
    """Record a failure of this node or of the one named; an empty name blames none."""
    host = node_name() if host is None else host
    _append(run, {"attempt": attempt, "host": host, "rank": rank, "batch": batch, "kind": kind, "message": message,
                  "progress": progress})  # fmt: skip


def read_failures(run: Path) -> list[dict[str, Any]]:
    """The failures since the last start."""
    failures: list[dict[str, Any]] = []
    for line in _read_lines(run):
        failures = [] if line["kind"] == START else [*failures, line]
    return failures


def read_all_failures(run: Path) -> list[dict[str, Any]]:
    """All failures, over all starts."""
    return [line for line in _read_lines(run) if line["kind"] != START]


def _read_lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(run / FAILURES) if "kind" in line]


def _append(run: Path, line: dict[str, Any]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    content = {"time": datetime.now().isoformat(timespec="milliseconds")} | line
    with open_to_append(run / FAILURES) as file:  # one small write: lines of several nodes do not mix
        file.write(json.dumps(content).encode() + b"\n")
