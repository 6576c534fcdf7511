"""Activation checkpointing: recompute a block in the backward pass instead of keeping its intermediate results.

`full` keeps only the block's input. `selective` also keeps the results of matrix products and attention, which are
expensive to compute, and recomputes the rest (norms, activations, rotations): most of the memory, little of the work.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ATEN = torch.ops.aten
EXPENSIVE_OPS = {
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._efficient_attention_forward.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What `selective` keeps. A kernel that does the work of one of these adds itself."""


def run_checkpointed(block: Callable[..., Tensor], kind: str, *inputs: Any) -> Tensor:
    """Run the pass of a block so that its backward pass recomputes it; `kind` is full or selective."""
    if kind == "full" and not torch.compiler.is_compiling():
        return checkpoint(block, *inputs, use_reentrant=False)
    # compiled, a checkpoint without a policy keeps what functions with a gradient of their own compute
    contexts = partial(create_selective_checkpoint_contexts, _POLICIES[kind])
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)


def _recompute_all(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _keep_expensive(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE


_POLICIES = {"full": _recompute_all, "selective": _keep_expensive}
