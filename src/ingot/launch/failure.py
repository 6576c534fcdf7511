"""How a process of a run tells its launcher why it ended: one small file, written once."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "INGOT_FAILURE_FILE"
# what a collective says when the process at its other end is gone: a consequence of the failure, not its cause
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "nccl",
    "connection was likely closed",
)


@dataclass(frozen=True)
class Failure:
    """Why a process ended."""

    message: str
    exit_code: int
    time: float
    fits: int | None = None
    """After an out-of-memory error: the microbatch size to try next."""

    @property
    def is_consequence(self) -> bool:
        return any(text in self.message.lower() for text in LOST_PEER)


def record_failure(message: str, exit_code: int, fits: int | None = None) -> bool:
    """Write the failure file, if a launcher asked for one; says whether it did."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return False
    Path(path).write_text(json.dumps(asdict(Failure(message, exit_code, time.time(), fits))), encoding="utf-8")
    return True


def read_failure(path: Path, return_code: int) -> Failure:
    """What a process wrote before it ended, or what its end alone says."""
    try:
        return Failure(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        how = f"was killed by signal {-return_code}" if return_code < 0 else f"ended with exit code {return_code}"
        return Failure(f"the process {how}", 1 if return_code < 0 else return_code, 0.0)
