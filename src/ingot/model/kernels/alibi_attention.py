# mypy: disallow-untyped-defs=False
"""Causal attention with ALiBi in Triton, skipping the keys too far away to matter.

ALiBi lowers each score by slope x distance, so a head with a steep slope cannot see far: beyond some distance a key's
weight is too small to change an fp32 sum. Cauchy-Schwarz bounds that distance by the largest key, the largest query and
each token's score with itself; `_reach` computes the bound per head and sequence from the input, and the attention
kernels stop there. Nothing is approximated: the skipped weights are under 2^-24 of the softmax sum. FlexAttention, the
obvious alternative, computes the whole causal triangle whatever the slope.

The bias costs no arithmetic per element: softmax ignores any term that all keys of a query share, so adding slope x key
position, one value per column, is enough. Queries, keys and values are read in place from the fused projection, and
their gradient is written in the same layout, so nothing is split or concatenated; the backward kernel also sums its
columns for the gradient of the projection's bias.

Documents and sliding windows are both a `span`, [2, B or 1, T] in int32: the first key that each query sees, and the
last query that sees each key, both nondecreasing along T. Blocks outside the span are not read, blocks fully inside
need no mask. With all slopes zero this is plain causal attention within documents and windows.

Shapes: B batch, T tokens, G key/value heads, P query heads per group, H = G P heads, D head width.
qkv is [B, T, G, P + 2, D], the output [B, T, H, D]. Scores are in units of log2, so that exp2 does.
"""

import math

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor, library

from ingot.model.activation_checkpointing import EXPENSIVE_OPS
from ingot.model.dropout import threshold
from ingot.model.kernels import alibi_attention_kernels as kernels

LOG2E = 1.4426950408889634
NEGLIGIBLE = 32.0  # bits below a row's largest weight; all skipped keys together add at most 2^8 times as much
# block of queries, block of keys, warps, stages, by padded head width; measured on an H200
FORWARD = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)}
PART = 64  # tokens whose gradients one program computes; below, per padded head width: block of others, warps, stages
BACKWARD_KV = {64: (32, 4, 4), 128: (64, 4, 2)}
BACKWARD_Q = {64: (64, 4, 3), 128: (64, 4, 2)}
REGISTERS = {64: 168}  # per thread of the backward kernels, so that three programs fit on a multiprocessor


