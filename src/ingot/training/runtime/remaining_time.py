"""How long a run still takes: its remaining batches, evaluations and saves.

Batches vary (other processes, other shapes, a first step that compiles), so the time of one is the median over the last
rows. An evaluation that was not measured yet is estimated from the batches: a forward pass takes a third of a step.
"""

import statistics
from collections import deque
from collections.abc import Callable

from ingot.config.durations import BatchClock, Duration

ROWS = 32  # over how many rows the median is taken
FORWARD_PART = 1 / 3  # of a step: the backward pass takes twice as long as the forward pass


class RemainingTime:
    """Learns how long batches, evaluations and saves take. `eval_tokens` returns the tokens of all evaluations that
    follow a batch. Saves at wall-clock intervals are not counted."""

    def __init__(self, clock: BatchClock, save_interval: Duration, eval_tokens: Callable[[int], int]):
        self.clock, self.eval_tokens = clock, eval_tokens
        self.save_interval = Duration(0, "ba") if save_interval.is_wall_clock else save_interval
        self._batch_seconds: deque[float] = deque(maxlen=ROWS)
        self._eval_seconds: deque[float] = deque(maxlen=ROWS)  # of a token
        self._save_seconds: deque[float] = deque(maxlen=ROWS)

    def add_batches(self, count: int, seconds: float) -> None:
        self._batch_seconds.append(seconds / count)

    def add_evaluation(self, tokens: int, seconds: float) -> None:
        if tokens:
            self._eval_seconds.append(seconds / tokens)

    def add_save(self, seconds: float) -> None:
        """Seconds that a save stopped training."""
        self._save_seconds.append(seconds)

    def seconds_after(self, batch: int) -> float | None:
        """From the end of a batch to the end of the run; None before anything was measured."""
        if not self._batch_seconds:
            return None
        each, clock = statistics.median(self._batch_seconds), self.clock
        eval_token = FORWARD_PART * each / (clock.batch_samples * clock.sample_tokens)
        if self._eval_seconds:
            eval_token = statistics.median(self._eval_seconds)
        save = statistics.median(self._save_seconds) if self._save_seconds else 0.0
        saves = clock.events_after(self.save_interval, batch)
        return (clock.total_batches - batch) * each + self.eval_tokens(batch) * eval_token + saves * save
