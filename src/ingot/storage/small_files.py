"""Small files in folders that anybody may have touched: in place of one there may be a pipe, which never answers, a
device, which never ends, or a folder."""

import errno
import os
import shlex
import stat
from io import FileIO
from itertools import count
from pathlib import Path

MOST_BYTES = 64 << 20


class OddFile(OSError):
    """There is something else than a file of the size that was expected."""


def read_bytes(path: Path, most: float = MOST_BYTES, last: int | None = None) -> bytes:
    """The content of a file, or its last bytes; an `OSError` for anything else, and for a file that is too large."""
    descriptor = _open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
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


def open_to_append(path: Path) -> FileIO:
    """Open a file without a buffer, so that each write stays in one piece; create it if it is missing."""
    return FileIO(_open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab")  # for writing only, a pipe would wait


def _open(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        os.set_blocking(descriptor, True)
        return descriptor
    os.close(descriptor)
    what = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
    raise OddFile(errno.EINVAL, f"it is {what} and not a file", str(path))


def move_away(path: Path) -> str:
    """The command that keeps a damaged file under a name that is free."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
    return shlex.join(["mv", str(path), str(next(name for name in names if not name.exists()))])
