"""Errors that are not bugs. Each is one sentence for the user: what was wrong, where, what to do.

Any other exception that reaches the user is a bug of ingot and ends with exit code 1.
"""

import errno
import re
import shlex

EXIT_FINISHED = 0
EXIT_FAULT = 1  # a failure that a retry may fix
EXIT_USER_ERROR = 2  # the same command would fail again
EXIT_GIVEN_UP = 3  # retries did not help: the same failure twice, or no progress
EXIT_INTERRUPTED = 130  # Ctrl-C
EXIT_CONTINUE = 75  # stopped on request after a checkpoint: the same command continues (EX_TEMPFAIL in sysexits.h)

EXTRAS = {
    "eval": ("lm-eval>=0.4.13,<0.5",),
    "hf": ("transformers>=5.0", "datasets>=4.0"),
    "tensorboard": ("tensorboard>=2.16",),
    "wandb": ("wandb>=0.19",),
    "mlflow": ("mlflow>=3.0",),
    "comet": ("comet_ml>=3.49",),
    "trackio": ("trackio>=0.20",),
}
"""Optional packages, as in pyproject.toml (a test compares them)."""


class IngotError(Exception):
    """A failure that the user can act on. Only the message is shown, without a stack trace."""

    exit_code = EXIT_USER_ERROR


class ConfigError(IngotError):
    """The config or the command line is wrong."""


class DataError(IngotError):
    """The data is missing, empty, damaged, or does not fit the model."""


class CheckpointError(IngotError):
    """A checkpoint is missing, damaged, from other software, or of another model."""


class NumericError(IngotError):
    """The loss or a gradient is NaN or infinite, or the loss spiked."""


class OwnerError(IngotError):
    """Another process owns the run folder."""


class FencedError(IngotError):
    """A later attempt of the same run has begun: this process was left behind."""

    exit_code = EXIT_FAULT


class DiskError(IngotError):
    """A file could not be written."""

    exit_code = EXIT_FAULT
    number: int = 0
    """The system's error number."""
    path: str = ""


def disk_error(action: str, path: object, error: OSError) -> DiskError:
    """The error for a failed write."""
    advice = _DISK_ADVICE.get(error.errno or 0, "free some space or choose another folder")
    found = DiskError(f"cannot {action} {path}: {error.strerror or error}; {advice}")
    found.number, found.path = error.errno or 0, str(path)
    return found


_DISK_ADVICE = {
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder on a disk that can be written to",
    errno.ENOENT: "choose another folder",
    errno.ENOTDIR: "choose another folder",
    errno.EEXIST: "choose another folder",
    errno.EISDIR: "choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def first_sentence(error: Exception) -> str:
    """The first sentence of another library's message, whole; the name of the error if it has no message."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return re.split(r"(?<=[.!?])\s", line, maxsplit=1)[0].rstrip(".")


class Interrupted(IngotError):
    """The user pressed Ctrl-C: not an error, and said without that word."""

    exit_code = EXIT_INTERRUPTED


class MissingExtra(IngotError):
    """A required optional package is not installed."""

    def __init__(self, what: str, extra: str):
        super().__init__(f"{what} needs the optional packages '{extra}', which are not installed: {install(extra)}")


def install(extra: str) -> str:
    """The command that installs an extra, by package names: `ingot` on the package index is another project."""
    return f"pip install {' '.join(map(shlex.quote, EXTRAS[extra]))}"
