"""One optimizer step: accumulate, clip, judge, update. Nothing here waits for the device.

The loss of a batch is the mean over all its tokens that count, wherever they are. So the microbatch size changes memory
and speed, never the result.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ingot.data.loading.batch_loader import Batch
from ingot.parallel.executors.base import Executor
from ingot.training.loss_scale import LossScale
from ingot.training.optimizer import Optimizer


@dataclass(frozen=True)
class StepResult:
    """What a step computed, on the device."""

    loss_share: Tensor
    """This rank's share of the mean loss; `Executor.sum_loss` returns the whole."""
    grad_norm: Tensor
    """The global norm before clipping."""


def train_step(
    executor: Executor,
    optimizer: Optimizer,
    scaler: LossScale,
    batch: Batch,
    limit: float | None = None,
    accept: Callable[[Tensor, Tensor], bool] = lambda loss_share, grad_norm: True,
) -> StepResult:
    """Train on this rank's part of a batch. `limit` bounds the gradient norm; `accept` may refuse the update, having
    seen the loss and the norm."""
    scale = scaler.factor if scaler.enabled else None
    loss_share = executor.accumulate(batch, scale)
    grad_norm = executor.clip_gradients(limit, scale)
    if accept(loss_share, grad_norm):
        overflow = (~grad_norm.isfinite()).float() if scale is not None else None
        optimizer.step(overflow)
        if overflow is not None:
            scaler.update(overflow)
    optimizer.zero_grad()
    executor.weights_changed()
    return StepResult(loss_share, grad_norm)
