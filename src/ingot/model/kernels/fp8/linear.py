"""Linear layers whose matrix products run in 8-bit floats: twice the rate of bf16 on Hopper, half the bytes.

A linear layer is three matrix products, and each needs both sides in 8 bits, laid out along the sum:

    forward     y  = x  @ w^T      sums over the input features      x by rows,       w by rows
    backward    dx = dy @ w        sums over the output features     dy by rows,      w by columns
                dw = dy^T @ x      sums over the tokens              dy by columns,   x by columns

So x, w and dy are each quantized once and kept by rows and by columns; the backward pass keeps the 8-bit x. A tensor
has one scale, from its own largest value at each use (dynamic scaling): x and w in e4m3, which has more digits, dy in
e5m2, which has more range. Products accumulate in fp32 and come out in bf16; that of a weight's gradient is added to an
fp32 buffer (`accumulate.py`). Weights are quantized once per step. Libraries do this with tensor subclasses; a
function and its gradient are enough.

Where the hardware lacks 8-bit products, the same numbers are made by quantizing and multiplying in fp32, which is how
the CPU tests check them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from ingot.model.kernels.bf16_weights import CopiedWeight, GatheredWeight, WorkingLinear
from ingot.model.kernels.conditions import TRITON, autocast_dtype, why_no_triton
from ingot.model.kernels.fp8 import accumulate
from ingot.model.kernels.operator import operator

if TRITON:
    from ingot.model.kernels.fp8.quantize import quantize_both, quantize_into

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every dimension, for the tensor cores
LEAST = 1e-12  # the smallest value that counts as the largest of a tensor, so that zeros stay zeros


def why_no_fp8(device: torch.device) -> str | None:
    """Why a device cannot multiply 8-bit floats; None if it can."""
    if device.type != "cuda":
        return "a CPU has no 8-bit matrix products"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no 8-bit matrix products (Ada, Hopper and later have)"
    return None


def quantize(x: Tensor, dtype: torch.dtype, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, k] rounded to bf16 and then to 8 bits, by rows and (`columns`) by columns [k, n], and the scale that brings
    them back."""
    return _quantize(x.bfloat16(), dtype, columns)


@operator("ingot::quantize")
def _quantize(x: Tensor, dtype: torch.dtype, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    if why_no_triton(x.device) is None:
        return quantize_both(x.contiguous(), dtype, columns, LEAST)
    largest = x.abs().amax().float().clamp(min=LEAST)
    limit = torch.full_like(largest, torch.finfo(dtype).max)  # a tensor: a number would be divided by its reciprocal
    x8 = (x.float() * (limit / largest)).to(dtype)
    return x8, x8.t().contiguous() if columns else x8.new_empty(0, x.shape[0]), largest / limit


@library.register_fake("ingot::quantize")
def _(x: Tensor, dtype: torch.dtype, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = x.shape
    transposed = x.new_empty(width if columns else 0, rows, dtype=dtype)
    return x.new_empty(rows, width, dtype=dtype), transposed, x.new_empty((), dtype=torch.float32)


def multiply(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a [n, k] times b [k, m], both in 8 bits, plus bias [m]; b is stored by columns."""
    if a.is_cuda:
        bias = bias.to(out) if bias is not None else None
        return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=out, use_fast_accum=True)
    y = (a.float() @ b.float()) * (a_scale * b_scale)
    return (y if bias is None else y + bias.to(out)).to(out)


@operator("ingot::add_fp8_product", mutates_args=("total",))
def _add_fp8_product(total: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    """total [n, m] += a [n, k] times b [m, k] transposed, as in `multiply`."""
    if not (total.is_cuda and accumulate.add_product(total, a, a_scale, b, b_scale)):
        total.add_(multiply(a, a_scale, b.t(), b_scale, total.dtype))


@library.register_fake("ingot::add_fp8_product")
def _(total: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    return None


class _LinearFp8Function(torch.autograd.Function):
    """x [n, k] times a weight [m, k] transposed, given in 8 bits by rows and by columns, plus bias [m]. The gradient of
    the weight is added to `total` [m, k], or without one returned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor, scale: Tensor,
        total: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x8, x_columns, x_scale = quantize(x, FORWARD, True)
        ctx.save_for_backward(x_columns, x_scale, columns, scale, total)
        ctx.dtypes = x.dtype, weight.dtype, bias.dtype if bias is not None else None
        return multiply(x8, x_scale, rows.t(), scale, torch.bfloat16, bias)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, x_scale, columns, scale, total = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        d8, d_columns, d_scale = quantize(d_y, BACKWARD, True)
        d_x = multiply(d8, d_scale, columns.t(), scale, torch.bfloat16).to(x_dtype)
        d_bias = d_y.sum(0).to(bias_dtype) if ctx.needs_input_grad[2] else None
        d_w = None
        if total is not None:
            _add_fp8_product(total, d_columns, d_scale, x_columns, x_scale)
        else:
            d_w = multiply(d_columns, d_scale, x_columns.t(), x_scale, torch.float32).to(weight_dtype)
        return d_x, d_w, d_bias, None, None, None, None


class Fp8Linear(WorkingLinear):
    """A linear layer that multiplies in 8 bits under autocast; its weight stays fp32.

    With `gathered`, FSDP2 gathers the weight in bf16, and `quantize_weight` must be called between that and the pass.

    The 8-bit weight stays where it is in memory from step to step. Allocated again between what FSDP2 gathers and
    frees, it would leave holes: near the limit of the memory, the allocator would return and fetch pages in each step.
    """

    def __init__(self, layer: nn.Linear, gathered: bool = False):
        super().__init__(layer)
        self.working = GatheredWeight(self) if gathered else CopiedWeight(layer.weight, hold=False)
        self.quantized: tuple[Tensor, Tensor, Tensor] | None = None  # [m, k], [k, m], the scale
        self.refresh()

    def refresh(self) -> None:
        self.is_quantized = False
        self.working.refresh(self.training)
        if isinstance(self.working, CopiedWeight):
            self.quantize_weight()

    @torch.no_grad()
    def quantize_weight(self) -> bool:
        """Bring the 8-bit weight up to date unless it is. Return whether that was necessary."""
        if self.is_quantized:
            return False
        if self.quantized is None:
            self.quantized = quantize(self.weight, FORWARD, True)
        elif why_no_triton(self.weight.device) is None:
            quantize_into(self.weight.bfloat16().contiguous(), *self.quantized, LEAST)
        else:
            for kept, new in zip(self.quantized, quantize(self.weight, FORWARD, True), strict=True):
                kept.copy_(new)
        self.is_quantized = True
        return True

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if autocast_dtype(x.device) is None:
            return F.linear(x, self.weight, bias)
        assert self.quantized is not None
        rows, columns, scale = self.quantized
        flat = x.reshape(-1, x.shape[-1])  # [n, k]
        count = flat.shape[0]
        if count % MULTIPLE:
            flat = F.pad(flat, (0, 0, 0, -count % MULTIPLE))
        total = self.working.grad_buffer()
        with torch.autocast(x.device.type, enabled=False):
            if torch.is_grad_enabled():
                y = _LinearFp8Function.apply(flat, self.weight, bias, rows, columns, scale, total)
            else:
                x8, _, x_scale = quantize(flat, FORWARD, False)
                y = multiply(x8, x_scale, rows.t(), scale, torch.bfloat16, bias)
            return y[:count].view(*x.shape[:-1], -1)


def fits_fp8(layer: nn.Linear) -> bool:
    """Whether the tensor cores take the shape of a layer."""
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
