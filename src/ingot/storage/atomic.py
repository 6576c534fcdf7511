"""Files that appear under their final name only when they are complete."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import xxhash

from ingot.errors import disk_error


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Write to a temporary name, flush to the disk, rename: a reader sees the whole file or none."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise disk_error("write", path, error) from None
    finally:
        partial.unlink(missing_ok=True)


def begin_to_store(descriptor: int, offset: int, size: int) -> None:
    """Have the disk start on bytes just written, so that a later fsync finds little left to wait for."""
    if hasattr(os, "posix_fadvise"):  # dirty pages are queued for writing; they stay in the cache
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def file_hash(path: Path, algorithm: Any = xxhash.xxh3_128) -> str:
    """The hash of a file, read in blocks."""
    digest = algorithm()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return str(digest.hexdigest())


def write_whole(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file, whole or not at all."""
    with whole_file(path) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())
