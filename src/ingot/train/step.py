"""One optimizer step: the global batch in microbatches, each weighted by its tokens.

The loss of a batch is the mean over all its loss-bearing tokens, wherever they stand. So the microbatch size changes
memory and speed, never the result.
"""

import numpy as np
import torch
from torch import Tensor, nn

from ingot.data.loader import Batch
from ingot.model.gpt import IGNORE
from ingot.train.config import RunConfig
from ingot.train.device import autocast
from ingot.train.optimizer import Optimizer, clip_gradients


class TrainStep:
    """Forward, backward, clip and update for one global batch. Nothing here waits for the device."""

    def __init__(self, config: RunConfig, model: nn.Module, optimizer: Optimizer, device: torch.device, micro: int):
        self.config, self.model, self.optimizer = config, model, optimizer
        self.device, self.micro = device, micro
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")

    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Train on a batch; gives its mean loss and the gradient norm before clipping, both on the device."""
        loss = self.accumulate(batch)
        for part in self.optimizer.parts.values():
            self.scaler.unscale_(part)
        norm = clip_gradients(self.model.parameters(), self.config.gradient_clipping)
        for part in self.optimizer.parts.values():
            self.scaler.step(part)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss, norm

    def accumulate(self, batch: Batch) -> Tensor:
        """Add the gradients of a batch's mean loss; gives that loss."""
        self.model.train()
        tokens = max(1, int(np.count_nonzero(batch.labels != IGNORE)))
        total = torch.zeros((), device=self.device)
        for start in range(0, len(batch.tokens), self.micro):
            inputs, labels = (
                to_device(a[start : start + self.micro], self.device) for a in (batch.tokens, batch.labels)
            )
            with autocast(self.config.precision, self.device):
                loss = self.model(inputs, labels) / tokens
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
