# mypy: disallow-untyped-defs=False
"""A residual addition and the layer norm after it, on a GPU, in Triton: each tensor is read once and written once.

Backward, one kernel adds the gradient that comes by the residual stream and sums down the rows for the three vectors
whose gradients are such sums: the norm's weight and bias, and the bias of the layer whose output was added. The
compiler makes three kernels of that, which read 8 tensors where this one reads 3.

Statistics and sums are in fp32. The sum is rounded to the type of the residual stream before it is normalised, as it is
without this kernel.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor, library, nn

# by padded width, measured on an H200: rows of a tile, warps; and of the backward pass programs per multiprocessor
FORWARD = {1024: (4, 4), 2048: (2, 4), 4096: (2, 8)}
BACKWARD = {1024: (2, 4, 4), 2048: (2, 8, 2), 4096: (2, 16, 1)}


@triton.jit
def _norm_kernel(x_in, y_in, weight, bias, total, out, stats, rows, width, eps, ADD: tl.constexpr, BIAS: tl.constexpr,
             ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    there = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_in + at, mask=there, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(y_in + at, mask=there, other=0.0).to(tl.float32)
        kept = x.to(total.dtype.element_ty)
        tl.store(total + at, kept, mask=there)
        x = kept.to(tl.float32)
    w = tl.load(weight + column, mask=column < width, other=0.0)[None, :]
    mean = tl.sum(x, 1) / width
    x = tl.where((column < width)[None, :], x - mean[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    x = x * spread[:, None] * w
    if BIAS:
        x += tl.load(bias + column, mask=column < width, other=0.0)[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=there)
    tl.store(stats + row, mean, mask=row < rows)
    tl.store(stats + rows + row, spread, mask=row < rows)


@triton.jit
def _norm_backward_kernel(d_out, d_total, total, stats, weight, d_x, sums, rows, width, tall, ROWS: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """A program goes down `tall` rows; its three sums go to sums [3, programs, width]."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0)[None, :]
    by_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    by_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    by_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    first = tl.program_id(0) * tall
    for start in range(0, tall, ROWS):
        row = first + start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        there = (row < rows)[:, None] & inside[None, :]
        g = tl.load(d_out + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(total + at, mask=there, other=0.0).to(tl.float32)
        past = tl.load(d_total + at, mask=there, other=0.0).to(tl.float32)
        mean = tl.load(stats + row, mask=row < rows, other=0.0)[:, None]
        spread = tl.load(stats + rows + row, mask=row < rows, other=0.0)[:, None]
        x = (x - mean) * spread
        by_weight += g * x
        by_bias += g
        g *= w  # zero beyond the width
        along = tl.sum(g * x, 1)[:, None] / width
        g = past + (g - tl.sum(g, 1)[:, None] / width - x * along) * spread
        by_sum += tl.where(there, g, 0.0)
        tl.store(d_x + at, g.to(d_x.dtype.element_ty), mask=there)
    at = sums + tl.program_id(0) * width + column
    step = tl.num_programs(0) * width
    tl.store(at, tl.sum(by_weight, 0), mask=inside)
    tl.store(at + step, tl.sum(by_bias, 0), mask=inside)
    tl.store(at + 2 * step, tl.sum(by_sum, 0), mask=inside)


@library.custom_op("ingot::add_norm", mutates_args=())
def _add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y (empty where there is no y), its norm, and the mean and 1 / deviation of each row; x, y [n, d]."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    tile, warps = FORWARD.get(max(1024, block), (1, 8))
    total = torch.empty_like(x) if y is not None else x.new_empty(0)
    out, stats = torch.empty_like(x), torch.empty(2, rows, device=x.device)
    _norm_kernel[(triton.cdiv(rows, tile),)](
        x, y, weight, bias, total, out, stats, rows, width, eps, y is not None, bias is not None, tile, block,
        num_warps=warps,
    )  # fmt: skip
    return total, out, stats


@_add_norm.register_fake
def _(x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty_like(x) if y is not None else x.new_empty(0)
    return total, torch.empty_like(x), x.new_empty(2, x.shape[0], dtype=torch.float32)


def _backward_plan(total: Tensor) -> tuple[int, int, int, int]:
    """Padded width, rows of a tile, warps, programs."""
    block = 1 << (total.shape[1] - 1).bit_length()
    tile, warps, programs = BACKWARD.get(max(1024, block), (1, 16, 1))
    device = total.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return block, tile, warps, programs * processors


@library.custom_op("ingot::add_norm_backward", mutates_args=())
def _add_norm_backward(
    d_out: Tensor, d_total: Tensor, total: Tensor, stats: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x and of y, and parts of the sums for the norm's weight and bias and for y's bias."""
    rows, width = total.shape
    block, tile, warps, programs = _backward_plan(total)
    tall = triton.cdiv(triton.cdiv(rows, programs), tile) * tile
    d_x, sums = torch.empty_like(total), torch.empty(3, programs, width, device=total.device)
    _norm_backward_kernel[(programs,)](
        d_out, d_total, total, stats, weight, d_x, sums, rows, width, tall, tile, block, num_warps=warps
    )
    return d_x, sums


@_add_norm_backward.register_fake
def _(d_out: Tensor, d_total: Tensor, total: Tensor, stats: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total), weight.new_empty(3, _backward_plan(total)[3], total.shape[1], dtype=torch.float32)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, y_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, -2)
        total, out, stats = _add_norm(flat, y.flatten(0, -2) if y is not None else None, weight, bias, eps)
        total = total if y is not None else flat
        ctx.save_for_backward(total, stats, weight)
        return total.view(x.shape), out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, d_out: Tensor) -> tuple[Tensor | None, ...]:
        total, stats, weight = ctx.saved_tensors
        flat = (d.contiguous().view(total.shape) for d in (d_out, d_total))
        d_x, sums = _add_norm_backward(*flat, total, stats, weight)
        d_x = d_x.view(d_out.shape)
        by_weight, by_bias, by_sum = sums.sum(1)
        _, y, y_bias, _, bias, _ = ctx.needs_input_grad
        return d_x, d_x if y else None, by_sum if y_bias else None, by_weight, by_bias if bias else None, None


def add_norm(
    norm: nn.Module, x: Tensor, y: Tensor | None = None, y_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + y, or x itself, and its layer norm, both in x's type. `y_bias` is a bias that was added to y by a layer that
    leaves its gradient to us."""
    assert isinstance(norm, nn.LayerNorm)
    return _AddNorm.apply(x, y, y_bias, norm.weight, norm.bias, norm.eps)
