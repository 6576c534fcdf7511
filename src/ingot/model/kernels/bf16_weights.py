"""Weights in the type of the matrix products, kept beside the fp32 ones and renewed once per optimizer step.

Autocast makes them anew for every microbatch, turns every microbatch's gradient to fp32 and adds it up: 26 bytes of
traffic per weight, a tenth of the step of a 7b model whose microbatch is small. Here the product that makes a weight's
gradient adds it to the fp32 gradient by itself: 8 bytes, while the tensor cores are busy, and no rounding to bf16.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

TRITON = find_spec("triton") is not None  # torch for CPUs comes without


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
        return F.linear(x, narrow, bias.to(x.dtype) if bias is not None else None)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, narrow, total = ctx.saved_tensors
        rows = d_y.reshape(-1, d_y.shape[-1])  # [n, m]
        add_product(total, rows, x.reshape(-1, x.shape[-1]))
        d_bias = rows.sum(0).to(total.dtype) if ctx.needs_input_grad[2] else None
        return (rows @ narrow).view(x.shape), None, d_bias, None


class Narrow(nn.Module):
    """A layer with a narrow copy of its weight."""

    weight: Tensor
    narrow: Tensor
    total: Tensor  # the gradient of the weight, at the same place in every step

    @torch.no_grad()
    def renew(self) -> None:
        self.narrow.copy_(self.weight)
        if self.training and self.weight.grad is None:
            self.weight.grad = self.total.zero_()


class NarrowLinear(Narrow, nn.Linear):
    """nn.Linear that multiplies by the narrow copy of its weight under autocast of that type."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same with another bias, such as one without a gradient."""
        if autocast_dtype(x.device) != self.narrow.dtype:
            return F.linear(x, self.weight, bias)
        if not torch.is_grad_enabled():
            return F.linear(x, self.narrow, bias)
        with torch.autocast(x.device.type, enabled=False):
            return _Linear.apply(x.to(self.narrow.dtype), self.narrow, bias, self.total)


@library.custom_op("ingot::add_rows", mutates_args=("total",))
def add_rows(total: Tensor, rows: Tensor, d_y: Tensor) -> None:
    """total [m, k] += d_y [n, k] at its rows [n]."""
    total.index_add_(0, rows, d_y.to(total.dtype))


@add_rows.register_fake
def _(total: Tensor, rows: Tensor, d_y: Tensor) -> None:
    return None


class _Rows(torch.autograd.Function):
    """Rows [...] of a weight [m, k]; their gradients are added to `total`. The weight is an input for its sake alone
    that the result has a gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.rows, ctx.total = rows, total  # not saved: the head adds to the same total before
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[None, None, None]:
        add_rows(ctx.total, ctx.rows.flatten(), d_y.flatten(0, -2))
        return None, None, None


class NarrowEmbedding(Narrow, nn.Embedding):
    """nn.Embedding whose gradient goes where it is added up, not through a tensor as large as all rows. The narrow copy
    is for the head that is tied to it."""

    def forward(self, tokens: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or autocast_dtype(tokens.device) != self.narrow.dtype:
            return super().forward(tokens)
        return _Rows.apply(tokens, self.weight, self.total)


NARROW: dict[type, type] = {nn.Linear: NarrowLinear, nn.Embedding: NarrowEmbedding}


def narrow_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every linear layer and embedding of a model a narrow copy of its weight."""
    for layer in model.modules():
        if type(layer) in NARROW:
            layer.__class__ = NARROW[type(layer)]
            assert isinstance(layer, Narrow)
            layer.narrow, layer.total = layer.weight.detach().to(dtype), torch.zeros_like(layer.weight)
            layer.renew()


def renew(model: nn.Module) -> None:
    """Make the narrow weights again, and gradients for them to add to. Must come before each use of weights that have
    changed, which torch does not tell (its fused optimizers leave no trace in a tensor's version), and before the first
    backward pass after gradients have been dropped."""
    for layer in model.modules():
        if isinstance(layer, Narrow):
            layer.renew()


def fuses(layer: nn.Module, x: Tensor) -> bool:
    """Whether kernels of ours may stand around a layer that trains on x: they are for bf16 on a GPU, whatever the layer
    multiplies in. A layer whose weight is cut by tensor parallelism has the compiler's."""
    if not TRITON or not x.is_cuda or not torch.is_grad_enabled():
        return False
    if not x.dtype == autocast_dtype(x.device) == torch.bfloat16:
        return False
    if isinstance(layer, NarrowLinear):
        return True
    gathered = type(layer) is nn.Linear and type(layer.weight) is nn.Parameter  # by FSDP2
    return gathered and layer.weight.dtype == x.dtype


def leave_bias(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a layer that `fuses` makes of x, and its bias, whose gradient is left to whoever takes both."""
    assert isinstance(layer, nn.Linear)
    bias = layer.bias.detach() if layer.bias is not None else None
    if isinstance(layer, NarrowLinear):
        return layer.multiply(x, bias), layer.bias
    return F.linear(x, layer.weight, bias), layer.bias


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type of matrix products under autocast, if it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
