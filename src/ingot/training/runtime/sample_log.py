"""Which samples each process trained on, one line per batch: samples/rank-N.txt (`loggers.samples=true`).

On resume the files are cut back to the checkpoint, as the metrics are, so each batch of a run stands there once.
"""

from pathlib import Path
from typing import IO

import numpy as np

from ingot.training.runtime.run_files import SAMPLES


class SampleLog:
    """Appends `BATCH: ID ID ...`."""

    def __init__(self, run: Path, rank: int, wanted: bool):
        self.path, self.wanted = run / SAMPLES / f"rank-{rank}.txt", wanted
        self.file: IO[str] | None = None

    def write(self, batch: int, samples: np.ndarray) -> None:
        if not self.wanted:
            return
        if self.file is None:
            self.path.parent.mkdir(exist_ok=True)
            self.file = self.path.open("a", encoding="utf-8")
        self.file.write(f"{batch}: {' '.join(map(str, samples.tolist()))}\n")
        self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def cut_back(run: Path, batch: int) -> None:
    """Forget what came after a batch, in the files of all processes, of which there may have been more."""
    for path in (run / SAMPLES).glob("rank-*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(x for x in lines if x.endswith("\n") and int(x.partition(":")[0]) <= batch))
