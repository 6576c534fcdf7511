"""How a process says why it failed: one sentence on standard error, and one small file for its launcher."""

import errno
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.config.secrets import redact
from ingot.errors import EXIT_FAULT, EXIT_INTERRUPTED, DiskError, IngotError, Interrupted, disk_error

FAILURE_VARIABLE = "INGOT_FAILURE_FILE"
FINAL_KINDS = ("user", "data", "numeric")  # would fail again
NODE_KINDS = ("machine", "device", "transport", "hang")  # a node's fault
# The file system of the run folder is full, read-only, over its quota, or its server is gone.
SITE_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ESTALE)
# What CUDA and NCCL report when a GPU, its memory, its driver or a network device of this machine fails...
DEVICE_TEXTS = re.compile(
    r"cuda error|cuda failure|cuda driver error|uncorrectable ecc|\bxid\b|fallen off the bus|gpu is lost|nvlink error"
    r"|ncclunhandledcudaerror|ncclsystemerror|cublas_status_(?:internal_error|execution_failed)"
    r"|cudnn_status_(?:internal_error|execution_failed)", re.IGNORECASE,
)  # fmt: skip
# ... and what they report when the program is wrong, or a peer is gone.
PROGRAM_TEXTS = re.compile(
    r"device-side assert|illegal memory access|misaligned address|invalid (?:argument|configuration|device|resource)"
    r"|no kernel image|out of memory|out of resources|operation not (?:permitted|supported)|unsupported"
    r"|connection (?:closed|reset|refused|timed out)|broken pipe|remote peer|remote process", re.IGNORECASE,
)  # fmt: skip
# what a collective reports when its peer is gone: a consequence of the failure, not its cause
LOST_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "nccl",
             "connection was likely closed")  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """Why a rank ended."""

    message: str
    kind: str
    """user, data, numeric, memory, program (an unforeseen error), device (a GPU or its driver), machine (killed, disk,
    network), site (the shared file system), transport (a slow network in place of a fast one) or hang."""
    exit_code: int
    time: float
    fits: int | None = None
    """After an out-of-memory error: the microbatch size to try next."""

    @property
    def is_consequence(self) -> bool:
        return self.kind not in ("transport", "device") and any(text in self.message.lower() for text in LOST_PEER)


def exit_code_of(action: Callable[[], int], hint: str = "") -> int:
    """Run something. A failure is recorded and printed as one sentence; `hint` follows an unforeseen one."""
    try:
        return action()
    except Interrupted as error:
        return _fail(str(error), error.exit_code)
    except IngotError as error:
        return _fail(f"error: {error}", error.exit_code)
    except KeyboardInterrupt as error:
        return _fail(str(error) or "interrupted", EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno in SITE_ERRORS:
            return _fail(f"error: {disk_error('write', error.filename or 'a file', error)}", EXIT_FAULT)
        return _fail(f"internal error: {type(error).__name__}: {error}{hint}", EXIT_FAULT)
    except Exception as error:
        return _fail(f"internal error: {type(error).__name__}: {error}{hint}", EXIT_FAULT)


def _fail(message: str, code: int) -> int:
    # First the record: standard error may be on a full disk, and this process may be killed while it prints.
    recorded = record_failure(message.removeprefix("error: "), code, sys.exc_info()[1])
    print(redact(message), file=sys.stderr)
    if recorded:  # standard error is this process's log; the launcher prints the sentence
        print(redact(traceback.format_exc()), file=sys.stderr)
    return code


def kind_of(error: BaseException | None) -> str:
    if getattr(error, "next_microbatch", None) is not None:
        return "memory"
    if isinstance(error, DiskError) and error.number in SITE_ERRORS and not _is_local(error.path):
        return "site"
    if isinstance(error, IngotError):
        known = {"DataError": "data", "NumericError": "numeric"}
        return known.get(type(error).__name__, "machine" if error.exit_code == EXIT_FAULT else "user")
    if isinstance(error, OSError) and error.errno in SITE_ERRORS:  # of which disk only the agent can find out
        return "machine"
    return "device" if is_device_error(str(error)) else "program"


def is_device_error(message: str) -> bool:
    """Whether a message blames a device of this machine, and neither the program nor another machine."""
    return bool(DEVICE_TEXTS.search(message)) and not PROGRAM_TEXTS.search(message)


def _is_local(path: str) -> bool:
    """Whether a path is in this machine's own temporary folder."""
    return Path(path).is_relative_to(tempfile.gettempdir())


def record_failure(message: str, exit_code: int, error: BaseException | None) -> bool:
    """Write the failure file, if a launcher asked for one; returns whether it was written."""
    path = os.environ.get(FAILURE_VARIABLE)
    if path is None:
        return False
    failure = Failure(redact(message), kind_of(error), exit_code, time.time(), getattr(error, "next_microbatch", None))
    try:
        Path(path).write_text(json.dumps(asdict(failure)), encoding="utf-8")
    except OSError:  # a full disk: the sentence on standard error and the exit code remain
        return False
    return True


def read_failure(path: Path, return_code: int) -> Failure:
    """What a rank wrote before it ended, or what its exit code says."""
    if (failure := read_written(path)) is not None:
        return failure
    how = f"was killed by signal {-return_code}" if return_code < 0 else f"ended with exit code {return_code}"
    return Failure(f"the process {how}", "machine", 1 if return_code < 0 else return_code, 0.0)


def read_written(path: Path) -> Failure | None:
    """What a rank wrote before it ended; None if it could not."""
    try:
        return Failure(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
