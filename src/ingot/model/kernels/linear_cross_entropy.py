# mypy: disallow-untyped-defs=False
"""The output projection and the cross-entropy together, in Triton, with the gradient made in the forward pass.

The logits are the largest tensor of a training step. Here a chunk of them is written once, in the type of the matrix
products, and one Triton kernel turns each row in place into its gradient; the products with the weight and the hidden
states follow at once. So nothing of size [tokens, vocabulary] outlives its chunk, and the backward pass only scales.
The usual chunked loss saves the same memory but computes the logits a second time in the backward pass; the compiler's
own fusion computes them once but reads and writes them three to four times.

The kernel reads a row once and writes it once. Softmax needs its sum first, hence the usual two passes; but the sum is
one number per row, so it is factored out and applied where rows are short: `scales`, on the hidden states and on their
gradient.

Shapes: N tokens, d width, V vocabulary, R rows of the weight (V and padding).
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor, library

from ingot.model.gpt import IGNORE, CrossEntropy
from ingot.model.kernels.bf16_weights import WorkingWeight
from ingot.model.kernels.conditions import autocast_dtype
from ingot.model.kernels.operator import operator

CHUNK_BYTES = 2 << 30  # of logits at a time: few and large chunks keep the matrix products efficient
BLOCK, WARPS = 4096, 4  # the fastest of nine on an H200
ROOM = tl.constexpr(40.0)  # how far a logit may be above the level: e^40 is well within bf16 and within sums in fp32


@triton.jit
def _softmax(logits, labels, losses, scales, V, R, ignore, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its loss, the scale 1 / sum, and in place of its logits exp(logit - level), less the sum at the label;
    times the scale that is softmax - one-hot."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    base = logits + row * R
    column = tl.arange(0, BLOCK)
    if label == ignore:
        tl.store(losses + row, 0.0)
        tl.store(scales + row, 0.0)
        if GRADIENT:
            for start in range(0, R, BLOCK):
                tl.store(base + start + column, tl.zeros([BLOCK], logits.dtype.element_ty), mask=start + column < R)
        return
    own = tl.load(base + label).to(tl.float32)
    x = tl.load(base + column, mask=column < V, other=float("-inf")).to(tl.float32)
    level = tl.maximum(own, tl.max(x, 0))
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, R, BLOCK):
        at = start + column
        x = tl.load(base + at, mask=at < V, other=float("-inf")).to(tl.float32)
        top = tl.max(x, 0)
        if top > level + ROOM:  # rare: rescale what is already written to a new level
            fade = tl.exp(level - top)
            if GRADIENT:
                for back in range(0, start, BLOCK):
                    y = tl.load(base + back + column).to(tl.float32) * fade
                    tl.store(base + back + column, y.to(logits.dtype.element_ty))
            total *= fade
            level = top
        y = tl.exp(x - level)
        total += y
        if GRADIENT:
            tl.store(base + at, y.to(logits.dtype.element_ty), mask=at < R)
    whole = tl.sum(total, 0)
    tl.store(losses + row, level + tl.log(whole) - own)
    tl.store(scales + row, 1.0 / whole)
    if GRADIENT:
        tl.debug_barrier()  # another thread has written there
        tl.store(base + label, (tl.exp(own - level) - whole).to(logits.dtype.element_ty))


@triton.jit
def _add_scaled_kernel(total, part, scale, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    sum = tl.load(total + at, mask=there) + tl.load(part + at, mask=there) * tl.load(scale)
    tl.store(total + at, sum, mask=there)


@operator("ingot::linear_cross_entropy")
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab: int, ignore: int, wide: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The summed loss and, where a type `wide` for the second is given, its gradients by hidden [N, d], but for the
    scales [N] of its rows, and by weight [R, d]."""
    rows, count = weight.shape[0], hidden.shape[0]
    losses, scales = torch.empty(2, count, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if wide is not None else hidden.new_empty(0)
    d_weight = torch.empty_like(weight, dtype=wide) if wide is not None else weight.new_empty(0)
    chunks = -(-count * rows * hidden.element_size() // CHUNK_BYTES)
    size = -(-count // chunks)
    for start in range(0, count, size):
        part = slice(start, start + size)
        logits = hidden[part] @ weight.t()  # [n, R]
        _softmax[(logits.shape[0],)](
            logits, labels[part], losses[part], scales[part], vocab, rows, ignore, wide is not None, BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
        if wide is not None:
            torch.mm(logits, weight, out=d_hidden[part])
            scaled = _scaled(hidden[part], scales[part])
            if wide == hidden.dtype:
                added = logits.t() @ scaled
                d_weight = added if start == 0 else d_weight.add_(added)
            elif start == 0:
                torch.mm(logits.t(), scaled, out_dtype=wide, out=d_weight)
            else:  # accumulated in fp32 by the product itself
                torch.addmm(d_weight, logits.t(), scaled, out_dtype=wide, out=d_weight)
    return losses.sum(), d_hidden, d_weight, scales


@library.register_fake("ingot::linear_cross_entropy")
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab: int, ignore: int, wide: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, scales = (hidden.new_empty(shape, dtype=torch.float32) for shape in ((), hidden.shape[:1]))
    if wide is None:
        return loss, hidden.new_empty(0), weight.new_empty(0), scales
    return loss, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape, dtype=wide), scales


@operator("ingot::scale_rows")
def _scaled(x: Tensor, scales: Tensor) -> Tensor:
    """x [n, d] times scales [n], in fp32 and rounded once."""
    return torch.mul(x, scales[:, None], out=torch.empty_like(x))


@library.register_fake("ingot::scale_rows")
def _(x: Tensor, scales: Tensor) -> Tensor:
    return torch.empty_like(x)


@operator("ingot::add_scaled", mutates_args=("total",))
def _add_scaled(total: Tensor, part: Tensor, scale: Tensor) -> None:
    """total += part * scale, of any shape and a scalar; all in fp32."""
    _add_scaled_kernel[(triton.cdiv(total.numel(), 1024),)](total, part, scale, total.numel(), 1024)


@library.register_fake("ingot::add_scaled")
def _(total: Tensor, part: Tensor, scale: Tensor) -> None:
    return None


class _LinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab: int,
        ignore: int,
        working: Tensor,
        total: Tensor | None,
    ) -> Tensor:
        loss, *gradients = _linear_cross_entropy(hidden, working, labels, vocab, ignore, torch.float32)
        ctx.save_for_backward(*gradients)
        ctx.total = total  # not saved: the embedding adds to it as well
        return loss

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, scales = ctx.saved_tensors
        d_hidden = _scaled(d_hidden, scales * slope)
        if ctx.total is None:
            return d_hidden, d_weight * slope, None, None, None, None, None
        _add_scaled(ctx.total, d_weight, slope)
        return d_hidden, None, None, None, None, None, None


# Not compiled, since there is nothing to fuse it with. And when torch 2.11 meets an operator for the first time, it
# describes it for a log by everything that leads to it, as a tree: after 12 layers that takes hours.
@torch.compiler.disable
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab: int,
    ignore: int,
    working: WorkingWeight | None = None,
) -> Tensor:
    """The cross-entropy of hidden [..., d] times weight [R, d] transposed, in bf16, of which `vocab` columns count,
    summed over the labels [...] that are not `ignore`. Without a working form of the weight, autograd gets its
    gradient."""
    hidden, labels = hidden.flatten(0, -2).bfloat16().contiguous(), labels.flatten()  # [N, d], [N]
    value = (weight.detach() if working is None else working.value()).to(hidden.dtype)
    if not torch.is_grad_enabled() or not hidden.requires_grad:
        return _linear_cross_entropy(hidden, value, labels, vocab, ignore, None)[0]
    total = None if working is None else working.grad_buffer()
    return _LinearCrossEntropyFunction.apply(hidden, weight, labels, vocab, ignore, value, total)


class LinearCrossEntropy(CrossEntropy):
    """The kernel in the `loss_fn` slot."""

    def __init__(self, vocab_size: int, working: WorkingWeight | None):
        super().__init__(vocab_size)
        self.working = working

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        if autocast_dtype(hidden.device) != torch.bfloat16:
            return super().forward(hidden, weight, labels)
        return linear_cross_entropy(hidden, weight, labels, self.vocab_size, IGNORE, self.working)
