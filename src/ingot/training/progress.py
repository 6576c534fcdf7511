"""How far a run has come: everything that changes while it trains, next to weights and optimizer state."""

from dataclasses import dataclass, field
from typing import Any

from ingot.training.runtime.run_folder import ResumeState


@dataclass
class Progress:
    """Learning rate and next samples are functions of `batch`, so a resumed run needs no other state for them."""

    total: int
    """The number of batches of the run."""
    batch: int = 0
    """The number of finished batches."""
    train_seconds: float = 0.0
    """Over all restarts."""
    skipped_batches: set[int] = field(default_factory=set)
    """Batches that a guard decided not to train on."""

    @property
    def is_last(self) -> bool:
        return self.batch == self.total

    @property
    def is_skipped(self) -> bool:
        """Whether the current batch is one not to train on."""
        return self.batch in self.skipped_batches

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint's manifest holds, whose `step` is the batch."""
        return {"train_seconds": self.train_seconds, "left_out": sorted(self.skipped_batches)}

    def restore(self, batch: int, state: ResumeState) -> None:
        """Go to a checkpoint. What this process decided to skip since then stays skipped."""
        self.batch, self.train_seconds = batch, state.train_seconds
        self.skipped_batches |= set(state.left_out)
