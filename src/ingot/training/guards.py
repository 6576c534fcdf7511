"""Losses and gradients that are no numbers, losses that jump: found, and dealt with alike on all processes.

All decide from numbers that a reduction has made the same everywhere, so no message is needed to agree. On a GPU the
numbers of a step are looked at while the next one runs, and the loop does not wait; only `skip`, which must know before
the weights change, waits for each step.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.config.training import GuardsConfig
from ingot.errors import EXIT_FAULT, IngotError, NumericError


class CorruptReplica(IngotError):
    """Processes that should hold the same weights do not."""

    exit_code = EXIT_FAULT


@dataclass(frozen=True)
class Anomaly:
    """Something wrong with a batch."""

    batch: int
    what: str
    policy: str

    def error(self, why: str = "") -> NumericError:
        return NumericError(
            f"{self.what} at batch {self.batch}{why}; lower optimizer.lr, lengthen scheduler.t_warmup, look at the "
            "data, or let guards.non_finite or guards.spike be skip or rollback; the same command continues from the "
            "last checkpoint"
        )


class Guard:
    """Judges each step by its loss and gradient norm."""

    def __init__(self, config: GuardsConfig, total_loss: Callable[[Tensor], Tensor] | None, scaled: bool):
        self.config, self.scaled = config, scaled
        self.total_loss = total_loss if config.spike != "ignore" else None
        self.losses: deque[float] = deque(maxlen=config.spike_window)
        self.pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self.waits = "skip" in (config.non_finite, config.spike)

    def state(self) -> list[float]:
        """The losses that the next ones are compared with, for the checkpoint."""
        return list(self.losses)

    def restore(self, losses: list[float]) -> None:
        self.losses.clear()
        self.losses.extend(losses)
        self.pending.clear()

    def look(self, batch: int, loss: Tensor, norm: Tensor) -> Anomaly | None:
        """Take the numbers of a step; gives what is wrong with it, or on a GPU with the one before it."""
        if self.total_loss is not None:
            loss = self.total_loss(loss)
        pair = torch.stack([loss.detach().float(), norm.detach().float()])
        event = None
        if pair.is_cuda:
            pair = pair.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.pending.append((batch, pair, event))
        return self.settle(0 if event is None or self.waits else 1)

    def settle(self, left: int = 0) -> Anomaly | None:
        """Judge all but the last so many steps; gives the first finding."""
        while len(self.pending) > left:
            batch, pair, event = self.pending.popleft()
            if event is not None:
                event.synchronize()
            if finding := self._judge(batch, *pair.tolist()):
                return finding
        return None

    def _judge(self, batch: int, loss: float, norm: float) -> Anomaly | None:
        # with fp16 an overflowing gradient is the scaler's daily bread
        if not math.isfinite(loss) or (not math.isfinite(norm) and not self.scaled):
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
            return Anomaly(batch, what, self.config.non_finite)
        if self.config.spike == "ignore":
            return None
        if len(self.losses) >= max(8, self.config.spike_window // 4):
            middle = statistics.median(self.losses)
            spread = 1.4826 * statistics.median(abs(x - middle) for x in self.losses)
            score = (loss - middle) / max(spread, 1e-3 * abs(middle), 1e-12)
            if score > self.config.spike_threshold:
                what = f"the loss jumped to {loss:.4f}, {score:.1f} robust deviations above {middle:.4f},"
                return Anomaly(batch, what, self.config.spike)
        self.losses.append(loss)
        return None
