"""Data parallelism by FSDP2: weights are sharded, gathered for a pass, and their gradients reduced after it.

Plain data parallelism is the same with shards of size one, so there is one mechanism, and one place where gradients are
summed (not averaged: each loss is already divided by the tokens of the whole global batch).

Two ways to accumulate gradients over the microbatches of a step:

                      weights                              gradients                            bytes per parameter
    held              gathered once per step               summed in fp32 by the backward       6
                                                           matmuls, reduced once per step
    not held          gathered per block and pass          reduced per block and microbatch     those of a block

"Held" is FSDP2's own `set_requires_gradient_sync(False)`, but with fp32 buffers in place before the first microbatch,
to which kernels add (`GatheredWeight`). FSDP2 would keep the first microbatch's gradients in bf16 tensors, convert and
add the others: 26 bytes of memory traffic per weight and microbatch instead of 8.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ingot.model.kernels.bf16_weights import GatheredWeight
from ingot.model.kernels.fp8 import Fp8Linear
from ingot.model.precision import COMPUTE_DTYPES
from ingot.parallel.loss_model import LossModel
from ingot.parallel.mesh import ParallelMesh

ALIGNMENT = 64  # elements between the starts of gradient buffers, for the kernels that write them


def shard_weights(root: LossModel, mesh: ParallelMesh, precision: str, reshard_after_forward: bool) -> None:
    """Shard every block on its own, and what is left (embeddings, last norm, head) with the root.

    Weights are gathered in the run's precision, but for the embeddings under fp16, whose residual stream is in fp32.
    Gradients are reduced in fp32.
    """
    dtype = COMPUTE_DTYPES.get(precision)
    blocks, rest = (
        MixedPrecisionPolicy(param_dtype=d, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for d in (dtype, root.gpt.residual_dtype)
    )
    for block in root.gpt.blocks.values():
        fully_shard(block, mesh=mesh.fsdp, mp_policy=blocks, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh.fsdp, mp_policy=rest, reshard_after_forward=False)
    for name in ("token_scores", "stage_scores"):
        if hasattr(root, name):
            register_fsdp_forward_method(root, name)
    for module in sharded_modules([root]):
        if mesh.fsdp.size() == 1:
            module.set_custom_reduce_scatter(_NoReduction())
        else:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def connect_kernels(root: LossModel) -> None:
    """Let the layers of a sharded model add gradients to FSDP2's buffers, and quantize weights when it gathers them."""
    accumulators = {parameter.sharded_param: parameter for parameter in _fsdp_parameters([root])}
    for layer in root.modules():
        if isinstance(working := getattr(layer, "working", None), GatheredWeight) and working.layer is layer:
            working.accumulator = accumulators[layer.weight]
    for block in root.gpt.blocks.values():
        if any(isinstance(layer, Fp8Linear) for layer in block.modules()):
            block.register_forward_pre_hook(_quantize_weights)


def sharded_modules(roots: Sequence[LossModel]) -> list[FSDPModule]:
    return [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]


def hold_weights(roots: Sequence[LossModel], hold: bool) -> None:
    """Choose how gradients are accumulated, see above."""
    for module in sharded_modules(roots):
        module.set_reshard_after_forward(not hold and module not in roots, recurse=False)


def start_accumulating(roots: Sequence[LossModel]) -> None:
    """Put zeros where kernels and FSDP2 add the gradients of a step: a buffer for each block, freed when reduced."""
    for module in sharded_modules(roots):
        parameters = _own_parameters(module)
        if not parameters:
            continue
        sizes = [-(-p.sharded_param.numel() // ALIGNMENT) * ALIGNMENT for p in parameters]
        buffer = torch.zeros(sum(sizes), device=parameters[0].device)
        for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
            shape = parameter.sharded_param.shape
            # .data has its own version counter: autograd must not take an addition to one for a change of all
            parameter.unsharded_accumulated_grad = part[: shape.numel()].data.view(shape)


def stop_accumulating(roots: Sequence[LossModel]) -> None:
    """Drop gradients that have not been reduced."""
    for parameter in _fsdp_parameters(roots):
        parameter.unsharded_accumulated_grad = None


def before_microbatch(roots: Sequence[LossModel], last: bool, held: bool) -> None:
    """Reduce gradients over shards after each microbatch, or if weights are held after the last of a step; over
    replicas after the last only."""
    for root in roots:
        assert isinstance(root, FSDPModule)
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last or not held)
        root.set_reshard_after_backward(last or not held)


@torch.compiler.disable
def _quantize_weights(block: nn.Module, arguments: Any) -> None:
    """Quantize a block's weights when they have been gathered, and free what they were made from."""
    for layer in block.modules():
        if isinstance(layer, Fp8Linear) and layer.quantize_weight():
            assert layer.working is not None
            layer.working.accumulator.free_unsharded_param()


class _NoReduction(ReduceScatter):
    """What a single rank reduces is already the result: FSDP2 gets the same tensor as input and output."""

    def __init__(self) -> None:
        self.input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.input is None:
            self.input = torch.empty(*size, dtype=dtype, device=device)
            return self.input
        output, self.input = self.input, None
        return output

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        raise AssertionError("a single rank reduces nothing")


def _fsdp_parameters(roots: Sequence[LossModel]) -> Iterator[Any]:
    return chain.from_iterable(map(_own_parameters, sharded_modules(roots)))


def _own_parameters(module: FSDPModule) -> list[Any]:
    """FSDP2's records of the parameters that a module gathers."""
    group = module._get_fsdp_state()._fsdp_param_group
    return group.fsdp_params if group is not None else []
