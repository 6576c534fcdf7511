# mypy: disallow-untyped-defs=False
"""Residual addition and the norm after it in one Triton kernel: each tensor is read once and written once.

The backward kernel adds the gradient of the residual stream and sums over the rows for the three vectors whose
gradients are such sums: the norm's weight and bias, and the bias of the layer whose output was added. The compiler
generates three kernels for this, which read 8 tensors where this one reads 3.

Statistics and sums are in fp32. x + y is rounded to the dtype of the residual stream before it is normalized, exactly
as in the reference.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor, library, nn

from ingot.model.kernels.operator import operator

STAGES = 3  # rows that a backward program prefetches: enough to reach memory bandwidth


@triton.jit
def _sum(x_in, y_in, total, at, inside, ADD: tl.constexpr):
    """A block of columns of x + y, rounded to the dtype it is stored in."""
    x = tl.load(x_in + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(y_in + at, mask=inside, other=0.0).to(tl.float32)
        kept = x.to(total.dtype.element_ty)
        tl.store(total + at, kept, mask=inside)
        x = kept.to(tl.float32)
    return x


@triton.jit
def _scale(x, weight, bias, column, inside, BIAS: tl.constexpr):
    x *= tl.load(weight + column, mask=inside, other=0.0)
    if BIAS:
        x += tl.load(bias + column, mask=inside, other=0.0)
    return x


@triton.jit
def _norm_kernel(x_in, y_in, weight, bias, total, out, stats, width, eps, ADD: tl.constexpr, BIAS: tl.constexpr,
                 CENTER: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """One row: its first MAIN columns, then REST more (block sizes must be powers of two, the width need not be)."""
    row = tl.program_id(0).to(tl.int64)
    main = tl.arange(0, MAIN)
    at = row * width + main
    x = _sum(x_in, y_in, total, at, True, ADD)
    if REST:
        rest = MAIN + tl.arange(0, REST)
        at_rest, inside = row * width + rest, rest < width
        x_rest = _sum(x_in, y_in, total, at_rest, inside, ADD)
    if CENTER:
        mean = tl.sum(x, 0)
        if REST:
            mean += tl.sum(x_rest, 0)
        mean /= width
        x -= mean
        if REST:
            x_rest = tl.where(inside, x_rest - mean, 0.0)
        tl.store(stats + row * 2, mean)
    square = tl.sum(x * x, 0)
    if REST:
        square += tl.sum(x_rest * x_rest, 0)
    spread = tl.rsqrt(square / width + eps)
    x = _scale(x * spread, weight, bias, main, True, BIAS)
    tl.store(out + at, x.to(out.dtype.element_ty))
    if REST:
        x_rest = _scale(x_rest * spread, weight, bias, rest, inside, BIAS)
        tl.store(out + at_rest, x_rest.to(out.dtype.element_ty), mask=inside)
    tl.store(stats + row * 2 + 1, spread)


@triton.jit
def _slopes(d_out, d_total, total, at, inside, mean, spread):
    """A block of columns: gradient of the norm, normalized sum, and gradient of the sum."""
    g = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    past = tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
    return g, (x - mean) * spread, past


@triton.jit
def _norm_backward_kernel(d_out, d_total, total, stats, weight, d_x, sums, rows, width, tall, CENTER: tl.constexpr,
                          MAIN: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Each program handles `tall` rows and writes its three partial sums to sums [3, programs, width]."""
    main = tl.arange(0, MAIN)
    w = tl.load(weight + main)
    by_weight = tl.zeros([MAIN], tl.float32)
    by_bias = tl.zeros([MAIN], tl.float32)
    by_sum = tl.zeros([MAIN], tl.float32)
    if REST:
        rest = MAIN + tl.arange(0, REST)
        inside = rest < width
        w_rest = tl.load(weight + rest, mask=inside, other=0.0)
        by_weight_rest = tl.zeros([REST], tl.float32)
        by_bias_rest = tl.zeros([REST], tl.float32)
        by_sum_rest = tl.zeros([REST], tl.float32)
    first = tl.program_id(0) * tall
    for down in tl.range(0, min(tall, rows - first), num_stages=STAGES):
        row = first.to(tl.int64) + down
        at = row * width
        mean, spread = tl.load(stats + row * 2) if CENTER else 0.0, tl.load(stats + row * 2 + 1)
        g, x, past = _slopes(d_out, d_total, total, at + main, True, mean, spread)
        by_weight += g * x
        by_bias += g
        g *= w
        along, level = tl.sum(g * x, 0), tl.sum(g, 0) if CENTER else 0.0
        if REST:
            g_rest, x_rest, past_rest = _slopes(d_out, d_total, total, at + rest, inside, mean, spread)
            by_weight_rest += g_rest * x_rest
            by_bias_rest += g_rest
            g_rest *= w_rest
            along += tl.sum(g_rest * x_rest, 0)
            level += tl.sum(g_rest, 0) if CENTER else 0.0
        along, level = along / width, level / width
        g = past + (g - level - x * along) * spread
        by_sum += g
        tl.store(d_x + at + main, g.to(d_x.dtype.element_ty))
        if REST:
            g_rest = past_rest + (g_rest - level - x_rest * along) * spread
            by_sum_rest += g_rest
            tl.store(d_x + at + rest, g_rest.to(d_x.dtype.element_ty), mask=inside)
    at = sums + tl.program_id(0) * width
    step = tl.num_programs(0) * width
    tl.store(at + main, by_weight)
    tl.store(at + step + main, by_bias)
    tl.store(at + 2 * step + main, by_sum)
    if REST:
        tl.store(at + rest, by_weight_rest, mask=inside)
        tl.store(at + step + rest, by_bias_rest, mask=inside)
        tl.store(at + 2 * step + rest, by_sum_rest, mask=inside)


