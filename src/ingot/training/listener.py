"""What a run reports. The trainer calls these methods; `ingot.report` prints, writes and draws.

Checkpoints store the position in the metrics file, so a resumed run continues the file exactly at the checkpoint:
nothing is missing, nothing is repeated.
"""

from typing import Any

Row = dict[str, float]


class RunListener:
    """Ignores everything; subclasses override what they need."""

    def note(self, text: str) -> None:
        """A decision or an event, as a sentence."""

    def warn(self, text: str) -> None:
        """A problem that does not stop the run."""

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        """The first step follows `batch`; `state` is the result of `state()` at the checkpoint that is resumed."""

    def rewind(self, batch: int, state: dict[str, Any] | None) -> None:
        """The run rolled back to a checkpoint; `state` as for `begin`. The batches after it are repeated."""

    def row(self, row: Row, batch: int) -> None:
        """The metrics of one step."""

    def evaluating(self, what: str, done: int, total: int) -> None:
        """An evaluation goes on: what is evaluated now, and how many of its tokens are done."""

    def state(self) -> dict[str, Any]:
        """What to store in a checkpoint. Everything received so far must be on disk when this returns."""
        return {}

    def end(self) -> None:
        """The run has ended, successfully or not."""
