"""Weights in the type of the matrix products, kept beside the fp32 ones and renewed once per optimizer step.

Autocast makes them anew for every microbatch, turns every microbatch's gradient to fp32 and adds it up: 26 bytes of
traffic per weight, a tenth of the step of a 7b model whose microbatch is small. Here the product that makes a weight's
gradient adds it to the fp32 gradient by itself: 8 bytes, while the tensor cores are busy, and no rounding to bf16.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn


@library.custom_op("ingot::add_product", mutates_args=("total",))
def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [m, k] += a [n, m] transposed times b [n, k]."""
    if a.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a.t() @ b)


@add_product.register_fake
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    return None


class _Linear(torch.autograd.Function):
    """x [..., k] times a narrow weight [m, k] transposed; the weight's gradient is added to `total`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, narrow: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, narrow, total)
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return F.linear(x, narrow, bias.to(x.dtype) if bias is not None else None)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, narrow, total = ctx.saved_tensors
        rows = d_y.reshape(-1, d_y.shape[-1])  # [n, m]
        add_product(total, rows, x.reshape(-1, x.shape[-1]))
        d_bias = rows.sum(0).to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        return (rows @ narrow).view(x.shape), None, d_bias, None


class NarrowLinear(nn.Linear):
    """nn.Linear that multiplies by the narrow copy of its weight under autocast of that type."""

    narrow: Tensor
    total: Tensor  # the gradient of the weight, at the same place in every step

    @torch.no_grad()
    def renew(self) -> None:
        self.narrow.copy_(self.weight)
        if self.training and self.weight.grad is None:
            self.weight.grad = self.total.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if autocast_dtype(x.device) != self.narrow.dtype:
            return super().forward(x)
        if not torch.is_grad_enabled():
            return F.linear(x, self.narrow, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            return _Linear.apply(x.to(self.narrow.dtype), self.narrow, self.bias, self.total)


def narrow_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every linear layer of a model a narrow copy of its weight."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = NarrowLinear
            assert isinstance(layer, NarrowLinear)
            layer.narrow, layer.total = layer.weight.detach().to(dtype), torch.zeros_like(layer.weight)
            layer.renew()


def renew(model: nn.Module) -> None:
    """Make the narrow weights again, and gradients for them to add to. Must come before each use of weights that have
    changed, which torch does not tell (its fused optimizers leave no trace in a tensor's version), and before the first
    backward pass after gradients have been dropped."""
    for layer in model.modules():
        if isinstance(layer, NarrowLinear):
            layer.renew()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type of matrix products under autocast, if it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
