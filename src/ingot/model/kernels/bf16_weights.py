"""bf16 forms of the fp32 weights, made once per optimizer step: copies on one process, gathered by FSDP2 on several.

Autocast casts every weight again for each microbatch, then converts and accumulates its gradient: 26 bytes of memory
traffic per weight, about 10% of a 7B step with small microbatches. Here the backward matmul accumulates directly into
the fp32 gradient buffer (8 bytes, while the tensor cores are busy), which also avoids rounding gradients to bf16.

    forward     y = x @ copy^T                     bf16, as under autocast
    backward    dx = dy @ copy                     bf16
                buffer += dy^T @ x                 fp32, one matmul; `buffer` is the parameter's .grad,
                                       or with FSDP2 what it reduces after the last microbatch

Layers here share the parameters of the plain layer that they replace, so names and checkpoints do not change.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from ingot.model.activation_checkpointing import EXPENSIVE_OPS
from ingot.model.kernels.conditions import autocast_dtype
from ingot.model.kernels.operator import operator


class WorkingWeight(Protocol):
    """The form of a parameter that a layer multiplies with during one step, and where its gradient is added up."""

    def value(self) -> Tensor:
        """The weight in the type of the matrix products, valid for this step; or in fp32, to be cast for each."""
        ...

    def grad_buffer(self) -> Tensor | None:
        """An fp32 tensor of the weight's shape. The backward pass adds the gradient to it, and autograd gets none; None
        if autograd should get it."""
        ...

    def refresh(self, training: bool) -> None:
        """Follow the parameter after it, or its gradient, has changed."""
        ...


class CopiedWeight:
    """A parameter that this process holds whole, with its own bf16 copy, unless memory lacks room for it."""

    def __init__(self, weight: Tensor, hold: bool = True):
        self.weight = weight
        self.hold(hold)
        self.gradient = torch.zeros_like(weight)  # at the same address in every step, as CUDA graphs need
        self.refresh(training=True)

    def value(self) -> Tensor:
        return self.weight.detach() if self.copy is None else self.copy

    def grad_buffer(self) -> Tensor:
        return self.gradient

    def hold(self, hold: bool) -> None:
        """Keep the copy, or cast the weight for each matrix product: 12 bytes of traffic per weight and microbatch."""
        self.copy: Tensor | None = self.weight.detach().bfloat16() if hold else None

    @torch.no_grad()
    def refresh(self, training: bool) -> None:
        if self.copy is not None:
            self.copy.copy_(self.weight)
        if training and self.weight.grad is None:  # dropped since the last step
            self.weight.grad = self.gradient.zero_()


class GatheredWeight:
    """A parameter of which FSDP2 gathers the bf16 form into the layer for each pass.

    With `accumulator`, FSDP2's own record of the parameter, gradients of a step are added up in what it reduces after
    the last microbatch. That is a private attribute of torch, which a test guards.
    """

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self.accumulator: Any = None

    def value(self) -> Tensor:
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    def grad_buffer(self) -> Tensor | None:
        return None if self.accumulator is None else self.accumulator.unsharded_accumulated_grad

    def refresh(self, training: bool) -> None: ...


@operator("ingot::add_product", mutates_args=("total",))
def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [m, k] += a [n, m] transposed times b [n, k]."""
    if a.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a.t() @ b)


@library.register_fake("ingot::add_product")
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    return None


@operator("ingot::add_rows", mutates_args=("total",))
def add_rows(total: Tensor, rows: Tensor, d_y: Tensor) -> None:
    """total [m, k] += d_y [n, k] at its rows [n]."""
    total.index_add_(0, rows, d_y.to(total.dtype))


@library.register_fake("ingot::add_rows")
def _(total: Tensor, rows: Tensor, d_y: Tensor) -> None:
    return None


@operator("ingot::cast_linear")
def _cast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., k] times an fp32 weight [m, k] transposed. One operator, so that the compiler keeps no cast for later."""
    return F.linear(x, weight.to(x.dtype), bias)


@library.register_fake("ingot::cast_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@operator("ingot::cast_product")
def _cast_product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [n, m] times an fp32 weight [m, k]."""
    return rows @ weight.to(rows.dtype)


@library.register_fake("ingot::cast_product")
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


EXPENSIVE_OPS.add(torch.ops.ingot.cast_linear.default)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = bias.to(x.dtype) if bias is not None else None
    return F.linear(x, weight, bias) if weight.dtype == x.dtype else _cast_linear(x, weight, bias)


class _LinearFunction(torch.autograd.Function):
    """x [..., k] times a working weight [m, k] transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, total)
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight, total = ctx.saved_tensors
        rows = d_y.reshape(-1, d_y.shape[-1])  # [n, m]
        add_product(total, rows, x.reshape(-1, x.shape[-1]))
        d_bias = rows.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        d_x = rows @ weight if weight.dtype == rows.dtype else _cast_product(rows, weight)
        return d_x.view(x.shape), None, d_bias, None


class _EmbeddingFunction(torch.autograd.Function):
    """Rows [...] of a weight [m, k]. The weight is an argument only so that the result requires a gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.rows, ctx.total = rows, total  # not saved: the tied head has added to the total by the time of backward
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[None, None, None]:
        add_rows(ctx.total, ctx.rows.flatten(), d_y.flatten(0, -2))
        return None, None, None


class WorkingLinear(nn.Linear):
    """A linear layer that shares the parameters of a plain one and multiplies in another type under autocast."""

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.training = layer.in_features, layer.out_features, layer.training
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The result with another bias than the layer's own, such as one that gets no gradient."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Follow the parameter after it, or its gradient, has changed."""
        raise NotImplementedError


class Bf16Linear(WorkingLinear):
    """A linear layer that multiplies with the bf16 working form of its weight."""

    def __init__(self, layer: nn.Linear, working: WorkingWeight | None):
        super().__init__(layer)
        self.working = working or GatheredWeight(self)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        buffer = self.working.grad_buffer()
        if autocast_dtype(x.device) != torch.bfloat16 or buffer is None:
            return F.linear(x, self.weight, bias)
        x, weight = x.bfloat16(), self.working.value()
        with torch.autocast(x.device.type, enabled=False):
            if not torch.is_grad_enabled():
                return _linear(x, weight, bias)
            return _LinearFunction.apply(x, weight, bias, buffer)

    def refresh(self) -> None:
        self.working.refresh(self.training)


class Bf16Embedding(nn.Embedding):
    """An embedding whose gradient is added to the buffer of its rows, not to a tensor as large as the whole weight.

    On one process tokens read the fp32 weight, and the bf16 form is for the tied output head.
    """

    def __init__(self, layer: nn.Embedding, working: WorkingWeight | None):
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.training = *layer.weight.shape, layer.training
        self.padding_idx = None
        self.weight = layer.weight
        self.working = working or GatheredWeight(self)

    def forward(self, tokens: Tensor) -> Tensor:
        buffer = self.working.grad_buffer()
        if not torch.is_grad_enabled() or autocast_dtype(tokens.device) != torch.bfloat16 or buffer is None:
            return F.embedding(tokens, self.weight)
        return _EmbeddingFunction.apply(tokens, self.weight, buffer)

    def refresh(self) -> None:
        self.working.refresh(self.training)


def linear_without_bias_grad(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a layer makes of x, and its bias, whose gradient is left to the kernel that takes both."""
    bias = layer.bias.detach() if layer.bias is not None else None
    if isinstance(layer, WorkingLinear):
        return layer.multiply(x, bias), layer.bias
    return F.linear(x, layer.weight, bias), layer.bias
