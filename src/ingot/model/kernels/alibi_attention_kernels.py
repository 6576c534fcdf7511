# mypy: disallow-untyped-defs=False
"""The Triton kernels of `alibi_attention`, whose header explains them.

    reach           how far back each head of each sequence must look
    forward         a block of queries over the keys that it sees, with the running softmax of FlashAttention
    delta           sum(out x d_out) of each query, which the gradient of its scores needs
    backward_kv     a block of keys and values over the queries that see it
    backward_q      a block of queries over the keys that it sees

Each gradient is written by one program, in one order, without atomics: results are the same to the bit in every run.
"""

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit
def reach(qkv, slopes, reach, T, sb, st, sg, ss, H, scale, bits, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
           ROWS: tl.constexpr):  # fmt: skip
    """How many tokens back a head of a sequence must look; one program for each."""
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
    """Rows of a [T, D] matrix, zero outside of it; without EDGE all rows are inside."""
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
def _kept(row_key, key, least):
    """Which attention weights dropout keeps: `dropout.kept`, which this must equal to the bit. Shapes broadcast."""
    x = key.to(tl.uint32) * 0x9E3779B9 + row_key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15) ^ (row_key >> 32).to(tl.uint32)) * 0x735A2D97
    return x.to(tl.int32, bitcast=True) >= least


