"""Recomputing a block in the backward pass instead of keeping what its forward pass made.

`full` keeps only the block's input. `selective` keeps what is dear to compute, the results of matrix products and
attention, and recomputes the rest (norms, activations, rotations), which is most of the memory and little of the work.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ATEN = torch.ops.aten
DEAR = {
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


def recompute(block: nn.Module, kind: str, *inputs: Any) -> Tensor:
    """Run a block so that its backward pass recomputes it; `kind` is full or selective."""
    if kind == "full":  # without context_fn, not even one that does nothing: the compiler refuses that
        return checkpoint(block, *inputs, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)


def _policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    dear = operation in DEAR or str(operation) == "ingot.alibi_attention.default"
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE
