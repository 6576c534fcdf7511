"""Files that get their final name only when they are complete, and survive a power cut."""

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import xxhash

from ingot.errors import disk_error

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


@contextmanager
def draft_of(path: Path, private: bool = False) -> Iterator[IO[bytes]]:
    """Write to a temporary name, flush to the disk, rename: a reader sees the whole file or none.

    private: readable by its owner only, also while it is written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _create_private(draft) if private else draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path, private: bool = False) -> Iterator[IO[bytes]]:
    """`draft_of` with a sentence for the user when the disk fails."""
    try:
        with draft_of(path, private) as file:
            yield file
    except OSError as error:
        raise disk_error("write", path, error) from None


def write_whole(path: Path, data: bytes | bytearray | memoryview | str, private: bool = False) -> None:
    """Write a file, whole or not at all."""
    with whole_file(path, private) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:  # folders of some network file systems
            raise
    finally:
        os.close(descriptor)


def begin_to_store(descriptor: int, offset: int, size: int) -> None:
    """Start writing bytes to the disk, so that a later fsync has little to wait for."""
    if hasattr(os, "posix_fadvise"):  # dirty pages are queued for writing; they stay in the cache
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def file_hash(path: Path, algorithm: Any = xxhash.xxh3_128, size: int | None = None) -> str:
    """The hash of a file, or of its first `size` bytes, read in blocks."""
    digest, left = algorithm(), math.inf if size is None else size
    with path.open("rb") as file:
        while left and (block := file.read(int(min(left, 1 << 22)))):
            digest.update(block)
            left -= len(block)
    return str(digest.hexdigest())


def _create_private(path: Path) -> IO[bytes]:
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")
