"""metrics.jsonl: one JSON object per logged step."""

import json
import math
import os
from pathlib import Path
from typing import IO, Any

from ingot.errors import disk_error
from ingot.storage.json_lines import read_json_lines
from ingot.training.listener import Row, RunListener
from ingot.training.runtime.run_files import METRICS


class MetricsFile(RunListener):
    """Appends rows. On resume the file is truncated to its size at the checkpoint."""

    def __init__(self, folder: str):
        self.path = Path(folder) / METRICS
        self.file: IO[bytes] | None = None

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        self.file = self.path.open("ab")
        self.rewind(batch, state)

    def rewind(self, batch: int, state: dict[str, Any] | None) -> None:
        assert self.file is not None
        self.file.truncate(min(int((state or {}).get("metrics_bytes", 0)), self.path.stat().st_size))
        self.file.seek(0, os.SEEK_END)

    def row(self, row: Row, batch: int) -> None:
        assert self.file is not None
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
        try:
            self.file.write(json.dumps(finite).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            raise disk_error("write", self.path, error) from None

    def state(self) -> dict[str, Any]:
        assert self.file is not None
        os.fsync(self.file.fileno())
        return {"metrics_bytes": self.file.tell()}

    def end(self) -> None:
        if self.file is not None:
            self.file.close()


def read_rows(folder: str | Path) -> list[Row]:
    """All rows of a run."""
    return read_json_lines(Path(folder) / METRICS)
