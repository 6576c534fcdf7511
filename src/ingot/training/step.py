"""One optimizer step: the global batch in microbatches, each weighted by its tokens.

The loss of a batch is the mean over all its loss-bearing tokens, wherever they stand. So the microbatch size changes
memory and speed, never the result.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.model.gpt import IGNORE
from ingot.model.kernels import refresh
from ingot.training.device import autocast
from ingot.training.loss_scale import LossScale
from ingot.training.optimizer import Optimizer, clip_gradients

if TYPE_CHECKING:
    from ingot.parallel.executors.distributed import Spread
    from ingot.training.cuda_graph import MicrobatchGraph


class TrainStep:
    """Forward, backward, clip and update for one global batch. Nothing here waits for the device."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        micro: int,
        spread: "Spread | None" = None,
        accept: Callable[[Tensor, Tensor], bool] = lambda loss, norm: True,
    ):
        self.config, self.model, self.optimizer, self.spread = config, model, optimizer, spread
        self.device, self.micro = device, micro
        self.accept = accept  # may refuse an update, having seen loss and gradient norm
        self.updating = False  # whether the optimizer has begun to change weights
        self.graph: MicrobatchGraph | None = None  # stands for the passes over whole microbatches
        self.scaler = LossScale(device, enabled=config.precision == "fp16")

    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Train on a batch; gives its mean loss (of a spread model, this process's share of it) and the gradient norm
        before clipping, both on the device."""
        loss = self.accumulate(batch)
        limit, scale = self.config.gradient_clipping, self.scaler.factor if self.scaler.enabled else None
        clip = self.spread.clip_gradients if self.spread else partial(clip_gradients, self.model.parameters())
        norm = clip(limit, scale)
        if self.accept(loss, norm):
            self.updating = True
            overflow = (~norm.isfinite()).float() if self.scaler.enabled else None
            self.optimizer.step(overflow)
            if overflow is not None:
                self.scaler.update(overflow)
        self.optimizer.zero_grad()
        self.updating = False
        return loss, norm

    def retry_with(self, micro: int) -> None:
        """Forget a failed attempt at a batch; the next one is made in microbatches of another size."""
        self.micro, self.graph = micro, None
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def accumulate(self, batch: Batch) -> Tensor:
        """Add the gradients of a batch's mean loss; gives that loss."""
        own_tokens = int(np.count_nonzero(batch.labels != IGNORE))
        if self.spread is None:
            self.model.train()
            refresh(self.model)
            return self._microbatches(batch, self._divisor(own_tokens))
        self.spread.train()
        batch_tokens = self.spread.batch_tokens(own_tokens)
        count = self._microbatch_count()
        batch = pad_batch(batch, count * self.micro)
        if self.spread.pipeline is None:
            return self._microbatches(batch, batch_tokens)
        inputs, labels = to_device(batch.tokens, self.device), to_device(batch.labels, self.device)
        scale = self.scaler.factor
        return self.spread.pipeline.accumulate(inputs, labels, count, batch_tokens / scale) / scale

    def _microbatches(self, batch: Batch, batch_tokens: Tensor) -> Tensor:
        total = torch.zeros((), device=self.device)
        rows = len(batch.tokens)
        divisor = batch_tokens / self.scaler.factor if self.scaler.enabled else batch_tokens
        if self.graph is not None:
            self.graph.begin()
        for start in range(0, rows, self.micro):
            inputs, labels = self._cut(batch, start)
            if self.spread is not None:
                self.spread.before_backward(last=start + self.micro >= rows)
            graph = self.graph if len(inputs) == self.micro else None
            total += (graph.run if graph is not None else self.forward_backward)(inputs, labels, divisor)
        return total / self.scaler.factor if self.scaler.enabled else total

    def forward_backward(self, inputs: Tensor, labels: Tensor, divisor: Tensor) -> Tensor:
        """Add the gradients of a microbatch's part of the loss; gives that part."""
        with autocast(self.config.precision, self.device):
            loss = self.model(inputs, labels) / divisor
        loss.backward()
        return loss.detach()

    def first_microbatch(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """What `forward_backward` is given first for a batch."""
        return *self._cut(batch, 0), self._divisor(int(np.count_nonzero(batch.labels != IGNORE)))

    def _cut(self, batch: Batch, start: int) -> tuple[Tensor, Tensor]:
        rows = slice(start, start + self.micro)
        return to_device(batch.tokens[rows], self.device), to_device(batch.labels[rows], self.device)

    def _divisor(self, tokens: int) -> Tensor:
        # on the device: torch divides by a number by way of its reciprocal there, a recorded pass cannot
        return torch.full((), max(1, tokens), dtype=torch.float32, device=self.device)

    def _microbatch_count(self) -> int:
        """Microbatches per step, the same on every process: collectives must meet."""
        assert self.spread is not None
        rows = -(-self.config.global_train_batch_size // self.spread.mesh.layout.data)
        count = -(-rows // self.micro)
        return self.spread.pipeline.microbatches(count) if self.spread.pipeline is not None else count


def pad_batch(batch: Batch, rows: int) -> Batch:
    """A batch with rows added that carry no loss."""
    missing = ((0, rows - len(batch.tokens)), (0, 0))
    labels = np.pad(batch.labels, missing, constant_values=IGNORE)
    return Batch(np.pad(batch.tokens, missing), labels, batch.samples)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