@library.custom_op("ingot::alibi_attention", mutates_args=())
def alibi_attention(
    qkv: Tensor,
    slopes: Tensor,
    scale: float,
    span: Tensor | None = None,
    bias: Tensor | None = None,
    keys: Tensor | None = None,
    pdrop: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [B, T, H, D] of a fused projection [B, T, G, P + 2, D]; then, for the backward pass, the log of each
    row's sum and each head's reach. `bias` has been added by the projection, which leaves its gradient to us. With
    `keys` [B, H, T] the weights are dropped out (`dropout.attention_keys`)."""
    B, T, G, slots, D = qkv.shape
    P, H, DP = slots - 2, G * (slots - 2), max(16, triton.next_power_of_2(D))  # tl.dot takes 16 or more
    out = qkv.new_empty(B, T, H, D)
    lse = torch.empty(B, H, T, device=qkv.device)
    reach = torch.empty(B, H, device=qkv.device, dtype=torch.int32)
    slopes2 = slopes * LOG2E
    shape = (T, *qkv.stride()[:4], H, scale * LOG2E)
    kernels.reach[(B * H,)](qkv, slopes2, reach, *shape, NEGLIGIBLE, P, D, DP, 128, num_warps=8)
    M, N, warps, stages = FORWARD.get(DP, FORWARD[128])
    kernels.forward[(triton.cdiv(T, M), B * H)](
        qkv, out, lse, slopes2, reach, *_drops(keys, pdrop, reach), *_seen(span, reach)[:2], *shape, P, D, DP, M, N,
        span is not None, keys is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse, reach


@alibi_attention.register_fake
def _(
    qkv: Tensor,
    slopes: Tensor,
    scale: float,
    span: Tensor | None = None,
    bias: Tensor | None = None,
    keys: Tensor | None = None,
    pdrop: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, G, slots, D = qkv.shape
    H = G * (slots - 2)
    return qkv.new_empty(B, T, H, D), slopes.new_empty(B, H, T), slopes.new_empty(B, H, dtype=torch.int32)


@library.custom_op("ingot::alibi_attention_backward", mutates_args=())
def alibi_attention_backward(
    d_out: Tensor, saved: list[Tensor], scale: float, span: Tensor | None, keys: Tensor | None, pdrop: float
) -> tuple[Tensor, Tensor]:
    """The gradient of qkv, and partial sums of it over all tokens."""
    qkv, slopes, out, lse, reach = saved
    B, T, G, slots, D = qkv.shape
    P, H, DP = slots - 2, G * (slots - 2), max(16, triton.next_power_of_2(D))  # tl.dot takes 16 or more
    d_out = d_out.contiguous()
    d_qkv = torch.empty(qkv.shape, device=qkv.device, dtype=qkv.dtype)
    parts = triton.cdiv(T, PART)
    sums = torch.empty(parts * B, G * slots * D, device=qkv.device)
    delta = torch.empty_like(lse)
    rows = B * T * H
    kernels.delta[(triton.cdiv(rows, 64),)](out, d_out, delta, T, H, rows, D, DP, 64)
    slopes2 = slopes * LOG2E
    shape = (*_seen(span, reach), T, *qkv.stride()[:4], *d_qkv.stride()[:4], H, scale * LOG2E)
    given = (qkv, d_out, d_qkv, sums, lse, delta, slopes2, reach, *_drops(keys, pdrop, reach), *shape, P, D, DP)
    masks, most = (span is not None, keys is not None), REGISTERS.get(DP)
    block, warps, stages = BACKWARD_KV.get(DP, BACKWARD_KV[128])
    kernels.backward_kv[(parts, B * G)](*given, block, PART, *masks, num_warps=warps, num_stages=stages, maxnreg=most)
    block, warps, stages = BACKWARD_Q.get(DP, BACKWARD_Q[128])
    kernels.backward_q[(parts, B * H)](*given, PART, block, *masks, num_warps=warps, num_stages=stages, maxnreg=most)
    return d_qkv, sums


@alibi_attention_backward.register_fake
def _(
    d_out: Tensor, saved: list[Tensor], scale: float, span: Tensor | None, keys: Tensor | None, pdrop: float
) -> tuple[Tensor, Tensor]:
    qkv, slopes, *_ = saved
    B, T, *rest = qkv.shape
    return qkv.new_empty(qkv.shape), slopes.new_empty(B * -(-T // PART), math.prod(rest))


def _seen(span: Tensor | None, other: Tensor) -> tuple[Tensor, int, int]:
    """The span as kernel arguments: its tensor, the stride from sequence to sequence, and that to its second half."""
    if span is None:
        return other, 0, 0  # never read
    return span, span.stride(1) if span.shape[1] > 1 else 0, span.stride(0)


def _drops(keys: Tensor | None, pdrop: float, other: Tensor) -> tuple[Tensor, int, float]:
    """Dropout as kernel arguments: the rows' keys, the smallest hash that is kept, and the scale of what is kept."""
    return (keys.contiguous(), threshold(pdrop), 1 / (1 - pdrop)) if keys is not None else (other, 0, 1.0)


def _save(ctx, inputs, output) -> None:
    qkv, slopes, ctx.scale, span, bias, keys, ctx.pdrop = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(span, keys, qkv, slopes, *output)


def _gradient(ctx, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    span, keys, *saved = ctx.saved_tensors
    d_qkv, sums = alibi_attention_backward(d_out, saved, ctx.scale, span, keys, ctx.pdrop)
    return d_qkv, None, None, None, sums.sum(0) if ctx.biased else None, None, None


alibi_attention.register_autograd(_gradient, setup_context=_save)
EXPENSIVE_OPS.add(torch.ops.ingot.alibi_attention.default)
