# mypy: disallow-untyped-defs=False
"""Causal attention with ALiBi on a GPU, in Triton: the kernel that only reads what can matter.

ALiBi lowers a score by slope x distance, so a steep head cannot see far: beyond some distance a key's weight is less
than fp32 can add to the sum. By Cauchy-Schwarz that distance follows from the largest key, the largest query and the
score of each token with itself, all of this very input; `_reach` finds it for each head of each sequence, and the other
kernels stop there. Nothing is approximated: what is left out is under 2^-24 of the softmax's sum. FlexAttention, the
obvious alternative, computes the whole triangle whatever the slope.

The bias needs no arithmetic per element either: softmax does not see what all keys of a query share, so slope x key
position is added, one value per column. Queries, keys and values are read from the fused projection where they lie, and
their gradient is written in the same layout, so nothing is cut apart or put together; on the way its columns are added
up for the gradient of the projection's bias.

Documents and sliding windows are both a `span`, [2, B or 1, T] in int32: the first key that each query sees, and the
last query that sees each key, neither ever falling along T. Blocks outside of it are not read, blocks inside pay no
mask. Without slopes (all zero) this is plain causal attention within documents and windows.

Shapes: B batch, T tokens, G key/value heads, P query heads per group, H = G P heads, D head width.
qkv is [B, T, G, P + 2, D], the output [B, T, H, D]. Scores are in units of log2, so that exp2 does.
"""

import math

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor, library

from ingot.model.activation_checkpointing import EXPENSIVE_OPS

LOG2E = 1.4426950408889634
NEGLIGIBLE = 32.0  # bits under a row's largest weight; all keys beyond together are 256 times that at most
# block of queries, block of keys, warps, stages, by padded head width; measured on an H200
FORWARD = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)}
PART = 64  # tokens whose gradients one program makes, going over blocks of others: their size, warps, stages
BACKWARD_KV = {64: (32, 4, 4), 128: (64, 4, 2)}
BACKWARD_Q = {64: (64, 4, 3), 128: (64, 4, 2)}
REGISTERS = {64: 168}  # of a thread of those, so that three programs share a multiprocessor


