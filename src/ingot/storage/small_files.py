"""Reading small files in folders that anybody may have touched: in place of one there may be a pipe, which never
answers, a device, which never ends, or a folder."""

import errno
import os
import shlex
import stat
from itertools import count
from pathlib import Path

MOST_BYTES = 64 << 20


class OddFile(OSError):
    """There is something else than a file of the size that was expected."""


def read_bytes(path: Path, most: float = MOST_BYTES, last: int | None = None) -> bytes:
    """The content of a file, or its last bytes; an `OSError` for anything else, and for a file that is too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
            raise OddFile(errno.EINVAL, f"it is {what} and not a file")
        size = status.st_size if last is None else min(last, status.st_size)
        if size > most:
            raise OddFile(errno.EFBIG, f"it has {size} bytes, and {most} are the most that it can have")
        os.lseek(descriptor, status.st_size - size, os.SEEK_SET)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    return read_bytes(path, most).decode()


def move_away(path: Path) -> str:
    """The command that keeps a damaged file under a name that is free."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
    return shlex.join(["mv", str(path), str(next(name for name in names if not name.exists()))])
