"""Reads the files of a run folder for a report, whatever they hold: damaged, huge, or made by others.

Only regular files that are in the folder are read. A link to elsewhere could show a file of the person who makes the
report to those who look at it, and a pipe would never end.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

import msgspec

from ingot.errors import ConfigError

LONGEST_LINE = 4_000_000  # bytes; a row of metrics has some thousand
BLOCK = 1 << 22
TAIL = 16_000_000  # bytes of a file of events: its end
_decode_numbers = msgspec.json.Decoder(dict[str, float | None]).decode


def own_file(folder: Path, name: str) -> Path | None:
    """A regular file of a run folder; None if there is none."""
    path = folder / name
    try:
        real = path.resolve(strict=True)
        return path if S_ISREG(real.stat().st_mode) and real.is_relative_to(folder.resolve()) else None
    except (OSError, RuntimeError):  # a loop of links is a RuntimeError in Python 3.11 and 3.12
        return None


def read_tail(folder: Path, name: str, size: int = TAIL) -> str:
    """The end of a text file; nothing if it cannot be read."""
    path = own_file(folder, name)
    with suppress(OSError):
        if path is not None:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - size))
                return file.read(size).decode(errors="replace")
    return ""


def read_objects(folder: Path, name: str) -> list[dict[str, Any]]:
    """The JSON objects in the lines at the end of a file, those that are whole."""
    found = []
    for line in read_tail(folder, name).split("\n"):
        with suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict):
                found.append(content)
    return found


def number_rows(path: Path) -> Iterator[dict[str, float | None]]:
    """The rows of a file of metrics. What is not a finite number is left out of a row, a damaged line as a whole."""
    try:
        with path.open("rb") as file:
            for line in _lines(file):
                try:
                    yield _decode_numbers(line)
                except msgspec.DecodeError:
                    yield from _other_row(line)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _lines(file: Any) -> Iterator[bytes]:
    """The lines of a file without those that are too long to be a row."""
    begun, too_long = b"", False
    while block := file.read(BLOCK):
        first, *others = block.split(b"\n")
        begun += b"" if too_long else first
        too_long = too_long or len(begun) > LONGEST_LINE
        if not others:
            begun = b"" if too_long else begun
            continue
        if not too_long:
            yield begun
        begun, too_long = others.pop(), False
        yield from others
    if begun and not too_long:
        yield begun


def _other_row(line: bytes) -> Iterator[dict[str, float | None]]:
    """A row with values that are not numbers, or NaN and infinity as Python writes them: of another program."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict):
            yield {key: float(value) for key, value in row.items() if _is_finite(value)}


def _is_finite(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)
    )
