# mypy: disallow-untyped-defs=False
"""The exact GELU in Triton at memory bandwidth, including the gradient of the bias before it.

The compiler generates two backward kernels: one for the gradient of the GELU, and one that reads this gradient again to
sum it for the bias. Here one kernel does both: each program walks down a tile of columns and keeps its sums in
registers. Phi(x) is Abramowitz and Stegun's formula 7.1.26, with an error of at most 7.5e-8 (below bf16 precision); it
needs one exponential and one reciprocal (computed by rsqrt: one instruction, where a division takes eight).
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor, library

from ingot.model.kernels.operator import operator

# measured on an H200
BLOCK, WARPS = 1024, 4  # forward
ROWS, COLUMNS, TALL, BACKWARD_WARPS = 2, 512, 64, 4  # backward: tile, rows per program, warps


@triton.jit
def _tail(x):
    """Phi(-|x|), and exp(-x^2 / 2)."""
    bell = tl.exp2(x * x * -0.7213475204444817)
    t = 1.0 + 0.23164188826636044 * tl.abs(x)
    t = tl.rsqrt(t * t)
    tail = 0.5307027145 * t - 0.7265760135
    tail = tail * t + 0.7107068705
    tail = tail * t - 0.142248368
    tail = tail * t + 0.127414796
    return tail * t * bell, bell


@triton.jit
def _gelu_kernel(x_in, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_in + at, mask=at < count, other=0.0).to(tl.float32)
    y = tl.maximum(x, 0.0) - tl.abs(x) * _tail(x)[0]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _gelu_backward_kernel(
    slope, x_in, out, sums, rows, width, TALL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Gradients of TALL rows of a block of columns, and their sum over the rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * TALL
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, TALL, ROWS):
        row = first + start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        there = (row < rows)[:, None] & (column < width)[None, :]
        x = tl.load(x_in + at, mask=there, other=0.0).to(tl.float32)
        d = tl.load(slope + at, mask=there, other=0.0).to(tl.float32)
        tail, bell = _tail(x)
        d *= tl.where(x > 0, 1.0 - tail, tail) + x * bell * 0.3989422804014327
        total += d
        tl.store(out + at, d.to(out.dtype.element_ty), mask=there)
    tl.store(sums + tl.program_id(1) * width + column, tl.sum(total, 0), mask=column < width)


@operator("ingot::gelu")
def _gelu(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _gelu_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK, num_warps=WARPS)
    return out


@library.register_fake("ingot::gelu")
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@operator("ingot::gelu_backward")
def _gelu_backward(slope: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x [n, m], and partial sums of it over n."""
    rows, width = x.shape
    out, parts = torch.empty_like(x), triton.cdiv(rows, TALL)
    sums = torch.empty(parts, width, device=x.device)
    _gelu_backward_kernel[(triton.cdiv(width, COLUMNS), parts)](
        slope, x, out, sums, rows, width, TALL, ROWS, COLUMNS, num_warps=BACKWARD_WARPS
    )
    return out, sums


@library.register_fake("ingot::gelu_backward")
def _(slope: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(-(-x.shape[0] // TALL), x.shape[1], dtype=torch.float32)


class _BiasedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor | None]:
        (x,) = ctx.saved_tensors
        d_x, sums = _gelu_backward(slope.flatten(0, -2).contiguous(), x.flatten(0, -2))
        return d_x.view(x.shape), sums.sum(0) if ctx.needs_input_grad[1] else None


def biased_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """The GELU of x [..., m], to which a layer has already added `bias`, leaving its gradient to this function."""
    return _BiasedGelu.apply(x.contiguous(), bias)
