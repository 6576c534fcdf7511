# mypy: disallow-untyped-defs=False
"""The output projection and the cross-entropy together, on a GPU, with the gradient made on the way forward.

The logits are the largest tensor of a training step. Here a chunk of them is written once, in the type of the matrix
products, and one Triton kernel turns each row in place into its gradient; the products with the weight and the hidden
states follow at once. So nothing of size [tokens, vocabulary] outlives its chunk, and the backward pass only scales.
The usual chunked loss saves the same memory but computes the logits a second time in the backward pass; the compiler's
own fusion computes them once but reads and writes them three to four times.

The kernel reads a row once and writes it once. Softmax wants its sum first, hence the usual two passes; but the sum is
one number per row, so it is left out of the row and multiplied in where the rows are short: `scales`, on the hidden
states and on their gradient.

Shapes: N tokens, d width, V vocabulary, R rows of the weight (V and padding).
"""

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor, library

CHUNK_BYTES = 2 << 30  # of logits at a time: few and large chunks keep the matrix products efficient
BLOCK, WARPS = 4096, 4  # the fastest of nine on an H200
ROOM = tl.constexpr(40.0)  # how far a logit may lie above the level: e^40 is well within bf16 and within sums in fp32


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
        if top > level + ROOM:  # hardly ever: bring what is written to a new level
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


@library.custom_op("ingot::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab: int, ignore: int, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The summed loss and its gradients by hidden [N, d], but for the scales [N] of its rows, and by weight [R, d]."""
    narrow = weight.to(hidden.dtype)
    rows, count = weight.shape[0], hidden.shape[0]
    losses, scales = torch.empty(2, count, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if gradient else hidden.new_empty(0)
    d_weight = torch.empty_like(weight) if gradient else weight.new_empty(0)
    chunks = -(-count * rows * hidden.element_size() // CHUNK_BYTES)
    size = -(-count // chunks)
    for start in range(0, count, size):
        part = slice(start, start + size)
        logits = hidden[part] @ narrow.t()  # [n, R]
        _softmax[(logits.shape[0],)](
            logits, labels[part], losses[part], scales[part], vocab, rows, ignore, gradient, BLOCK, num_warps=WARPS
        )
        if gradient:
            torch.mm(logits, narrow, out=d_hidden[part])
            scaled = torch.empty_like(hidden[part])
            torch.mul(hidden[part], scales[part, None], out=scaled)
            if weight.dtype == hidden.dtype:
                added = logits.t() @ scaled
                d_weight = added if start == 0 else d_weight.add_(added)
            elif start == 0:
                torch.mm(logits.t(), scaled, out_dtype=weight.dtype, out=d_weight)
            else:  # accumulated in fp32 by the product itself
                torch.addmm(d_weight, logits.t(), scaled, out_dtype=weight.dtype, out=d_weight)
    return losses.sum(), d_hidden, d_weight, scales


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab: int, ignore: int, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, scales = (hidden.new_empty(shape, dtype=torch.float32) for shape in ((), hidden.shape[:1]))
    if not gradient:
        return loss, hidden.new_empty(0), weight.new_empty(0), scales
    return loss, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), scales


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])


def _scale(ctx, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    d_hidden, d_weight, scales = ctx.saved_tensors
    scaled = torch.empty_like(d_hidden)
    torch.mul(d_hidden, (scales * slope)[:, None], out=scaled)  # in fp32, rounded once
    return scaled, d_weight * slope, None, None, None, None


_linear_cross_entropy.register_autograd(_scale, setup_context=_save)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, vocab: int, ignore: int) -> Tensor:
    """The cross-entropy of hidden [N, d] times weight [R, d] transposed, of which V columns count, summed over the
    labels [N] that are not `ignore`."""
    gradient = torch.is_grad_enabled() and hidden.requires_grad
    return _linear_cross_entropy(hidden.contiguous(), weight, labels, vocab, ignore, gradient)[0]
