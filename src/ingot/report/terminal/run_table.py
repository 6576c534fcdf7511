"""A line per run: state, step, loss, speed, age of the newest checkpoint."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ingot.checkpoint.manifest import CHECKPOINTS, MANIFEST, steps_in
from ingot.errors import ConfigError
from ingot.storage.json_lines import read_json_lines
from ingot.training.runtime.run_files import CONFIG, METRICS

TAIL_BYTES = 100_000  # of the metrics, in which the last row with a loss is
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass
class RunLine:
    """What is shown of a run; None where it is not known yet."""

    name: str
    state: str
    step: int
    loss: float | None
    tokens_per_second: float | None
    checkpoint_step: int | None
    checkpoint_age_seconds: float | None


def find_run_folders(root: Path) -> list[Path]:
    """The run folders in a folder, or the folder itself if it is one."""
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder; name the one that holds your runs")
    folders = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
    return [folder for folder in folders if (folder / CONFIG).is_file() or (folder / METRICS).is_file()]


def run_line(run: Path, state: str) -> RunLine:
    """Read the end of a run's metrics and its newest checkpoint."""
    rows = read_json_lines(run / METRICS, TAIL_BYTES)
    row: dict[str, Any] = next((row for row in reversed(rows) if "loss/train/total" in row), {})
    step = max(steps_in(run / CHECKPOINTS), default=None)
    age = None
    if step is not None and (manifest := run / CHECKPOINTS / str(step) / MANIFEST).exists():
        age = time.time() - manifest.stat().st_mtime
    return RunLine(run.name, state, int(row.get("time/batch", 0)), row.get("loss/train/total"),
                   row.get("throughput/tokens_per_sec"), step, age)  # fmt: skip


def table_of(lines: list[RunLine]) -> Table:
    """For a terminal of 80 columns."""
    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state", overflow="fold")
    for name in ("step", "loss", "tok/s", "checkpoint", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.name, line.state, f"{line.step:,}", "" if line.loss is None else f"{line.loss:.4f}",
            "" if line.tokens_per_second is None else f"{line.tokens_per_second:,.0f}",
            "" if line.checkpoint_step is None else f"{line.checkpoint_step:,}", age_text(line.checkpoint_age_seconds),
        )  # fmt: skip
    return table


def age_text(seconds: float | None) -> str:
    """`2 min`, `3 h`: one unit, rounded down."""
    if seconds is None:
        return ""
    size, unit = next(((size, unit) for size, unit in UNITS if seconds >= size), UNITS[-1])
    return f"{int(max(seconds, 0) // size)} {unit}"
