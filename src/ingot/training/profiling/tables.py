"""The tables that profiled steps leave in the run folder, read without torch."""

from contextlib import suppress
from pathlib import Path

import msgspec

from ingot.training.runtime.run_files import PROFILE

FIRST_RANK = "steps-*-rank-0.json"


class ProfileTable(msgspec.Struct):
    """What steps-A-B-rank-N.json holds."""

    steps: tuple[int, int]
    """The first and the last."""
    rank: int
    on_gpu: bool
    milliseconds_per_step: dict[str, float]
    """By category."""
    total_milliseconds_per_step: float
    trace: str
    """Its file, in the same folder."""
    events_left_out: int = 0
    """Of the trace, because it has so many."""


def profiled_steps(folder: Path) -> set[int]:
    """The steps of a run that are profiled already."""
    return {step for table in read_profiles(folder) for step in range(table.steps[0], table.steps[1] + 1)}


def read_profiles(folder: Path) -> list[ProfileTable]:
    """The tables of rank 0, in the order of their steps."""
    tables = []
    for path in (folder / PROFILE).glob(FIRST_RANK):
        with suppress(OSError, msgspec.DecodeError):  # damaged
            tables.append(msgspec.json.decode(path.read_bytes(), type=ProfileTable))
    return sorted(tables, key=lambda table: table.steps)
