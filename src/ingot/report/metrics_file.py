"""metrics.jsonl: one JSON object per logged step."""

import json
import math
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from ingot.errors import DataError, disk_error
from ingot.storage.json_lines import read_json_lines
from ingot.storage.small_files import OddFile, move_away, open_to_append
from ingot.training.listener import Row, RunListener
from ingot.training.runtime.run_files import METRICS

MAX_UNWRITTEN_BYTES = 4 << 20  # of rows that wait for room: about a thousand
MAX_STATE_BYTES = 128 << 10  # of them in a copy of the state, whose record has room for a megabyte


class MetricsFile(RunListener):
    """Appends rows. On resume the file is truncated to its size at the checkpoint.

    A row that cannot be written (a full disk) is a warning, as a failed save is: it is kept and written later.
    """

    def __init__(self, folder: str, warn: Callable[[str], None] = lambda text: None):
        self.path, self._warn = Path(folder) / METRICS, warn
        self.file: FileIO | None = None
        self._unwritten = b""
        self._is_failing = False

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        try:
            self.file = open_to_append(self.path)
        except OddFile as error:
            where = f"cannot write {self.path}: {error.strerror}"
            raise DataError(f"{where}; move it away with `{move_away(self.path)}`") from None
        self.rewind(batch, state)

    def rewind(self, batch: int, state: dict[str, Any] | None) -> None:
        assert self.file is not None
        self.file.truncate(min(int((state or {}).get("metrics_bytes", 0)), self.path.stat().st_size))
        self.file.seek(0, os.SEEK_END)
        self._unwritten = str((state or {}).get("metrics_unwritten", "")).encode()
        self._write()

    def row(self, row: Row, batch: int) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
        line = json.dumps(finite).encode() + b"\n"
        if len(self._unwritten) + len(line) <= MAX_UNWRITTEN_BYTES:  # else this row is lost, and no part of it written
            self._unwritten += line
        self._write()

    def _write(self) -> None:
        """Write what is waiting, as far as that works."""
        assert self.file is not None
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self.file.write(self._unwritten) :]
        except OSError as error:
            if not self._is_failing:
                self._warn(f"{disk_error('write', self.path, error)}; the run continues and keeps its last rows")
        self._is_failing = bool(self._unwritten)

    def state(self) -> dict[str, Any]:
        assert self.file is not None
        os.fsync(self.file.fileno())
        lines = self._unwritten[:MAX_STATE_BYTES]
        waiting = lines[: lines.rfind(b"\n") + 1].decode()  # a copy in host memory survives this process, and its rows
        return {"metrics_bytes": self.file.tell()} | ({"metrics_unwritten": waiting} if waiting else {})

    def end(self) -> None:
        if self.file is not None:
            self._write()
            self.file.close()
            self.file = None


def read_rows(folder: str | Path) -> list[Row]:
    """All rows of a run."""
    return read_json_lines(Path(folder) / METRICS)
