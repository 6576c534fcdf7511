"""Files that appear under their final name only when they are complete."""

import json
import os
from pathlib import Path
from typing import Any

from ingot.errors import disk_error


def write_whole(path: Path, data: bytes | bytearray | memoryview, durable: bool = True) -> None:
    """Write to a temporary name, flush to the disk, rename: a reader sees the whole file or none."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error("write", path, error) from None


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())
