"""What the run folder says about a run: how far it is, and why it stopped by itself."""

import json
from contextlib import suppress
from pathlib import Path

from ingot.launch.supervisor.records import StopReason
from ingot.launch.supervisor.restart_policy import newest_checkpoint
from ingot.training.runtime.run_files import STOP, STOPPED


def progress_of(run: Path, verb: str) -> int:
    """The newest checkpoint of a training run, or the pieces that a preparation has done."""
    return newest_checkpoint(run) if verb == "train" else pieces_done(run)


def pieces_done(run: Path) -> int:
    """Pieces in the journals of the preparation that this folder belongs to."""
    pieces = 0
    with suppress(FileNotFoundError):  # a preparation removes them when it ends
        for path in run.parent.glob(".*.partial/journal*.jsonl"):
            pieces += path.read_bytes().count(b'"task": "tokenize"')
    return pieces


def stop_reason_of(run: Path) -> tuple[StopReason, str] | None:
    """Why a run saved and stopped though the supervisor has not asked it to; None if it does not say."""
    if (run / STOP).exists():
        return "user", f"{STOP} in the run folder"
    try:
        reason = str(json.loads((run / STOPPED).read_text(encoding="utf-8"))["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if reason.startswith("SIG"):
        return "signal", reason
    return "wall-time", reason