@triton.jit
def _over_keys(highest, total, result, q, k_base, v_base, row, since, row_key, least, column, low, end, first, T, st,
               slope, scale, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, EDGE: tl.constexpr,
               SPAN: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Continue the softmax over the keys low to end; EDGE where some are not seen."""
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
        if DROP:
            p = tl.where(_kept(row_key[:, None], key[None, :], least), p, 0.0)
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
def _row_keys(keys, row, T, DROP: tl.constexpr):
    return tl.load(keys + row, mask=row < T, other=0) if DROP else row


@triton.jit
def forward(qkv, out, lse, slopes, reach, keys, least, gain, span, span_b, T, sb, st, sg, ss, H, scale,
             P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr,
             DROP: tl.constexpr):  # fmt: skip
    block, bh, b, h, base, k, v = _query_program(qkv, sb, sg, ss, H, P)
    first = block * M
    row, column = first + tl.arange(0, M), tl.arange(0, DP)
    q = _tile(base + (h % P) * ss, row, column, st, T, D, DP, True)
    slope = tl.load(slopes + h)
    row_key = _row_keys(keys + bh * T, row, T, DROP)
    highest = tl.full([M], -1e30, tl.float32)  # not infinite: a query may see nothing of its first block
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, DP], tl.float32)
    low, edge, middle, end, since = _keys_of(span, b, span_b, first, tl.load(reach + bh), T, M, N, SPAN)
    if SPAN:
        highest, total, result = _over_keys(highest, total, result, q, k, v, row, since, row_key, least, column, low,
                                            edge, first, T, st, slope, scale, D, DP, N, True, SPAN, DROP)  # fmt: skip
    highest, total, result = _over_keys(highest, total, result, q, k, v, row, since, row_key, least, column, edge,
                                        middle, first, T, st, slope, scale, D, DP, N, False, SPAN, DROP)  # fmt: skip
    highest, total, result = _over_keys(highest, total, result, q, k, v, row, since, row_key, least, column, middle,
                                        end, first, T, st, slope, scale, D, DP, N, True, SPAN, DROP)  # fmt: skip
    result = result * (gain / total)[:, None]
    at = out + ((b * T + row[:, None]) * H + h) * D + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(row < T)[:, None] & (column < D)[None, :])
    # as if the bias had been slope x (key - query)
    tl.store(lse + bh * T + row, highest + tl.log2(total) - slope * (row - first), mask=row < T)


@triton.jit
def delta(out, d_out, delta, T, H, rows, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr):
    """sum(out x d_out) of each query: [B, T, H] in, [B, H, T] out."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    at, there = row[:, None] * D + column[None, :], (row < rows)[:, None] & (column < D)[None, :]
    o = tl.load(out + at, mask=there, other=0.0).to(tl.float32)
    d = tl.load(d_out + at, mask=there, other=0.0).to(tl.float32)
    bt, h = row // H, row % H
    tl.store(delta + ((bt // T) * H + h) * T + bt % T, tl.sum(o * d, 1), mask=row < rows)


@triton.jit
def _over_queries(d_k, d_v, k, v, q_base, o_base, lse, delta, keys, least, gain, span, key, column, low, end, T, st,
                  so, slope, scale, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, EDGE: tl.constexpr,
                  SPAN: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Add to the gradients of keys and values from the queries low to end; EDGE where some do not see all keys."""
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
        d_p = tl.dot(v, tl.trans(d_o))
        p_kept = p
        if DROP:
            kept = _kept(_row_keys(keys, row, T, DROP)[None, :], key[:, None], least)
            p_kept, d_p = tl.where(kept, p * gain, 0.0), tl.where(kept, d_p * gain, 0.0)
        d_v = tl.dot(p_kept.to(d_o.dtype), d_o, d_v)
        d_s = p * (d_p - tl.load(delta + row, mask=row < T, other=0.0)[None, :])
        d_k = tl.dot(d_s.to(q.dtype), q, d_k)
    return d_k, d_v


@triton.jit
def backward_kv(qkv, d_out, d_qkv, sums, lse, delta, slopes, reach, keys, least, gain, span, span_b, span_last, T, sb,
                 st, sg, ss, db, dt, dg, ds_, H, scale, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                 M: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
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
        row_keys = keys + bh * T
        end = tl.minimum(T, first + N + tl.load(reach + bh))
        middle = tl.minimum((first + N + M - 1) // M * M, T)
        edge = end
        if SPAN:  # how far the first key is seen, and how far the last
            end = tl.minimum(end, tl.load(since + span_last + tl.minimum(first + N, T) - 1) + 1)
            edge = tl.minimum(end, tl.maximum(middle, (tl.load(since + span_last + first) + 1) // M * M))
        d_k, d_v = _over_queries(d_k, d_v, k, v, q, o, level, inner, row_keys, least, gain, since, key, column,
                                 first // M * M, middle, T, st, H * D, slope, scale, D, DP, M, True, SPAN,
                                 DROP)  # fmt: skip
        d_k, d_v = _over_queries(d_k, d_v, k, v, q, o, level, inner, row_keys, least, gain, since, key, column, middle,
                                 edge, T, st, H * D, slope, scale, D, DP, M, False, SPAN, DROP)  # fmt: skip
        if SPAN:
            d_k, d_v = _over_queries(d_k, d_v, k, v, q, o, level, inner, row_keys, least, gain, since, key, column,
                                     tl.maximum(middle, edge), end, T, st, H * D, slope, scale, D, DP, M, True, SPAN,
                                     DROP)  # fmt: skip
    d_k *= scale * 0.6931471805599453  # of log2 scores
    at = d_qkv + b * db + g * dg + key[:, None] * dt + column[None, :]
    there = (key < T)[:, None] & (column < D)[None, :]
    tl.store(at + P * ds_, d_k.to(d_qkv.dtype.element_ty), mask=there)
    tl.store(at + (P + 1) * ds_, d_v.to(d_qkv.dtype.element_ty), mask=there)
    at = sums + ((tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (P + 2) + P) * D + column
    tl.store(at, tl.sum(d_k, 0), mask=column < D)
    tl.store(at + D, tl.sum(d_v, 0), mask=column < D)


@triton.jit
def _over_keys_back(d_q, q, d_o, level, inner, k_base, v_base, row, since, row_key, least, gain, column, low, end,
                    first, T, st, slope, scale, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr,
                    EDGE: tl.constexpr, SPAN: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Add to the gradient of queries from the keys low to end."""
    for start in range(low, end, N):
        key = start + tl.arange(0, N)
        k = _tile(k_base, key, column, st, T, D, DP, EDGE)
        v = _tile(v_base, key, column, st, T, D, DP, EDGE)
        s = tl.dot(q, tl.trans(k)) * scale + (slope * (key - first))[None, :]
        p = tl.exp2(s - level[:, None])
        if EDGE:
            p = tl.where(_sees(row[:, None], key[None, :], since[:, None], SPAN), p, 0.0)
        d_p = tl.dot(d_o, tl.trans(v))
        if DROP:
            d_p = tl.where(_kept(row_key[:, None], key[None, :], least), d_p * gain, 0.0)
        d_s = p * (d_p - inner[:, None])
        d_q = tl.dot(d_s.to(k.dtype), k, d_q)
    return d_q


@triton.jit
def backward_q(qkv, d_out, d_qkv, sums, lse, delta, slopes, reach, keys, least, gain, span, span_b, span_last, T, sb,
                st, sg, ss, db, dt, dg, ds_, H, scale, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                M: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
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
    row_key = _row_keys(keys + bh * T, row, T, DROP)
    low, edge, middle, end, since = _keys_of(span, b, span_b, first, tl.load(reach + bh), T, M, N, SPAN)
    if SPAN:
        d_q = _over_keys_back(d_q, q, d_o, level, inner, k, v, row, since, row_key, least, gain, column, low, edge,
                              first, T, st, slope, scale, D, DP, N, True, SPAN, DROP)  # fmt: skip
    d_q = _over_keys_back(d_q, q, d_o, level, inner, k, v, row, since, row_key, least, gain, column, edge, middle,
                          first, T, st, slope, scale, D, DP, N, False, SPAN, DROP)  # fmt: skip
    d_q = _over_keys_back(d_q, q, d_o, level, inner, k, v, row, since, row_key, least, gain, column, middle, end,
                          first, T, st, slope, scale, D, DP, N, True, SPAN, DROP)  # fmt: skip
    d_q *= scale * 0.6931471805599453
    at = d_qkv + b * db + (h // P) * dg + (h % P) * ds_ + row[:, None] * dt + column[None, :]
    tl.store(at, d_q.to(d_qkv.dtype.element_ty), mask=(row < T)[:, None] & (column < D)[None, :])
    at = sums + ((block * (tl.num_programs(1) // P) + bh // P) * (P + 2) + bh % P) * D + column
    tl.store(at, tl.sum(d_q, 0), mask=column < D)
