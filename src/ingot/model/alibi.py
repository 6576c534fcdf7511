# mypy: disallow-untyped-defs=False
"""Causal attention with ALiBi on a GPU, in Triton: the kernel that only reads what can matter.

ALiBi lowers a score by slope x distance, so a steep head cannot see far: beyond some distance a key's weight is less
than fp32 can add to the sum. By Cauchy-Schwarz that distance follows from the largest key, the largest query and the
score of each token with itself, all of this very input; `_reach` finds it for each head of each sequence, and the other
kernels stop there. Nothing is approximated: what is left out is under 2^-24 of the softmax's sum. FlexAttention, the
obvious alternative, computes the whole triangle whatever the slope.

The bias needs no arithmetic per element either: softmax does not see what all keys of a query share, so slope x key
position is added, one value per column. Queries, keys and values are read from the fused projection where they lie, and
their gradient is written in the same layout, so nothing is cut apart or put together.

Shapes: B batch, T tokens, G key/value heads, P query heads per group, H = G P heads, D head width.
qkv is [B, T, G, P + 2, D], the output [B, T, H, D]. Scores are in units of log2, so that exp2 does.
"""

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

LOG2E = 1.4426950408889634
NEGLIGIBLE = 32.0  # bits under a row's largest weight; all keys beyond together are 256 times that at most
# block of queries, block of keys, warps, stages, by padded head width; measured on an H200
FORWARD = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)}
BACKWARD_KV = {64: (32, 64, 4, 4), 128: (64, 64, 4, 2)}
BACKWARD_Q = {64: (64, 64, 4, 3), 128: (64, 64, 4, 2)}


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
def _tile(base, row, column, st, T, D: tl.constexpr, DP: tl.constexpr):
    """Rows of a [T, D] matrix, zero where there is nothing."""
    at = base + row[:, None] * st + column[None, :]
    if D == DP:
        return tl.load(at, mask=(row < T)[:, None], other=0.0)
    return tl.load(at, mask=(row < T)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _forward(qkv, out, lse, slopes, reach, T, sb, st, sg, ss, H, scale, P: tl.constexpr, D: tl.constexpr,
             DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    block, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the long rows first
    b, h = (bh // H).to(tl.int64), bh % H
    base = qkv + b * sb + (h // P) * sg
    first = block * M
    row, column = first + tl.arange(0, M), tl.arange(0, DP)
    q = _tile(base + (h % P) * ss, row, column, st, T, D, DP)
    slope = tl.load(slopes + h)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, DP], tl.float32)
    low = tl.maximum(0, first - tl.load(reach + bh)) // N * N
    middle = first // N * N
    end = tl.minimum(first + M, T)
    for start in range(low, middle, N):
        key = start + tl.arange(0, N)
        k = tl.load(base + P * ss + key[:, None] * st + column[None, :], mask=(column < D)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale + (slope * (key - first))[None, :]  # [M, N]
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(base + (P + 1) * ss + key[:, None] * st + column[None, :], mask=(column < D)[None, :], other=0.0)
        result = tl.dot(p.to(v.dtype), v, result * fade[:, None])
        highest = higher
    for start in range(middle, end, N):  # the diagonal
        key = start + tl.arange(0, N)
        k = _tile(base + P * ss, key, column, st, T, D, DP)
        s = tl.dot(q, tl.trans(k)) * scale + (slope * (key - first))[None, :]
        s = tl.where(row[:, None] >= key[None, :], s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(p, 1)
        v = _tile(base + (P + 1) * ss, key, column, st, T, D, DP)
        result = tl.dot(p.to(v.dtype), v, result * fade[:, None])
        highest = higher
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
def _backward_kv(qkv, d_out, d_qkv, lse, delta, slopes, reach, T, sb, st, sg, ss, db, dt, dg, ds_, H, scale,
                 P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Gradients of one block of keys and values, over all queries that see them."""
    block, bg = tl.program_id(0), tl.program_id(1)  # the long columns first
    groups = H // P
    b, g = (bg // groups).to(tl.int64), bg % groups
    base = qkv + b * sb + g * sg
    first = block * N
    key, column = first + tl.arange(0, N), tl.arange(0, DP)
    k = _tile(base + P * ss, key, column, st, T, D, DP)
    v = _tile(base + (P + 1) * ss, key, column, st, T, D, DP)
    d_k = tl.zeros([N, DP], tl.float32)
    d_v = tl.zeros([N, DP], tl.float32)
    for member in range(P):
        h = g * P + member
        bh = b * H + h
        slope = tl.load(slopes + h)
        end = tl.minimum(T, first + N + tl.load(reach + bh))
        middle = tl.minimum((first + N + M - 1) // M * M, T)
        q_base, o_base = base + member * ss, d_out + (b * T * H + h) * D
        for start in range(first // M * M, middle, M):  # the diagonal
            row = start + tl.arange(0, M)
            q = _tile(q_base, row, column, st, T, D, DP)
            level = tl.load(lse + bh * T + row, mask=row < T, other=float("inf")) + slope * (row - start)
            s = tl.dot(k, tl.trans(q)) * scale + (slope * (key - start))[:, None]  # [N, M]
            p = tl.where(row[None, :] >= key[:, None], tl.exp2(s - level[None, :]), 0.0)
            d_o = _tile(o_base, row, column, H * D, T, D, DP)
            d_v = tl.dot(p.to(d_o.dtype), d_o, d_v)
            d_p = tl.dot(v, tl.trans(d_o))
            d_s = p * (d_p - tl.load(delta + bh * T + row, mask=row < T, other=0.0)[None, :])
            d_k = tl.dot(d_s.to(q.dtype), q, d_k)
        for start in range(middle, end, M):
            row = start + tl.arange(0, M)
            q = _tile(q_base, row, column, st, T, D, DP)
            level = tl.load(lse + bh * T + row, mask=row < T, other=float("inf")) + slope * (row - start)
            s = tl.dot(k, tl.trans(q)) * scale + (slope * (key - start))[:, None]
            p = tl.exp2(s - level[None, :])
            d_o = _tile(o_base, row, column, H * D, T, D, DP)
            d_v = tl.dot(p.to(d_o.dtype), d_o, d_v)
            d_p = tl.dot(v, tl.trans(d_o))
            d_s = p * (d_p - tl.load(delta + bh * T + row, mask=row < T, other=0.0)[None, :])
            d_k = tl.dot(d_s.to(q.dtype), q, d_k)
    d_k *= scale * 0.6931471805599453  # of log2 scores
    at = d_qkv + b * db + g * dg + key[:, None] * dt + column[None, :]
    there = (key < T)[:, None] & (column < D)[None, :]
    tl.store(at + P * ds_, d_k.to(d_qkv.dtype.element_ty), mask=there)
    tl.store(at + (P + 1) * ds_, d_v.to(d_qkv.dtype.element_ty), mask=there)


@triton.jit
def _backward_q(qkv, d_out, d_qkv, lse, delta, slopes, reach, T, sb, st, sg, ss, db, dt, dg, ds_, H, scale,
                P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The gradient of one block of queries, over all keys that it sees."""
    block, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    base = qkv + b * sb + (h // P) * sg
    first = block * M
    row, column = first + tl.arange(0, M), tl.arange(0, DP)
    q = _tile(base + (h % P) * ss, row, column, st, T, D, DP)
    d_o = _tile(d_out + (b * T * H + h) * D, row, column, H * D, T, D, DP)
    slope = tl.load(slopes + h)
    level = tl.load(lse + bh * T + row, mask=row < T, other=float("inf")) + slope * (row - first)
    inner = tl.load(delta + bh * T + row, mask=row < T, other=0.0)
    d_q = tl.zeros([M, DP], tl.float32)
    low = tl.maximum(0, first - tl.load(reach + bh)) // N * N
    middle = first // N * N
    end = tl.minimum(first + M, T)
    for start in range(low, middle, N):
        key = start + tl.arange(0, N)
        k = tl.load(base + P * ss + key[:, None] * st + column[None, :], mask=(column < D)[None, :], other=0.0)
        v = tl.load(base + (P + 1) * ss + key[:, None] * st + column[None, :], mask=(column < D)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale + (slope * (key - first))[None, :]
        p = tl.exp2(s - level[:, None])
        d_p = tl.dot(d_o, tl.trans(v))
        d_s = p * (d_p - inner[:, None])
        d_q = tl.dot(d_s.to(k.dtype), k, d_q)
    for start in range(middle, end, N):  # the diagonal
        key = start + tl.arange(0, N)
        k = _tile(base + P * ss, key, column, st, T, D, DP)
        v = _tile(base + (P + 1) * ss, key, column, st, T, D, DP)
        s = tl.dot(q, tl.trans(k)) * scale + (slope * (key - first))[None, :]
        p = tl.where(row[:, None] >= key[None, :], tl.exp2(s - level[:, None]), 0.0)
        d_p = tl.dot(d_o, tl.trans(v))
        d_s = p * (d_p - inner[:, None])
        d_q = tl.dot(d_s.to(k.dtype), k, d_q)
    d_q *= scale * 0.6931471805599453
    at = d_qkv + b * db + (h // P) * dg + (h % P) * ds_ + row[:, None] * dt + column[None, :]
    tl.store(at, d_q.to(d_qkv.dtype.element_ty), mask=(row < T)[:, None] & (column < D)[None, :])


@torch.library.custom_op("ingot::alibi_attention", mutates_args=())
def alibi_attention(qkv: Tensor, slopes: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [B, T, H, D] of a fused projection [B, T, G, P + 2, D]; then, for the backward pass, the log of each
    row's sum and each head's reach."""
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
        qkv, out, lse, slopes2, reach, *shape, P, D, DP, M, N, num_warps=warps, num_stages=stages
    )
    return out, lse, reach


@alibi_attention.register_fake
def _(qkv: Tensor, slopes: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    B, T, G, slots, D = qkv.shape
    H = G * (slots - 2)
    return qkv.new_empty(B, T, H, D), slopes.new_empty(B, H, T), slopes.new_empty(B, H, dtype=torch.int32)


@torch.library.custom_op("ingot::alibi_attention_backward", mutates_args=())
def alibi_attention_backward(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, reach: Tensor, slopes: Tensor, scale: float
) -> Tensor:
    B, T, G, slots, D = qkv.shape
    P, H, DP = slots - 2, G * (slots - 2), triton.next_power_of_2(D)
    d_out = d_out.contiguous()
    d_qkv = torch.empty(qkv.shape, device=qkv.device, dtype=qkv.dtype)
    delta = torch.empty_like(lse)
    rows = B * T * H
    _delta[(triton.cdiv(rows, 64),)](out, d_out, delta, T, H, rows, D, DP, 64)
    slopes2 = slopes * LOG2E
    shape = (T, *qkv.stride()[:4], *d_qkv.stride()[:4], H, scale * LOG2E)
    M, N, warps, stages = BACKWARD_KV.get(DP, BACKWARD_KV[128])
    _backward_kv[(triton.cdiv(T, N), B * G)](
        qkv, d_out, d_qkv, lse, delta, slopes2, reach, *shape, P, D, DP, M, N, num_warps=warps, num_stages=stages
    )
    M, N, warps, stages = BACKWARD_Q.get(DP, BACKWARD_Q[128])
    _backward_q[(triton.cdiv(T, M), B * H)](
        qkv, d_out, d_qkv, lse, delta, slopes2, reach, *shape, P, D, DP, M, N, num_warps=warps, num_stages=stages
    )
    return d_qkv


@alibi_attention_backward.register_fake
def _(d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, reach: Tensor, slopes: Tensor, scale: float) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx, inputs, output) -> None:
    qkv, slopes, ctx.scale = inputs
    ctx.save_for_backward(qkv, slopes, *output)


def _gradient(ctx, d_out: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
    qkv, slopes, out, lse, reach = ctx.saved_tensors
    return alibi_attention_backward(d_out, qkv, out, lse, reach, slopes, ctx.scale), None, None


alibi_attention.register_autograd(_gradient, setup_context=_save)
