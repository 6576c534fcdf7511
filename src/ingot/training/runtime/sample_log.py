"""Which samples each rank trained on, one line per batch: samples/rank-N.txt (`loggers.samples=true`).

On resume the files are truncated to the checkpoint, like the metrics, so each batch of a run is listed once.
"""

from pathlib import Path
from typing import IO

import numpy as np

from ingot.errors import disk_error
from ingot.training.runtime.run_files import SAMPLES


class SampleLog:
    """Appends `BATCH: ID ID ...`."""

    def __init__(self, run: Path, rank: int, enabled: bool):
        self.path, self.enabled = run / SAMPLES / f"rank-{rank}.txt", enabled
        self.file: IO[str] | None = None

    def write(self, batch: int, samples: np.ndarray) -> None:
        if not self.enabled:
            return
        if self.file is None:
            self.path.parent.mkdir(exist_ok=True)
            self.file = self.path.open("a", encoding="utf-8")
        try:
            self.file.write(f"{batch}: {' '.join(map(str, samples.tolist()))}\n")
            self.file.flush()
        except OSError as error:
            raise disk_error("write", self.path, error) from None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def truncate_sample_logs(run: Path, batch: int) -> None:
    """Remove the lines after a batch from the files of all ranks, including ranks of an earlier, larger run."""
    for path in (run / SAMPLES).glob("rank-*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(x for x in lines if x.endswith("\n") and int(x.partition(":")[0]) <= batch))
