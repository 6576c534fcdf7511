"""How long the parts of a run take, as measured in it, or what is assumed before it has run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ingot.launch.protocol import LaunchFolder
from ingot.launch.supervisor.records import Opened, PhaseBegan
from ingot.launch.supervisor.state_file import STATE, read_state
from ingot.storage.json_lines import read_json_lines
from ingot.training.runtime.run_files import METRICS

TAIL_BYTES = 1_000_000  # of the metrics: about a thousand rows
START_UP_SECONDS, STEP_SECONDS = 60.0, 10.0  # assumed; some clusters need more, few less
SIGNAL_SECONDS = 180  # to save before the time limit, where no save has been measured yet


@dataclass(frozen=True)
class MeasuredTimes:
    """The longest of each; 0 if it has not been measured."""

    start_up: float = 0.0
    step: float = 0.0
    save: float = 0.0

    @property
    def signal_seconds(self) -> int:
        """How long before the limit to ask: twice a save and a step, and a minute for Slurm."""
        return 60 + math.ceil(2 * (self.save + self.step)) if self.save else SIGNAL_SECONDS

    @property
    def why(self) -> str:
        """Where that comes from."""
        if not self.save:
            return "no save of this run has been measured yet"
        return f"a save took {self.save:.1f} s, a step {self.step:.1f} s"


def read_times(run: Path) -> MeasuredTimes:
    """What a run's folder says."""
    save = step = 0.0
    for row in read_json_lines(run / METRICS, TAIL_BYTES):
        save = max(save, row.get("checkpoint/write_seconds", 0.0) + row.get("checkpoint/stall_seconds", 0.0))
        step = max(step, 1 / row["throughput/batches_per_sec"] if row.get("throughput/batches_per_sec") else 0.0)
    return MeasuredTimes(start_up_seconds(read_state(LaunchFolder(run).path / STATE)), step, save)


def start_up_seconds(records: Sequence[Any]) -> float:
    """From the beginning of an attempt to its first step, in the last attempt that got so far; 0 if none did."""
    opened: dict[int, str] = {}
    found = 0.0
    for record in records:
        if isinstance(record, Opened):
            opened[record.epoch] = record.time
        elif isinstance(record, PhaseBegan) and record.phase == "running" and record.epoch in opened:
            begun = datetime.fromisoformat(opened.pop(record.epoch))
            found = max(0.0, (datetime.fromisoformat(record.time) - begun).total_seconds())
    return found
