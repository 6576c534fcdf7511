"""Data parallelism by FSDP2: each block's weights are gathered for its pass and its gradients reduced after it.

Plain data parallelism is the same with shards of size one, so there is one mechanism, and one place where gradients are
summed (not averaged: each loss is already divided by the tokens of the whole global batch).
"""

from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ingot.model.precision import COMPUTE_DTYPES
from ingot.parallel.build import LossModel
from ingot.parallel.mesh import ParallelMesh


def shard_weights(root: LossModel, mesh: ParallelMesh, precision: str, reshard_after_forward: bool) -> None:
    """Shard every block on its own, and what is left (embeddings, last norm, head) with the root.

    Blocks gather their weights in the run's precision; embeddings in fp32, so that the residual stream starts in fp32
    as it does on one process. Gradients are reduced in fp32.
    """
    blocks = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPES.get(precision), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    rest = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in root.gpt.blocks.values():
        fully_shard(block, mesh=mesh.fsdp, mp_policy=blocks, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh.fsdp, mp_policy=rest, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reduce_gradients(roots: Sequence[LossModel], last: bool) -> None:
    """Sum gradients over replicas after the last microbatch of a batch only."""
    for root in roots:
        assert isinstance(root, FSDPModule)
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)
