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

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ingot.model.kernels.bf16_weights import GatheredWeight
from ingot.model.kernels.fp8.linear import Fp8Linear
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
    parameters = chain.from_iterable(map(_own_parameters, sharded_modules([root])))
    accumulators = {parameter.sharded_param: parameter for parameter in parameters}
    for layer in root.modules():
        if isinstance(working := getattr(layer, "working", None), GatheredWeight) and working.layer is layer:
            working.accumulator = accumulators[layer.weight]
    for block in root.gpt.blocks.values():
        if layers := [layer for layer in block.modules() if isinstance(layer, Fp8Linear)]:
            block.register_forward_pre_hook(partial(_quantize_weights, layers))


def sharded_modules(roots: Sequence[LossModel]) -> list[FSDPModule]:
    return [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]


class GradientAccumulation:
    """How the gradients of a step's microbatches are added up, see above.

    While weights stay gathered and sums stay in their buffers, FSDP2 has nothing to do around a pass, but its hooks
    still take the host's time for every block. So the microbatches between the first and the last of a step,
    if they add to buffers, run without them: they are the program of one process.

    `gather` before a step and `reduce` after it do the same for every microbatch. Communication then overlaps with
    nothing, but the pass can be captured as a CUDA graph, for which `stay_in_place` keeps all addresses.
    """

    def __init__(self, roots: Sequence[LossModel]):
        self._roots = roots
        self._modules = sharded_modules(roots)
        modules: list[Any] = self._modules
        self._hooks = [(module, module._forward_pre_hooks, module._forward_hooks) for module in modules]
        self._hooked = True
        self._flags: tuple[bool, bool] | None = None
        self._parameters: list[Any] = []  # with a buffer, of this step
        self._buffers: list[
            tuple[Tensor, Tensor]
        ] = []  # gathered weights and where to add their gradients, without hooks
        self._is_first = True
        self._kept: dict[FSDPModule, Tensor] | None = None  # buffers that are used again
        self.holds_weights = False

    def hold_weights(self, hold: bool) -> None:
        self.holds_weights = hold
        self.stop()
        for module in self._modules:
            module.set_reshard_after_forward(not hold and module not in self._roots, recurse=False)

    def start(self) -> None:
        """Put zeros where kernels and FSDP2 add the gradients of a step: a buffer for each block, freed when
        reduced."""
        self._is_first = True
        self._parameters = []
        for module in self._modules:
            parameters = _own_parameters(module)
            if not parameters:
                continue
            sizes = [-(-p.sharded_param.numel() // ALIGNMENT) * ALIGNMENT for p in parameters]
            buffer = self._zeros(module, sum(sizes), parameters[0].device)
            for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
                shape = parameter.sharded_param.shape
                # .data has its own version counter: autograd must not take an addition to one for a change of all
                parameter.unsharded_accumulated_grad = part[: shape.numel()].data.view(shape)
            self._parameters += parameters

    def _zeros(self, module: FSDPModule, size: int, device: torch.device) -> Tensor:
        if self._kept is None:
            return torch.zeros(size, device=device)
        if module not in self._kept:
            self._kept[module] = torch.empty(size, device=device)
        return self._kept[module].zero_()

    def stay_in_place(self, stay: bool) -> None:
        """Choose whether gathered weights and sums are at the same addresses in every step, and never freed."""
        self.stop()
        self._kept = {} if stay else None
        for parameter in chain.from_iterable(map(_own_parameters, self._modules)):
            if stay:
                parameter.free_unsharded_param = _keep
            else:
                vars(parameter).pop("free_unsharded_param", None)
        if not stay:
            for module in self._modules:
                module.unshard()  # only then can they be freed
                module.reshard()

    def gather(self) -> None:
        """Begin a step whose microbatches all run without hooks."""
        self.start()
        self.before_microbatch(last=True)
        self._attach_hooks(False)
        for module in self._modules:
            module.unshard()
        self._buffers = [(p.unsharded_param, p.unsharded_accumulated_grad) for p in self._parameters]

    def reduce(self) -> None:
        """End it: sum its gradients over all ranks, as FSDP2 does after a backward pass."""
        self._attach_hooks(True)
        self._buffers = []
        for root in self._roots:
            state: Any = root
            state._get_fsdp_state()._root_post_backward_final_callback()

    def stop(self) -> None:
        """Drop gradients that have not been reduced."""
        self._attach_hooks(True)
        for module in self._modules:
            for parameter in _own_parameters(module):
                parameter.unsharded_accumulated_grad = None
        self._parameters, self._buffers = [], []

    def before_microbatch(self, last: bool) -> None:
        """Reduce gradients over shards after each microbatch, or if weights are held after the last of a step; over
        replicas after the last only."""
        if last or self._is_first or not self._parameters:
            self._attach_hooks(True)
            self._buffers = []  # FSDP2 frees them while the last backward pass goes on
        else:
            self._attach_hooks(False)
            if not self._buffers:
                self._buffers = [(p.unsharded_param, p.unsharded_accumulated_grad) for p in self._parameters]
        self._is_first = False
        flags = last, last or not self.holds_weights
        if flags != self._flags:  # each call walks through the model
            for root in self._roots:
                assert isinstance(root, FSDPModule)
                root.set_requires_all_reduce(last)
                root.set_is_last_backward(last)
                root.set_requires_gradient_sync(flags[1])
                root.set_reshard_after_backward(flags[1])
            self._flags = flags

    def after_microbatch(self) -> None:
        """Add up the gradients that kernels have left to autograd, as FSDP2 does where its hooks are."""
        gradients = [(weight.grad, buffer) for weight, buffer in self._buffers if weight.grad is not None]
        if gradients:
            torch._foreach_add_([buffer for _, buffer in gradients], [gradient for gradient, _ in gradients])
            for weight, _ in self._buffers:
                weight.grad = None

    def _attach_hooks(self, attach: bool) -> None:
        if attach != self._hooked:
            for module, before, after in self._hooks:
                module._forward_pre_hooks = before if attach else OrderedDict()
                module._forward_hooks = after if attach else OrderedDict()
            self._hooked = attach


@torch.compiler.disable
def _quantize_weights(layers: list[Fp8Linear], *_: Any) -> None:
    """Quantize a block's weights when they have been gathered, and free what they were made from."""
    for layer in layers:
        if layer.quantize_weight():
            assert isinstance(layer.working, GatheredWeight)
            layer.working.accumulator.free_unsharded_param()


def _keep() -> None:
    """Replaces `free_unsharded_param`: gathered weights stay allocated."""


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


def _own_parameters(module: FSDPModule) -> list[Any]:
    """FSDP2's records of the parameters that a module gathers."""
    group = module._get_fsdp_state()._fsdp_param_group
    return group.fsdp_params if group is not None else []
