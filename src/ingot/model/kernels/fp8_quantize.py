# mypy: disallow-untyped-defs=False
"""A tensor to 8 bits on a GPU, in Triton: by rows and by columns at once.

Products in 8 bits want both sides to lie along the sum, so what one product takes by rows another takes by columns. The
compiler makes the second from the first, in a kernel that reads or writes single bytes; here a tile is turned in shared
memory. It is read twice, for the largest value and for the rest; the second time mostly from the cache.

What comes in must be bf16: from 32 bits, Triton 3.6 put a quarter of the bytes of a turned tile in wrong places.
"""

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

# measured on an H200
PARTS, BLOCK, LARGEST_WARPS = 512, 8192, 8  # programs that look for the largest value, and their steps
ROWS, WIDTH, WARPS = 64, 64, 4  # a tile


@triton.jit
def _largest_kernel(x_in, parts, count, steps, BLOCK: tl.constexpr):
    """The largest absolute value in some blocks that follow one another."""
    first = tl.program_id(0).to(tl.int64) * steps * BLOCK
    top = tl.zeros([BLOCK], tl.float32)
    for step in range(0, steps):
        at = first + step * BLOCK + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.abs(tl.load(x_in + at, mask=at < count, other=0.0).to(tl.float32)))
    tl.store(parts + tl.program_id(0), tl.max(top, 0))


@triton.jit
def _quantize_kernel(
    x_in, parts, by_rows, by_columns, scale, rows, width, LEAST: tl.constexpr, LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile. A NaN is no largest value, but stays one in 8 bits."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(x_in + at, mask=there, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.load(parts + tl.arange(0, PARTS)), 0), LEAST)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale, tl.div_rn(largest, LIMIT))
    y = (x * tl.div_rn(LIMIT, largest)).to(by_rows.dtype.element_ty)  # [ROWS, WIDTH]
    tl.store(by_rows + at, y, mask=there)
    if COLUMNS:
        at = column.to(tl.int64)[:, None] * rows + row[None, :]
        there = (column < width)[:, None] & (row < rows)[None, :]
        tl.store(by_columns + at, tl.trans(y), mask=there)


def quantize_both(x: Tensor, dtype: torch.dtype, columns: bool, least: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, k] in 8 bits, the same transposed [k, n] where wanted, and the scale that brings them back."""
    assert x.dtype == torch.bfloat16, x.dtype
    (rows, width), limit = x.shape, torch.finfo(dtype).max
    parts = torch.empty(PARTS + 1, device=x.device)
    parts, scale = parts[:PARTS], parts[PARTS]
    by_rows = torch.empty_like(x, dtype=dtype)
    by_columns = torch.empty(width if columns else 0, rows, device=x.device, dtype=dtype)
    steps = triton.cdiv(x.numel(), PARTS * BLOCK)
    _largest_kernel[(PARTS,)](x, parts, x.numel(), steps, BLOCK, num_warps=LARGEST_WARPS)
    _quantize_kernel[(triton.cdiv(width, WIDTH), triton.cdiv(rows, ROWS))](
        x, parts, by_rows, by_columns, scale, rows, width, least, limit, columns, PARTS, ROWS, WIDTH, num_warps=WARPS
    )
    return by_rows, by_columns, scale
