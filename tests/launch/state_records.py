"""What the supervisor of a run has written down, for the tests of every kind of cluster."""

from pathlib import Path
from typing import Any

from ingot.launch.supervisor.records import Closed, Excluded, Judged, Opened, PhaseBegan
from ingot.launch.supervisor.state_file import read_state


class StateRecords:
    """The records of a run folder."""

    folder: Path

    @property
    def records(self) -> list[Any]:
        path = self.folder / "launch" / "state.jsonl"
        return read_state(path) if path.exists() else []

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def causes(self) -> list[tuple[str, str]]:
        return [(closed.cause.kind, closed.cause.node) for closed in self.of(Closed)]

    @property
    def nodes(self) -> list[tuple[str, ...]]:
        return [opened.nodes for opened in self.of(Opened)]

    @property
    def excluded(self) -> list[str]:
        return [record.node for record in self.of(Excluded)]

    @property
    def actions(self) -> list[str]:
        return [judged.action for judged in self.of(Judged)]

    def phases(self) -> list[str]:
        return [record.phase for record in self.of(PhaseBegan)]
