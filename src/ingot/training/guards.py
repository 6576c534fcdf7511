"""Detects NaN or infinite losses and gradients, and loss spikes, and says what the run does about them.

All ranks decide alike without a message, from numbers that a reduction has made equal. On a GPU the numbers of a step
are read while the next one runs, so the loop does not wait. Only the policy `skip`, which must know before the weights
change, waits for each step.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ingot.config.training import GuardsConfig
from ingot.errors import EXIT_FAULT, IngotError, NumericError
from ingot.parallel.executors.base import Executor


class CorruptReplica(IngotError):
    """Ranks that should hold the same weights do not."""

    exit_code = EXIT_FAULT


class Action(Enum):
    """What the run does about an anomaly."""

    SKIP = "skip"
    ROLLBACK = "rollback"


@dataclass(frozen=True)
class Anomaly:
    """Something wrong with a batch."""

    batch: int
    what: str
    policy: str

    def error(self, why: str = "") -> NumericError:
        return NumericError(
            f"{self.what} at batch {self.batch}{why}; lower optimizer.lr, lengthen scheduler.t_warmup, check the data, "
            "or set guards.non_finite or guards.spike to skip or rollback; the same command continues from the last "
            "checkpoint"
        )


class Guard:
    """Judges each step by its loss and gradient norm."""

    def __init__(self, config: GuardsConfig, executor: Executor, scaled: bool):
        self.config, self.executor, self.scaled = config, executor, scaled
        self.losses: deque[float] = deque(maxlen=config.spike_window)
        self.pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self.waits = "skip" in (config.non_finite, config.spike)
        self.anomaly: Anomaly | None = None
        """Found and not yet handled."""

    def state(self) -> list[float]:
        """The losses that the next ones are compared with, for the checkpoint."""
        return list(self.losses)

    def restore(self, losses: list[float]) -> None:
        self.losses.clear()
        self.losses.extend(losses)
        self.pending.clear()

    def accept(self, batch: int, loss: Tensor, norm: Tensor) -> bool:
        """Take the numbers of a step. Return whether it may change the weights: False if something is wrong with it,
        or on a GPU with the one before it."""
        # All ranks must judge alike. Without the loss scaler, a NaN in any rank's loss is in the global norm too.
        if self.config.spike != "ignore" or self.scaled:
            loss = self.executor.sum_loss(loss)
        pair = torch.stack([loss.detach().float(), norm.detach().float()])
        event = None
        if pair.is_cuda:
            pair = pair.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.pending.append((batch, pair, event))
        self.anomaly = self._judge_pending(0 if event is None or self.waits else 1)
        return self.anomaly is None

    def find_anomaly(self, wait: bool) -> Anomaly | None:
        """What is wrong with the steps so far, once. `wait` includes the step that the device may still compute."""
        found = self.anomaly or (self._judge_pending(0) if wait else None)
        self.anomaly = None
        return found

    def handle(self, anomaly: Anomaly, skipped_batches: set[int]) -> Action:
        """Skip the batch, now or after a rollback, or raise an error."""
        if anomaly.policy == "stop":
            raise anomaly.error()
        skipped_batches.add(anomaly.batch)
        if len(skipped_batches) > self.config.max_skips:
            raise anomaly.error(f", and guards.max_skips={self.config.max_skips} batches were skipped already")
        return Action(anomaly.policy)

    def check_replicas(self, batch: int) -> None:
        """Compare weights that should be the same on several ranks; an error if they differ."""
        if found := self.executor.differing_replicas():
            ranks, name = found
            raise CorruptReplica(
                f"after batch {batch}, weights differ from their replicas on rank {', '.join(map(str, ranks))} (first: "
                f"{name}); suspect faulty memory or compute on that node, and run again without it"
            )

    def _judge_pending(self, keep: int) -> Anomaly | None:
        """Judge all but the last `keep` steps. Return the first anomaly."""
        while len(self.pending) > keep:
            batch, pair, event = self.pending.popleft()
            if event is not None:
                event.synchronize()
            if found := self._judge(batch, *pair.tolist()):
                return found
        return None

    def _judge(self, batch: int, loss: float, norm: float) -> Anomaly | None:
        # the loss scaler handles overflowing fp16 gradients
        if not math.isfinite(loss) or (not math.isfinite(norm) and not self.scaled):
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
            return Anomaly(batch, what, self.config.non_finite)
        if self.config.spike == "ignore":
            return None
        if len(self.losses) >= max(8, self.config.spike_window // 4):
            middle = statistics.median(self.losses)
            deviation = 1.4826 * statistics.median(abs(x - middle) for x in self.losses)
            score = (loss - middle) / max(deviation, 1e-3 * abs(middle), 1e-12)
            if score > self.config.spike_threshold:
                what = f"the loss jumped to {loss:.4f}, {score:.1f} robust deviations above {middle:.4f},"
                return Anomaly(batch, what, self.config.spike)
        self.losses.append(loss)
        return None
