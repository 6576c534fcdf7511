"""Reading small files in folders that anybody may have touched: in place of one there may be a pipe, which never
answers, a device, which never ends, or a folder."""

import errno
import os
import shlex
import stat
from itertools import count
from pathlib import Path

MOST_BYTES = 64 << 20


def read_bytes(path: Path, most: int = MOST_BYTES, last: int | None = None) -> bytes:
    """The content of a regular file, or its last bytes; an `OSError` for anything else, and for one that is too
    large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with open(descriptor, "rb") as file:  # which closes it, and refuses a folder
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device and not a file", str(path))
        if last is not None:
            file.seek(max(0, status.st_size - last))
        elif status.st_size > most:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, which is more than {most}", str(path))
        return file.read()


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    return read_bytes(path, most).decode()


def move_away(path: Path) -> str:
    """The command that keeps a damaged file under a name that is free."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
    return shlex.join(["mv", str(path), str(next(name for name in names if not name.exists()))])