def _plan(width: int) -> tuple[int, int, int]:
    """MAIN, REST and warps per row: within 3% of the fastest on an H200 for widths from 768 to 4096."""
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    return main, 1 << (rest - 1).bit_length() if rest else 0, min(32, max(1, main // 512))


@operator("ingot::add_norm")
def _add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y (empty without y), its norm, and each row's mean (if subtracted) and reciprocal deviation; x, y [n, d]."""
    rows, width = x.shape
    main, rest, warps = _plan(width)
    total = torch.empty_like(x) if y is not None else x.new_empty(0)
    out, stats = torch.empty_like(x), torch.empty(rows, 2, device=x.device)
    _norm_kernel[(rows,)](
        x, y, weight, bias, total, out, stats, width, eps, y is not None, bias is not None, center, main, rest,
        num_warps=warps,
    )  # fmt: skip
    return total, out, stats


@library.register_fake("ingot::add_norm")
def _(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty_like(x) if y is not None else x.new_empty(0)
    return total, torch.empty_like(x), x.new_empty(x.shape[0], 2, dtype=torch.float32)


def _programs(total: Tensor) -> int:
    """The number of backward programs: about as many as the device runs at once."""
    device, warps = total.device, _plan(total.shape[1])[2]
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(8, 16 // warps)) * processors


@operator("ingot::add_norm_backward")
def _add_norm_backward(
    d_out: Tensor, d_total: Tensor, total: Tensor, stats: Tensor, weight: Tensor, center: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x and y, and partial sums for the norm's weight and bias and for y's bias."""
    rows, width = total.shape
    main, rest, warps = _plan(width)
    programs = _programs(total)
    d_x, sums = torch.empty_like(total), torch.empty(3, programs, width, device=total.device)
    _norm_backward_kernel[(programs,)](
        d_out, d_total, total, stats, weight, d_x, sums, rows, width, triton.cdiv(rows, programs), center, main, rest,
        STAGES if width <= 8192 else 1, num_warps=warps,
    )  # fmt: skip  # wider rows would not fit in a multiprocessor's shared memory when prefetched
    return d_x, sums


@library.register_fake("ingot::add_norm_backward")
def _(
    d_out: Tensor, d_total: Tensor, total: Tensor, stats: Tensor, weight: Tensor, center: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total), weight.new_empty(3, _programs(total), total.shape[1], dtype=torch.float32)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        y_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        center: bool,
    ) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, -2)
        total, out, stats = _add_norm(flat, y.flatten(0, -2) if y is not None else None, weight, bias, eps, center)
        total = total if y is not None else flat
        ctx.save_for_backward(total, stats, weight)
        ctx.center = center
        return total.view(x.shape), out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, d_out: Tensor) -> tuple[Tensor | None, ...]:
        total, stats, weight = ctx.saved_tensors
        flat = (d.contiguous().view(total.shape) for d in (d_out, d_total))
        d_x, sums = _add_norm_backward(*flat, total, stats, weight, ctx.center)
        d_x = d_x.view(d_out.shape)
        by_weight, by_bias, by_sum = sums.sum(1)
        _, y, y_bias, _, bias, _, _ = ctx.needs_input_grad
        return d_x, d_x if y else None, by_sum if y_bias else None, by_weight, by_bias if bias else None, None, None


def add_norm(
    norm: nn.Module, x: Tensor, y: Tensor | None = None, y_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + y, or x itself, and its norm, both in x's dtype. `y_bias` is a bias already added to y by a layer that leaves
    its gradient to this function."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.eps is not None
    center = isinstance(norm, nn.LayerNorm)
    return _AddNorm.apply(x, y, y_bias, norm.weight, norm.bias if center else None, norm.eps, center)
