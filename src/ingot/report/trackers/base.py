"""What a tracker is: the interface that each file of this package implements.

`feed.py` calls it, in a process of its own (`sidecar.py`), so a method may take as long as the network does and may
raise whatever its library raises.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.training.runtime.run_files import TRACKERS

Values = dict[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked."""

    name: str
    folder: Path
    config: dict[str, Any]
    id: str | None
    """The tracker's id of the run, if it is to be continued."""
    group: str
    forked_from: str | None
    """The run, checkpoint or folder whose weights the run started from."""
    suffix: str = ""
    """Of the name: after a rollback that the tracker cannot undo, the repeated steps go under a new run."""

    @property
    def tracker_folder(self) -> Path:
        """Where a tracker may keep files."""
        return self.folder / TRACKERS


@dataclass
class Summary:
    """How a run ended, or where it is."""

    state: str  # finished, stopped or crashed
    step: int
    values: Values = field(default_factory=dict)


class Tracker:
    """A connection to a tracker. Methods are called in the order in which they are written here."""

    keeps_unclosed: bool = True
    """Whether what was logged survives if the process is killed before `close`."""

    def missing_login(self, env: Collection[str], has_home: bool) -> str | None:
        """What to do if there is no login, checked without a network; None if there is one. `env` names the variables
        that the run will have; has_home: it will see this home folder."""
        return None

    def open(self, run: TrackedRun, after: int) -> str:
        """Begin a run, or continue one after a step. Return its id."""
        raise NotImplementedError

    def last_step(self) -> int | None:
        """The last step that the tracker holds, -1 for none; None if it cannot tell."""
        return None

    def log(self, step: int, values: Values) -> None:
        """The finite metrics of a step."""

    def event(self, step: int, kind: str, text: str) -> None:
        """A restart or an anomaly."""

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """A table of evaluation results."""

    def rewind(self, step: int) -> bool:
        """Forget everything after a step, because the run rolled back. False if the tracker cannot."""
        return False

    def flush(self) -> None:
        """Return when everything logged so far is on its way to where it is kept."""

    def close(self, summary: Summary) -> None:
        """The end of this process, not necessarily of the run."""

    def discard_unclosed(self, folder: Path) -> None:
        """Remove what a killed process left, for trackers that do not keep it."""
