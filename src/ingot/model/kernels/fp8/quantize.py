# mypy: disallow-untyped-defs=False
"""Quantizes a tensor to fp8 in Triton, row-major and transposed in one pass.

An fp8 matmul needs both operands contiguous along the dimension it sums over, so the same tensor is used row-major in
one matmul and transposed in another. The compiler derives the transpose from the quantized tensor with single-byte
reads or writes; here each tile is transposed in shared memory. The input is read twice, once for its largest absolute
value and once to quantize; the second read is mostly served from the cache.

The input must be bf16: with 32-bit inputs Triton 3.6 misplaced a quarter of the bytes of a transposed tile.
"""

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

# measured on an H200
PARTS, BLOCK, LARGEST_WARPS = 512, 8192, 8  # largest value: programs, elements per step, warps
ROWS, WIDTH, WARPS = 64, 64, 4  # quantization: tile, warps


@triton.jit
def _largest_kernel(x_in, parts, count, steps, BLOCK: tl.constexpr):
    """The largest absolute value of a run of consecutive blocks."""
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
    """One tile. NaN does not count as the largest value, and stays NaN in fp8."""
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
    """x [n, k] in fp8, its transpose [k, n] if wanted, and the scale that recovers the values."""
    rows, width = x.shape
    by_rows = torch.empty_like(x, dtype=dtype)
    by_columns = torch.empty(width if columns else 0, rows, device=x.device, dtype=dtype)
    scale = torch.empty((), device=x.device)
    quantize_into(x, by_rows, by_columns, scale, least)
    return by_rows, by_columns, scale


def quantize_into(x: Tensor, by_rows: Tensor, by_columns: Tensor, scale: Tensor, least: float) -> None:
    """The same into tensors that are there; `by_columns` may be empty."""
    assert x.dtype == torch.bfloat16, x.dtype
    (rows, width), limit = x.shape, torch.finfo(by_rows.dtype).max
    columns = by_columns.shape[0] > 0
    parts = torch.empty(PARTS, device=x.device)
    steps = triton.cdiv(x.numel(), PARTS * BLOCK)
    _largest_kernel[(PARTS,)](x, parts, x.numel(), steps, BLOCK, num_warps=LARGEST_WARPS)
    _quantize_kernel[(triton.cdiv(width, WIDTH), triton.cdiv(rows, ROWS))](
        x, parts, by_rows, by_columns, scale, rows, width, least, limit, columns, PARTS, ROWS, WIDTH, num_warps=WARPS
    )
