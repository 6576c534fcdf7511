"""What a run tells the outside. The trainer calls these; `ingot.report` prints, writes and draws them.

The position in the metrics file goes into every checkpoint, so that a resumed run continues the file exactly where
the checkpoint was: nothing missing, nothing twice.
"""

from typing import Any, Protocol

Row = dict[str, float]


class RunListener(Protocol):
    """A listener of a run."""

    def note(self, text: str) -> None:
        """A decision or an event, in a sentence."""

    def warn(self, text: str) -> None:
        """Something that went wrong and did not stop the run."""

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        """The first step comes after `batch`; `state` is what `state()` gave when the checkpoint was saved."""

    def rewind(self, batch: int, state: dict[str, Any] | None) -> None:
        """The run has gone back to a checkpoint; `state` is as for `begin`. What came after it will come again."""

    def row(self, row: Row, batch: int) -> None:
        """Metrics of one step."""

    def state(self) -> dict[str, Any]:
        """What to keep in a checkpoint; everything written so far must be on disk when this returns."""

    def end(self) -> None:
        """The run is over, well or not."""
