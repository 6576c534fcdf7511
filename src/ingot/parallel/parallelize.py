"""One model on the processes of a run, by steps in one fixed order, each applied to what the last left:

pipeline (which layers) > tensor (which part of each matrix) > context (which part of a sequence) > kernels >
activation checkpointing > compile > FSDP2 (which shard of what is left) > memory.

Nothing is allocated before the last step: the model is cut on the meta device, so a process holds its own shards and,
for a moment each, one whole tensor when weights are set.
"""

from dataclasses import dataclass

import torch

from ingot.config.model import ModelConfig
from ingot.config.parallel import ParallelConfig
from ingot.model import kernels
from ingot.model.gpt import GPT
from ingot.parallel.context import ContextLossModel, GatheredAttention, SequenceCut
from ingot.parallel.fsdp import connect_kernels, shard_weights
from ingot.parallel.layout import STAGES_PER_RANK, Layout
from ingot.parallel.loss_model import BuildOptions, LossModel, compile_model
from ingot.parallel.mesh import ParallelMesh
from ingot.parallel.pipeline import Pipeline, PipelineStage, layers_of, stages_of
from ingot.parallel.tensor import shard_tensors


@dataclass(frozen=True)
class ParallelModel:
    """This rank's part of a model, its weights not set yet."""

    config: ModelConfig
    mesh: ParallelMesh
    roots: list[LossModel]
    """What this rank holds: the model, or its stages of a pipeline. FSDP2 wraps each."""
    stages: int
    """Of the whole pipeline; 1 without one."""
    pipeline: Pipeline | None
    notes: list[str]
    """What the user should know."""


def parallelize(config: ModelConfig, parallel: ParallelConfig, layout: Layout, options: BuildOptions) -> ParallelModel:
    """Build this rank's part of a model. All ranks must call it."""
    mesh = ParallelMesh(layout, options.device)
    cut = SequenceCut(mesh, options.seq_len) if layout.context > 1 else None
    stages = layout.pipeline * STAGES_PER_RANK[parallel.pipeline_schedule] if layout.pipeline > 1 else 1
    reshard = parallel.reshard_after_forward if parallel.reshard_after_forward != "auto" else stages == 1
    roots: list[LossModel] = []
    notes: list[str] = []
    for stage in stages_of(parallel.pipeline_schedule, mesh.stage_rank, layout.pipeline) if stages > 1 else [0]:
        gpt = _build_stage(config, stage, stages)
        if layout.tensor > 1:
            shard_tensors(gpt, mesh)
        if cut is not None:
            gpt.attention_op = GatheredAttention(gpt.attention_op, cut)
        notes = _attach_kernels(gpt, layout, options)
        gpt.activation_checkpointing = options.activation_checkpointing
        root = _as_root(gpt, stage, stages, cut, options)
        if options.compiled:
            compile_model(root)
        shard_weights(root, mesh, options.precision, reshard)
        if stages == 1:  # a pipeline runs the forward passes of several microbatches before their backward passes
            connect_kernels(root)
        with options.allocating:
            roots.append(root.to_empty(device=options.device))
    pipeline = None
    if stages > 1:
        parts = [root for root in roots if isinstance(root, PipelineStage)]
        pipeline = Pipeline(parts, parallel.pipeline_schedule, mesh, cut)
    return ParallelModel(config, mesh, roots, stages, pipeline, notes)


def _build_stage(config: ModelConfig, stage: int, stages: int) -> GPT:
    with torch.device("meta"):
        return GPT(config, layers_of(stage, config, stages), has_embedding=stage == 0, has_head=stage == stages - 1)


def _attach_kernels(gpt: GPT, layout: Layout, options: BuildOptions) -> list[str]:
    return kernels.attach(
        gpt, device=options.device, precision=options.precision, tensor_parallel=layout.tensor > 1,
        gathered_weights=True,
    )  # fmt: skip


def _as_root(gpt: GPT, stage: int, stages: int, cut: SequenceCut | None, options: BuildOptions) -> LossModel:
    """What FSDP2 wraps and an executor calls."""
    if stages > 1:
        positions = cut.positions if cut is not None else torch.arange(options.seq_len, device=options.device)
        return PipelineStage(gpt, stage, stages, positions, options.precision)
    return LossModel(gpt) if cut is None else ContextLossModel(gpt, cut)
