# mypy: disallow-untyped-defs=False
"""Splits the fused projection into queries, keys and values: views forward, one Triton kernel backward.

Attention returns three gradients, and the projection needs them interleaved head by head, so one copy is unavoidable.
The kernel that makes it also sums the columns for the gradient of the projection's bias; the compiler would read the
whole copy again for that.

Shapes: n tokens, G key/value heads, P query heads per group, D head width.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor, library

from ingot.model.kernels.operator import operator

# measured on an H200
ELEMENTS, TALL, WARPS = 8192, 128, 8  # elements of a tile, rows per program, warps


@triton.jit
def _join_kernel(d_q, d_k, d_v, out, sums, rows, G, P: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
                 TALL: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """One slot (of P queries, key, value) of one group in TALL rows, and its sum over these rows."""
    group, slot = tl.program_id(0) // (P + 2), tl.program_id(0) % (P + 2)
    column = tl.arange(0, BLOCK)
    first = tl.program_id(1) * TALL
    if slot < P:
        source, step = d_q + (group * P + slot) * D, G * P * D
    elif slot == P:
        source, step = d_k + group * D, G * D
    else:
        source, step = d_v + group * D, G * D
    width = G * (P + 2) * D
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, TALL, ROWS):
        row = (first + start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        there = (row < rows) & (column < D)[None, :]
        d = tl.load(source + row * step + column[None, :], mask=there, other=0.0)
        total += d.to(tl.float32)
        tl.store(out + row * width + tl.program_id(0) * D + column[None, :], d, mask=there)
    tl.store(sums + tl.program_id(1) * width + tl.program_id(0) * D + column, tl.sum(total, 0), mask=column < D)


@operator("ingot::join_heads")
def _join_heads(d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor, Tensor]:
    """d_q [n, G P, D], d_k and d_v [n, G, D] joined to [n, G (P + 2) D], and partial sums of it over n."""
    rows, heads, D = d_q.shape
    G = d_k.shape[1]
    slots, block, parts = heads // G + 2, triton.next_power_of_2(D), triton.cdiv(rows, TALL)
    out = d_q.new_empty(rows, G * slots * D)
    sums = torch.empty(parts, G * slots * D, device=d_q.device)
    _join_kernel[(G * slots, parts)](
        d_q,
        d_k,
        d_v,
        out,
        sums,
        rows,
        G,
        slots - 2,
        D,
        block,
        TALL,
        min(TALL, max(1, ELEMENTS // block)),
        num_warps=WARPS,
    )
    return out, sums


@library.register_fake("ingot::join_heads")
def _(d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, D = d_q.shape
    width = (heads + 2 * d_k.shape[1]) * D
    return d_q.new_empty(rows, width), d_q.new_empty(-(-rows // TALL), width, dtype=torch.float32)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor | None, groups: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        batch, time, _ = qkv.shape
        heads = qkv.view(batch, time, groups, -1, width)  # [B, T, G, P + 2, D]
        ctx.shape = qkv.shape
        q = heads[:, :, :, :-2].flatten(2, 3) if heads.shape[3] > 3 else heads[:, :, :, 0]
        return q.transpose(1, 2), heads[:, :, :, -2].transpose(1, 2), heads[:, :, :, -1].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
        parts = (d.transpose(1, 2).flatten(0, 1).contiguous() for d in (d_q, d_k, d_v))  # [n, heads, D]
        joined, sums = _join_heads(*parts)
        return joined.view(ctx.shape), sums.sum(0) if ctx.needs_input_grad[1] else None, None, None


def split_heads(qkv: Tensor, bias: Tensor | None, groups: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the projection [B, T, G (P + 2) D] into q [B, H, T, D], k and v [B, G, T, D]. Its layer has already added
    `bias` and leaves the bias's gradient to this function."""
    return _SplitHeads.apply(qkv, bias, groups, width)
