"""One model, spread over the processes of a run. The steps are applied in one fixed order, each to what the last left:

pipeline (which layers) > tensor (which part of each matrix) > context (which part of a sequence) > recompute > compile
> FSDP2 (which shard of what is left) > memory > initial weights.

Nothing is allocated before its last step but one: the model is cut while it is on the meta device, so a process holds
its own shards and, for a moment each, one whole tensor.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ingot.config.model import ModelConfig
from ingot.config.parallel import ParallelConfig
from ingot.model.gpt import allocate
from ingot.parallel.context import SequenceCut, replace_attention
from ingot.parallel.fsdp import shard_data_parallel
from ingot.parallel.layout import STAGES_PER_RANK, Layout
from ingot.parallel.mesh import ParallelMesh
from ingot.parallel.pipeline import ModelStage, Pipeline, keep_stage, stages_of
from ingot.parallel.tensor import own_heads, shard_tensors


@dataclass(frozen=True)
class ParallelModel:
    """This rank's part of a model."""

    config: ModelConfig
    mesh: ParallelMesh
    roots: list[nn.Module]
    """One module, or with pipeline parallelism this rank's stages."""
    pipeline: Pipeline | None
    stages: int
    """Pipeline stages on all ranks."""


def spread_model(
    config: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    device: torch.device,
    *,
    seq_len: int,
    precision: str,
    kernel: str,
    recompute: str | None,
    compiled: bool,
    allocating: AbstractContextManager | None = None,
) -> ParallelModel:
    """Build a model spread over all processes, with its memory allocated (under `allocating`) and its weights not yet
    set."""
    mesh = ParallelMesh(layout, device)
    cut = SequenceCut(mesh, seq_len) if layout.context > 1 else None
    positions = cut.positions if cut is not None else torch.arange(seq_len, device=device)
    count = layout.pipeline * STAGES_PER_RANK[parallel.pipeline_schedule] if layout.pipeline > 1 else 1
    indices = stages_of(parallel.pipeline_schedule, mesh.stage_rank, layout.pipeline) if count > 1 else [0]
    reshard = parallel.reshard_after_forward if parallel.reshard_after_forward != "auto" else count == 1
    roots: list[nn.Module] = []
    for index in indices:
        gpt = allocate(config, "meta")
        gpt.recompute = recompute
        keep_stage(gpt, index, count)
        if layout.tensor > 1:
            shard_tensors(gpt, mesh)
        if layout.tensor > 1 or cut is not None:
            replace_attention(gpt, mesh, cut, kernel, seq_len, own_heads(gpt, mesh))
        else:
            gpt.use_kernel(kernel, seq_len, device)
        if compiled:
            for block in gpt.blocks.children():
                block.compile(dynamic=False)
            # between the gathered blocks only this is worth it: logits and their gradient in one pass each
            gpt.loss = torch.compile(gpt.loss, dynamic=False)  # type: ignore[method-assign]
        root: nn.Module = ModelStage(gpt, index, count, positions, precision) if count > 1 else gpt
        shard_data_parallel(root, gpt, mesh, precision, reshard)
        if count == 1 and cut is not None:
            root.register_forward_pre_hook(_cut_inputs(cut), with_kwargs=True)
        with allocating or nullcontext():
            roots.append(root.to_empty(device=device))
    pipeline = None
    if count > 1:
        stages = [root for root in roots if isinstance(root, ModelStage)]
        pipeline = Pipeline(stages, parallel.pipeline_schedule, mesh, cut)
    return ParallelModel(config, mesh, roots, pipeline, count)


def _cut_inputs(cut: SequenceCut) -> Callable[..., tuple[tuple, dict]]:
    """A hook that takes a process's part of the tokens and labels, and says where in the sequence it stands."""

    def hook(module: nn.Module, args: tuple[Tensor, Tensor], kwargs: dict) -> tuple[tuple, dict]:
        return tuple(cut.take(a) for a in args), kwargs | {"positions": cut.positions}

    return hook