@triton.jit
def _reach(qkv, slopes, reach, T, sb, st, sg, ss, H, scale, bits, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
           ROWS: tl.constexpr):  # fmt: skip
    """How many tokens back a head of a sequence must look: one program each."""
    bh = tl.program_id(0)
    b, h = (bh // H).to(tl.int64), bh % H
    base = qkv + b * sb + (h // P) * sg
    column = tl.arange(0, DP)
    largest = 0.0
    for start in range(0, T, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < T)[:, None] & (column < D)[None, :]
        k = tl.load(base + P * ss + row[:, None] * st + column[None, :], mask=there, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.sum(k * k, 1), 0))
    largest = tl.sqrt(largest)
    excess = 0.0  # how far a score may lie above that of the token with itself
    for start in range(0, T, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < T)[:, None] & (column < D)[None, :]
        at = row[:, None] * st + column[None, :]
        k = tl.load(base + P * ss + at, mask=there, other=0.0).to(tl.float32)
        q = tl.load(base + (h % P) * ss + at, mask=there, other=0.0).to(tl.float32)
        above = tl.sqrt(tl.sum(q * q, 1)) * largest - tl.sum(q * k, 1)
        excess = tl.maximum(excess, tl.max(above, 0))
    distance = (excess * scale + bits) / tl.load(slopes + h)
    known = distance < T  # false for NaN too
    tl.store(reach + bh, tl.where(known, distance, T * 1.0).to(tl.int32) + 1)


@triton.jit
def _tile(base, row, column, st, T, D: tl.constexpr, DP: tl.constexpr, EDGE: tl.constexpr):
    """Rows of a [T, D] matrix, zero where there is nothing; without EDGE all rows are there."""
    at = base + row[:, None] * st + column[None, :]
    if D != DP:
        return tl.load(at, mask=(row < T)[:, None] & (column < D)[None, :], other=0.0)
    if EDGE:
        return tl.load(at, mask=(row < T)[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def _sees(row, key, since, SPAN: tl.constexpr):
    """Whether queries see keys; `since` is the first key that each query sees."""
    if SPAN:
        return (row >= key) & (key >= since)
    return row >= key


@triton.jit
def _over_keys(highest, total, result, q, k_base, v_base, row, since, column, low, end, first, T, st, slope, scale,
               D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, EDGE: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """The softmax goes on over the keys low to end; EDGE where some are not seen."""
    for start in range(low, end, N):
        key = start + tl.arange(0, N)
        k = _tile(k_base, key, column, st, T, D, DP, EDGE)
        s = tl.dot(q, tl.trans(k)) * scale + (slope * (key - first))[None, :]  # [M, N]
        if EDGE:
            s = tl.where(_sees(row[:, None], key[None, :], since[:, None], SPAN), s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(p, 1)
        v = _tile(v_base, key, column, st, T, D, DP, EDGE)
        result = tl.dot(p.to(v.dtype), v, result * fade[:, None])
        highest = higher
    return highest, total, result


@triton.jit
def _query_program(qkv, sb, sg, ss, H, P: tl.constexpr):
    """What a program works on that has one block of queries of one head, the longest rows first: the block, the head
    over the batch, sequence and head, and where its group, its keys and its values begin."""
    block, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    base = qkv + b * sb + (h // P) * sg
    return block, bh, b, h, base, base + P * ss, base + (P + 1) * ss


@triton.jit
def _keys_of(span, b, span_b, first, reach, T, M: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr):
    """Of a block of queries: the first key to look at, where all of its queries see every key, where the diagonal
    begins, the end; and the first key of each query."""
    low, middle = tl.maximum(0, first - reach) // N * N, first // N * N
    row, edge = first + tl.arange(0, M), low
    since = row
    if SPAN:
        since = tl.load(span + b * span_b + row, mask=row < T, other=0)
        low = tl.maximum(low, tl.load(span + b * span_b + first) // N * N)
        last = tl.load(span + b * span_b + tl.minimum(first + M, T) - 1)
        edge = tl.minimum(middle, tl.maximum(low, (last + N - 1) // N * N))
    return low, edge, middle, tl.minimum(first + M, T), since


@triton.jit
def _forward(qkv, out, lse, slopes, reach, span, span_b, T, sb, st, sg, ss, H, scale, P: tl.constexpr, D: tl.constexpr,
             DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    block, bh, b, h, base, k, v = _query_program(qkv, sb, sg, ss, H, P)
    first = block * M
    row, column = first + tl.arange(0, M), tl.arange(0, DP)
    q = _tile(base + (h % P) * ss, row, column, st, T, D, DP, True)
    slope = tl.load(slopes + h)
    highest = tl.full([M], -1e30, tl.float32)  # not infinite: a query may see nothing of its first block
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, DP], tl.float32)
    low, edge, middle, end, since = _keys_of(span, b, span_b, first, tl.load(reach + bh), T, M, N, SPAN)
    if SPAN:
        highest, total, result = _over_keys(highest, total, result, q, k, v, row, since, column, low, edge, first, T,
                                            st, slope, scale, D, DP, N, True, SPAN)  # fmt: skip
    highest, total, result = _over_keys(highest, total, result, q, k, v, row, since, column, edge, middle, first, T,
                                        st, slope, scale, D, DP, N, False, SPAN)  # fmt: skip
    highest, total, result = _over_keys(highest, total, result, q, k, v, row, since, column, middle, end, first, T,
                                        st, slope, scale, D, DP, N, True, SPAN)  # fmt: skip
    result = result / total[:, None]
    at = out + ((b * T + row[:, None]) * H + h) * D + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(row < T)[:, None] & (column < D)[None, :])
    # as if the bias had been slope x (key - query)
    tl.store(lse + bh * T + row, highest + tl.log2(total) - slope * (row - first), mask=row < T)


@triton.jit
def _delta(out, d_out, delta, T, H, rows, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr):
    """sum(out x d_out) of each query: [B, T, H] in, [B, H, T] out."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    at, there = row[:, None] * D + column[None, :], (row < rows)[:, None] & (column < D)[None, :]
    o = tl.load(out + at, mask=there, other=0.0).to(tl.float32)
    d = tl.load(d_out + at, mask=there, other=0.0).to(tl.float32)
    bt, h = row // H, row % H
    tl.store(delta + ((bt // T) * H + h) * T + bt % T, tl.sum(o * d, 1), mask=row < rows)


@triton.jit
def _over_queries(d_k, d_v, k, v, q_base, o_base, lse, delta, span, key, column, low, end, T, st, so, slope, scale,
                  D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, EDGE: tl.constexpr,
                  SPAN: tl.constexpr):  # fmt: skip
    """The gradients of keys and values grow by the queries low to end; EDGE where some do not see all keys."""
    for start in range(low, end, M):
        row = start + tl.arange(0, M)
        q = _tile(q_base, row, column, st, T, D, DP, True)
        level = tl.load(lse + row, mask=row < T, other=float("inf")) + slope * (row - start)
        s = tl.dot(k, tl.trans(q)) * scale + (slope * (key - start))[:, None]  # [N, M]
        p = tl.exp2(s - level[None, :])
        if EDGE:
            since = row
            if SPAN:
                since = tl.load(span + row, mask=row < T, other=0)
            p = tl.where(_sees(row[None, :], key[:, None], since[None, :], SPAN), p, 0.0)
        d_o = _tile(o_base, row, column, so, T, D, DP, True)
        d_v = tl.dot(p.to(d_o.dtype), d_o, d_v)
        d_p = tl.dot(v, tl.trans(d_o))
        d_s = p * (d_p - tl.load(delta + row, mask=row < T, other=0.0)[None, :])
        d_k = tl.dot(d_s.to(q.dtype), q, d_k)
    return d_k, d_v


@triton.jit
def _backward_kv(qkv, d_out, d_qkv, sums, lse, delta, slopes, reach, span, span_b, span_last, T, sb, st, sg, ss, db, dt,
                 dg, ds_, H, scale, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
                 N: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """Gradients of one block of keys and values, over all queries that see them."""
    block, bg = tl.program_id(0), tl.program_id(1)  # the long columns first
    groups = H // P
    b, g = (bg // groups).to(tl.int64), bg % groups
    base = qkv + b * sb + g * sg
    since = span + b * span_b
    first = block * N
    key, column = first + tl.arange(0, N), tl.arange(0, DP)
    k = _tile(base + P * ss, key, column, st, T, D, DP, True)
    v = _tile(base + (P + 1) * ss, key, column, st, T, D, DP, True)
    d_k = tl.zeros([N, DP], tl.float32)
    d_v = tl.zeros([N, DP], tl.float32)
    for member in range(P):
        h = g * P + member
        bh = b * H + h
        slope = tl.load(slopes + h)
        q, o, level, inner = base + member * ss, d_out + (b * T * H + h) * D, lse + bh * T, delta + bh * T
        end = tl.minimum(T, first + N + tl.load(reach + bh))
        middle = tl.minimum((first + N + M - 1) // M * M, T)
        edge = end
        if SPAN:  # how far the first key is seen, and how far the last
            end = tl.minimum(end, tl.load(since + span_last + tl.minimum(first + N, T) - 1) + 1)
            edge = tl.minimum(end, tl.maximum(middle, (tl.load(since + span_last + first) + 1) // M * M))
        d_k, d_v = _over_queries(d_k, d_v, k, v, q, o, level, inner, since, key, column, first // M * M, middle, T, st,
                                 H * D, slope, scale, D, DP, M, True, SPAN)  # fmt: skip
        d_k, d_v = _over_queries(d_k, d_v, k, v, q, o, level, inner, since, key, column, middle, edge, T, st,
                                 H * D, slope, scale, D, DP, M, False, SPAN)  # fmt: skip
        if SPAN:
            d_k, d_v = _over_queries(d_k, d_v, k, v, q, o, level, inner, since, key, column, tl.maximum(middle, edge),
                                     end, T, st, H * D, slope, scale, D, DP, M, True, SPAN)  # fmt: skip
    d_k *= scale * 0.6931471805599453  # of log2 scores
    at = d_qkv + b * db + g * dg + key[:, None] * dt + column[None, :]
    there = (key < T)[:, None] & (column < D)[None, :]
    tl.store(at + P * ds_, d_k.to(d_qkv.dtype.element_ty), mask=there)
    tl.store(at + (P + 1) * ds_, d_v.to(d_qkv.dtype.element_ty), mask=there)
    at = sums + ((tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (P + 2) + P) * D + column
    tl.store(at, tl.sum(d_k, 0), mask=column < D)
    tl.store(at + D, tl.sum(d_v, 0), mask=column < D)


@triton.jit
def _over_keys_back(d_q, q, d_o, level, inner, k_base, v_base, row, since, column, low, end, first, T, st, slope,
                    scale, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, EDGE: tl.constexpr,
                    SPAN: tl.constexpr):  # fmt: skip
    """The gradient of queries grows by the keys low to end."""
    for start in range(low, end, N):
        key = start + tl.arange(0, N)
        k = _tile(k_base, key, column, st, T, D, DP, EDGE)
        v = _tile(v_base, key, column, st, T, D, DP, EDGE)
        s = tl.dot(q, tl.trans(k)) * scale + (slope * (key - first))[None, :]
        p = tl.exp2(s - level[:, None])
        if EDGE:
            p = tl.where(_sees(row[:, None], key[None, :], since[:, None], SPAN), p, 0.0)
        d_p = tl.dot(d_o, tl.trans(v))
        d_s = p * (d_p - inner[:, None])
        d_q = tl.dot(d_s.to(k.dtype), k, d_q)
    return d_q


@triton.jit
def _backward_q(qkv, d_out, d_qkv, sums, lse, delta, slopes, reach, span, span_b, span_last, T, sb, st, sg, ss, db, dt,
                dg, ds_, H, scale, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
                N: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """The gradient of one block of queries, over all keys that it sees."""
    block, bh, b, h, base, k, v = _query_program(qkv, sb, sg, ss, H, P)
    first = block * M
    row, column = first + tl.arange(0, M), tl.arange(0, DP)
    q = _tile(base + (h % P) * ss, row, column, st, T, D, DP, True)
    d_o = _tile(d_out + (b * T * H + h) * D, row, column, H * D, T, D, DP, True)
    slope = tl.load(slopes + h)
    level = tl.load(lse + bh * T + row, mask=row < T, other=float("inf")) + slope * (row - first)
    inner = tl.load(delta + bh * T + row, mask=row < T, other=0.0)
    d_q = tl.zeros([M, DP], tl.float32)
    low, edge, middle, end, since = _keys_of(span, b, span_b, first, tl.load(reach + bh), T, M, N, SPAN)
    if SPAN:
        d_q = _over_keys_back(d_q, q, d_o, level, inner, k, v, row, since, column, low, edge, first, T, st, slope,
                              scale, D, DP, N, True, SPAN)  # fmt: skip
    d_q = _over_keys_back(d_q, q, d_o, level, inner, k, v, row, since, column, edge, middle, first, T, st, slope,
                          scale, D, DP, N, False, SPAN)  # fmt: skip
    d_q = _over_keys_back(d_q, q, d_o, level, inner, k, v, row, since, column, middle, end, first, T, st, slope,
                          scale, D, DP, N, True, SPAN)  # fmt: skip
    d_q *= scale * 0.6931471805599453
    at = d_qkv + b * db + (h // P) * dg + (h % P) * ds_ + row[:, None] * dt + column[None, :]
    tl.store(at, d_q.to(d_qkv.dtype.element_ty), mask=(row < T)[:, None] & (column < D)[None, :])
    at = sums + ((block * (tl.num_programs(1) // P) + bh // P) * (P + 2) + bh % P) * D + column
    tl.store(at, tl.sum(d_q, 0), mask=column < D)


@library.custom_op("ingot::alibi_attention", mutates_args=())
def alibi_attention(
    qkv: Tensor, slopes: Tensor, scale: float, span: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [B, T, H, D] of a fused projection [B, T, G, P + 2, D]; then, for the backward pass, the log of each
    row's sum and each head's reach. `bias` has been added by the projection, which leaves its gradient to us."""
    B, T, G, slots, D = qkv.shape
    P, H, DP = slots - 2, G * (slots - 2), triton.next_power_of_2(D)
    out = qkv.new_empty(B, T, H, D)
    lse = torch.empty(B, H, T, device=qkv.device)
    reach = torch.empty(B, H, device=qkv.device, dtype=torch.int32)
    slopes2 = slopes * LOG2E
    shape = (T, *qkv.stride()[:4], H, scale * LOG2E)
    _reach[(B * H,)](qkv, slopes2, reach, *shape, NEGLIGIBLE, P, D, DP, 128, num_warps=8)
    M, N, warps, stages = FORWARD.get(DP, FORWARD[128])
    _forward[(triton.cdiv(T, M), B * H)](
        qkv, out, lse, slopes2, reach, *_seen(span, reach)[:2], *shape, P, D, DP, M, N, span is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse, reach


@alibi_attention.register_fake
def _(
    qkv: Tensor, slopes: Tensor, scale: float, span: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, G, slots, D = qkv.shape
    H = G * (slots - 2)
    return qkv.new_empty(B, T, H, D), slopes.new_empty(B, H, T), slopes.new_empty(B, H, dtype=torch.int32)


@library.custom_op("ingot::alibi_attention_backward", mutates_args=())
def alibi_attention_backward(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, reach: Tensor, slopes: Tensor, scale: float,
    span: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of qkv, and parts of its sum over all tokens."""
    B, T, G, slots, D = qkv.shape
    P, H, DP = slots - 2, G * (slots - 2), triton.next_power_of_2(D)
    d_out = d_out.contiguous()
    d_qkv = torch.empty(qkv.shape, device=qkv.device, dtype=qkv.dtype)
    parts = triton.cdiv(T, PART)
    sums = torch.empty(parts * B, G * slots * D, device=qkv.device)
    delta = torch.empty_like(lse)
    rows = B * T * H
    _delta[(triton.cdiv(rows, 64),)](out, d_out, delta, T, H, rows, D, DP, 64)
    slopes2 = slopes * LOG2E
    shape = (*_seen(span, reach), T, *qkv.stride()[:4], *d_qkv.stride()[:4], H, scale * LOG2E)
    given = (qkv, d_out, d_qkv, sums, lse, delta, slopes2, reach, *shape, P, D, DP)
    masked, most = span is not None, REGISTERS.get(DP)
    block, warps, stages = BACKWARD_KV.get(DP, BACKWARD_KV[128])
    _backward_kv[(parts, B * G)](*given, block, PART, masked, num_warps=warps, num_stages=stages, maxnreg=most)
    block, warps, stages = BACKWARD_Q.get(DP, BACKWARD_Q[128])
    _backward_q[(parts, B * H)](*given, PART, block, masked, num_warps=warps, num_stages=stages, maxnreg=most)
    return d_qkv, sums


@alibi_attention_backward.register_fake
def _(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, reach: Tensor, slopes: Tensor, scale: float,
    span: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, T, *rest = qkv.shape
    return qkv.new_empty(qkv.shape), slopes.new_empty(B * -(-T // PART), math.prod(rest))


def _seen(span: Tensor | None, other: Tensor) -> tuple[Tensor, int, int]:
    """The span as the kernels take it: where it lies, its step from sequence to sequence and to its second half."""
    if span is None:
        return other, 0, 0  # never read
    return span, span.stride(1) if span.shape[1] > 1 else 0, span.stride(0)


def _save(ctx, inputs, output) -> None:
    qkv, slopes, ctx.scale, span, bias = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(qkv, slopes, span, *output)


def _gradient(ctx, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    qkv, slopes, span, out, lse, reach = ctx.saved_tensors
    d_qkv, sums = alibi_attention_backward(d_out, qkv, out, lse, reach, slopes, ctx.scale, span)
    return d_qkv, None, None, None, sums.sum(0) if ctx.biased else None


alibi_attention.register_autograd(_gradient, setup_context=_save)
EXPENSIVE_OPS.add(torch.ops.ingot.alibi_attention.default)
