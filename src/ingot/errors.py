"""What can go wrong through no fault of the program. Each carries one sentence for the user: what, where, what to do.

Anything else that escapes is a defect of ours and ends with exit code 1.
"""

import shlex

EXIT_FINISHED = 0
EXIT_FAULT = 1  # something broke that may work on a second try
EXIT_USER_ERROR = 2  # the same command would fail again
EXIT_GIVEN_UP = 3  # tried again, to no avail: the same failure twice, or no progress; a human must look
EXIT_CONTINUE = 75  # stopped as asked, with a checkpoint: the same command continues (EX_TEMPFAIL of sysexits.h)

EXTRAS = {"hf": ("transformers>=5.0", "datasets>=4.0"), "tensorboard": ("tensorboard>=2.16",)}
"""Optional packages, as in pyproject.toml (a test compares them)."""


class IngotError(Exception):
    """A failure that the user can act on. The message is the whole report: no stack trace is shown."""

    exit_code = EXIT_USER_ERROR


class ConfigError(IngotError):
    """The description of the run is wrong."""


class DataError(IngotError):
    """The data is missing, empty, damaged, or does not fit the model."""


class CheckpointError(IngotError):
    """A checkpoint is missing, damaged, foreign, or of another model."""


class NumericError(IngotError):
    """The loss or the gradient is not a number, or jumped."""


class OwnerError(IngotError):
    """Another process writes in the run folder."""


class DiskError(IngotError):
    """A file could not be written."""

    exit_code = EXIT_FAULT


def disk_error(action: str, path: object, error: OSError) -> DiskError:
    """The one sentence for a failed write."""
    reason = error.strerror or str(error)
    return DiskError(f"cannot {action} {path}: {reason}; free some space or choose another folder with save_folder=...")


class MissingExtra(IngotError):
    """An optional package is needed and not installed."""

    def __init__(self, what: str, extra: str):
        super().__init__(f"{what} needs the optional packages '{extra}', which are not installed: {install(extra)}")


def install(extra: str) -> str:
    """The command that installs an extra. It names the packages, since an extra has no name outside a clone."""
    return f"pip install {' '.join(map(shlex.quote, EXTRAS[extra]))}"
