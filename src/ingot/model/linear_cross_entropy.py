# mypy: disallow-untyped-defs=False
"""The output projection and the cross-entropy together, on a GPU, with the gradient made on the way forward.

The logits are the largest tensor of a training step. Here a chunk of them is written once, in the type of the matrix
products, and one Triton kernel turns each row in place into its gradient; the products with the weight and the hidden
states follow at once. So nothing of size [tokens, vocabulary] outlives its chunk, and the backward pass only scales.
The usual chunked loss saves the same memory but computes the logits a second time in the backward pass; the compiler's
own fusion computes them once but reads and writes them three to four times.

Shapes: N tokens, d width, V vocabulary, R rows of the weight (V and padding).
"""

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

CHUNK_BYTES = 2 << 30  # of logits at a time: few and large chunks keep the matrix products efficient
BLOCK = 8192


@triton.jit
def _softmax(logits, labels, losses, V, R, ignore, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its loss, and in place of its logits softmax - one-hot."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    base = logits + row * R
    column = tl.arange(0, BLOCK)
    if label == ignore:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, R, BLOCK):
                tl.store(base + start + column, tl.zeros([BLOCK], logits.dtype.element_ty), mask=start + column < R)
        return
    own = tl.load(base + label).to(tl.float32)
    top, total = float("-inf"), 0.0
    for start in range(0, V, BLOCK):
        x = tl.load(base + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    level = top + tl.log(total)
    tl.store(losses + row, level - own)
    if GRADIENT:
        for start in range(0, R, BLOCK):  # the row is in the cache now
            at = start + column
            x = tl.load(base + at, mask=at < V, other=float("-inf")).to(tl.float32)
            slope = tl.exp(x - level) - tl.where(at == label, 1.0, 0.0)
            tl.store(base + at, slope.to(logits.dtype.element_ty), mask=at < R)


@torch.library.custom_op("ingot::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab: int, ignore: int, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss and its gradients by hidden [N, d] and weight [R, d]."""
    narrow = weight.to(hidden.dtype)
    rows, count = weight.shape[0], hidden.shape[0]
    losses = torch.empty(count, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if gradient else hidden.new_empty(0)
    d_weight = torch.empty_like(weight) if gradient else weight.new_empty(0)
    chunks = -(-count * rows * hidden.element_size() // CHUNK_BYTES)
    size = -(-count // chunks)
    for start in range(0, count, size):
        part = slice(start, start + size)
        logits = hidden[part] @ narrow.t()  # [n, R]
        _softmax[(logits.shape[0],)](
            logits, labels[part], losses[part], vocab, rows, ignore, gradient, BLOCK, num_warps=16
        )
        if gradient:
            torch.mm(logits, narrow, out=d_hidden[part])
            if weight.dtype == hidden.dtype or start == 0:
                added = torch.mm(logits.t(), hidden[part], out_dtype=weight.dtype)
                d_weight = added if start == 0 else d_weight.add_(added)
            else:  # accumulated in fp32 by the product itself
                d_weight = torch.addmm(d_weight, logits.t(), hidden[part], out_dtype=weight.dtype)
    return losses.sum(), d_hidden, d_weight


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab: int, ignore: int, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.float32)
    if not gradient:
        return loss, hidden.new_empty(0), weight.new_empty(0)
    return loss, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])


def _scale(ctx, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    d_hidden, d_weight = ctx.saved_tensors
    return (d_hidden.float() * slope).to(d_hidden.dtype), d_weight * slope, None, None, None, None


_linear_cross_entropy.register_autograd(_scale, setup_context=_save)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, vocab: int, ignore: int) -> Tensor:
    """The cross-entropy of hidden [N, d] times weight [R, d] transposed, of which V columns count, summed over the
    labels [N] that are not `ignore`."""
    gradient = torch.is_grad_enabled() and hidden.requires_grad
    return _linear_cross_entropy(hidden.contiguous(), weight, labels, vocab, ignore, gradient)[0]
