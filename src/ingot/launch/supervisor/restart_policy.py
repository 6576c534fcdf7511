"""Whether a failed run gets another attempt: a pure function of the failures since a user started it.

Blind retries mostly fail again. A user error is final at once, the same unforeseen error is final the second time, and
any failure is final after three attempts without a new checkpoint.
"""

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from ingot.checkpoint.manifest import CHECKPOINTS, MANIFEST
from ingot.errors import EXIT_FAULT, EXIT_GIVEN_UP, EXIT_USER_ERROR
from ingot.launch.agent.failure import FINAL_KINDS

NO_PROGRESS_LIMIT = 3  # attempts without a new checkpoint
BACK_OFF_SECONDS = (0.0, 2.0, 10.0)  # before a new attempt, by attempts without progress


@dataclass(frozen=True)
class RestartDecision:
    """What to do after a failure."""

    restart: bool
    reason: str = ""
    exit_code: int = EXIT_FAULT
    wait_seconds: float = 0.0
    """Before the next attempt."""


def decide_restart(failures: list[dict[str, Any]]) -> RestartDecision:
    """Decide by the failures since the last start."""
    if not failures:
        return RestartDecision(True)
    last = failures[-1]
    if last["kind"] in FINAL_KINDS:
        return RestartDecision(False, "", EXIT_USER_ERROR)
    # by attempt: of several nodes that lost a peer at the same moment, each may have written a line
    idle = len({failure["attempt"] for failure in takewhile(lambda failure: not failure["progress"], failures[::-1])})
    earlier = [f for f in failures[:-1] if f["kind"] == "program" and f["message"] == last["message"]
               and f["attempt"] != last["attempt"]]  # fmt: skip
    if last["kind"] == "program" and earlier and idle:
        return RestartDecision(False, "the same error twice: trying again would not help", EXIT_GIVEN_UP)
    if idle >= NO_PROGRESS_LIMIT:
        return RestartDecision(False, f"{idle} attempts have led to no new checkpoint: giving up", EXIT_GIVEN_UP)
    return RestartDecision(True, wait_seconds=BACK_OFF_SECONDS[idle - 1] if idle else 0.0)


def newest_checkpoint(run: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    return max((int(p.parent.name) for p in (run / CHECKPOINTS).glob(f"[0-9]*/{MANIFEST}")), default=0)
