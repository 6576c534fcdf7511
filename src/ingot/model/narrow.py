"""Weights in the type of the matrix products, kept beside the fp32 ones and renewed once per optimizer step.

Autocast makes them anew for every microbatch, and turns every microbatch's gradient to fp32 before it adds it up: 26
bytes of traffic per weight, a tenth of the step of a 7b model whose microbatch is small. Here the gradient of the
narrow copy is added to the fp32 gradient as it is, and its memory let go: 12 bytes, and the same numbers to the bit.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from ingot.model.accumulate import add_narrow
except ImportError:  # torch for CPUs comes without Triton
    add_narrow = None  # type: ignore[assignment]


class NarrowLinear(nn.Linear):
    """nn.Linear that multiplies by the narrow copy of its weight under autocast of that type."""

    narrow: Tensor

    @torch.no_grad()
    def renew(self) -> None:
        self.narrow.copy_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if autocast_dtype(x.device) == self.narrow.dtype:
            return F.linear(x, self.narrow, self.bias)
        return super().forward(x)


def narrow_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every linear layer of a model a narrow copy of its weight."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = NarrowLinear
            assert isinstance(layer, NarrowLinear)
            layer.narrow = layer.weight.detach().to(dtype).requires_grad_()
            layer.narrow.register_post_accumulate_grad_hook(_pass_on_to(layer.weight))


def renew(model: nn.Module) -> None:
    """Make the narrow weights again. Must come before each use of weights that have changed, which torch does not tell:
    its fused optimizers leave no trace in a tensor's version."""
    for layer in model.modules():
        if isinstance(layer, NarrowLinear):
            layer.renew()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type of matrix products under autocast, if it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _pass_on_to(weight: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds what a narrow weight has gathered to the gradient of its fp32 weight."""

    def hook(narrow: Tensor) -> None:
        assert narrow.grad is not None
        if weight.grad is None:
            weight.grad = narrow.grad.to(weight.dtype, memory_format=torch.contiguous_format)
        elif add_narrow is not None and narrow.is_cuda and narrow.grad.is_contiguous():
            add_narrow(weight.grad, narrow.grad)
        else:
            weight.grad.add_(narrow.grad)
        narrow.grad = None

    return hook
