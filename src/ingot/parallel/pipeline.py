"""Pipeline parallelism: ranges of layers on different ranks, run by torch's schedules.

A stage is a GPT with some of its layers. It returns hidden states, or at the last stage the loss, so that the head and
its loss run inside the FSDP2 module like all other layers. A tied embedding has two copies, on the first and the last
stage, whose gradients are added before each update, so both copies stay equal.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from ingot.config.model import ModelConfig
from ingot.model.branch_attention import TokenRows
from ingot.model.gpt import GPT
from ingot.model.precision import COMPUTE_DTYPES
from ingot.parallel.context import SequenceCut
from ingot.parallel.dtensor import local
from ingot.parallel.layout import STAGES_PER_RANK
from ingot.parallel.loss_model import LossModel
from ingot.parallel.mesh import ParallelMesh

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
}


def stages_of(schedule: str, stage_rank: int, ranks: int) -> list[int]:
    """The stages of a rank: one, or two (interleaved: s and s + ranks; zero bubble: s and its mirror image)."""
    if schedule == "zero_bubble":
        return [stage_rank, 2 * ranks - 1 - stage_rank]
    return [stage_rank + ranks * round_ for round_ in range(STAGES_PER_RANK[schedule])]


def stage_of_parameter(name: str, config: ModelConfig, stages: int) -> int:
    """The stage that owns a weight; a tied embedding belongs to the first."""
    if name.startswith("blocks."):
        layer = int(name.split(".")[1])
        return next(s for s in range(stages) if layer in layers_of(s, config, stages))
    return 0 if name.startswith(("wte.", "wpe.")) else stages - 1


def layers_of(stage: int, config: ModelConfig, stages: int) -> range:
    return range(config.n_layers * stage // stages, config.n_layers * (stage + 1) // stages)


class PipelineStage(LossModel):
    """A range of layers: tokens or hidden states in, hidden states or the loss [1] out."""

    def __init__(self, gpt: GPT, index: int, count: int, positions: Tensor, precision: str):
        super().__init__(gpt)
        self.first, self.last = index == 0, index == count - 1
        self.index, self.positions, self.precision = index, positions, precision

    def forward(self, x: Tensor, labels: Tensor, sequence_keys: Tensor | None = None) -> Tensor:
        keys = self.gpt.dropout_keys(sequence_keys, len(x), self.positions)
        dtype = COMPUTE_DTYPES.get(self.precision)
        with torch.autocast(x.device.type, dtype=dtype) if dtype is not None else nullcontext():
            if self.first:
                x = self.gpt.embed(x, self.positions, keys)
            x = self.gpt.transform(x, self.positions, keys=keys)
            return self.gpt.loss_fn(x, self.gpt.output_weight, labels).view(1) if self.last else x

    def stage_scores(self, x: Tensor, rows: TokenRows) -> Tensor:
        """Tokens or hidden states in, hidden states or the scores [P, 3] out."""
        dtype = COMPUTE_DTYPES.get(self.precision)
        with torch.autocast(x.device.type, dtype=dtype) if dtype is not None else nullcontext():
            x = self.gpt.embed(x, rows.position) if self.first else x
            x = self.gpt.transform(x, rows.position)
            return self.gpt.loss_fn.token_scores(x, self.gpt.output_weight, rows) if self.last else x  # type: ignore[operator]


class _TorchStage(pipelining.PipelineStage):
    """torch's stage. In 2.11 it sends a warm-up message to its neighbors, and to itself where a pipeline turns back on
    a process, which gloo cannot do."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


class Pipeline:
    """The stages of this rank and the schedules that run them."""

    def __init__(self, stages: list[PipelineStage], schedule: str, mesh: ParallelMesh, cut: SequenceCut | None):
        self.stages, self.schedule, self.mesh, self.cut = stages, schedule, mesh, cut
        self.count = mesh.layout.pipeline * STAGES_PER_RANK[schedule]
        self.has_first, self.has_last = any(s.first for s in stages), any(s.last for s in stages)
        self._schedules: dict[tuple[int, int], Any] = {}
        self._divisor: Tensor | None = None
        self._tied_group = self._make_tied_group()

    def microbatches(self, at_least: int) -> int:
        """The number of microbatches that the schedule can take: whole rounds, and enough to fill the pipeline."""
        ranks = self.mesh.layout.pipeline
        return max(-(-at_least // ranks) * ranks, self.count)

    def forget_shapes(self) -> None:
        """Drop the schedules of microbatch sizes that were only probed."""
        self._schedules.clear()

    def accumulate(
        self,
        tokens: Tensor,
        labels: Tensor,
        sequence_keys: Tensor | None,
        microbatches: int,
        divisor: Tensor,
    ) -> Tensor:
        """Add the gradients of a batch, whose losses are divided by `divisor`. Return this process's share of the loss,
        zero except at the last stage."""
        self._divisor = divisor
        tokens, labels = self._take(tokens), self._take(labels)
        losses: list[Tensor] = []
        inputs = (tokens,) if self.has_first else ()
        target = {"target": labels, "losses": losses} if self.has_last else {}
        given = {"labels": labels} | ({"sequence_keys": sequence_keys} if sequence_keys is not None else {})
        self._schedule(microbatches, len(tokens) // microbatches).step(*inputs, **target, **given)
        self._add_tied_gradients()
        total = torch.zeros((), device=self.mesh.device)
        return total + torch.stack([loss.detach() for loss in losses]).sum() if losses else total

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of a batch, zero except at the last stage.

        Stage by stage, since not all schedules can leave out the backward passes. Early stages start on the next batch
        while late stages work on this one.
        """
        tokens, labels = self._take(tokens), self._take(labels)
        found = self._walk(tokens, lambda stage, x: stage(x, labels))
        return torch.zeros((), device=self.mesh.device) if found is None else found.sum()

    def token_scores(self, rows: TokenRows) -> Tensor:
        """What the model makes of the scored tokens [P, 3], zero except at the last stage, and there for the tokens
        that are predicted on other processes."""
        own, here = rows, torch.ones_like(rows.targets, dtype=torch.bool)
        if self.cut is not None:
            own, here = rows.take(self.cut.of_length(rows.tokens.shape[1]).positions)
        found = self._walk(own.tokens, lambda stage, x: stage.stage_scores(x, own))
        scores = torch.zeros(len(here), 3, device=self.mesh.device)
        if found is not None:
            scores[here] = found
        return scores

    def _walk(self, tokens: Tensor, run: Callable[[PipelineStage, Tensor], Tensor]) -> Tensor | None:
        """Run the stages of this rank on [B, T] in turn. Return what the last stage of the pipeline makes, if it is
        here."""
        x, found = tokens, None
        for index in range(self.count):
            stage = next((s for s in self.stages if s.index == index), None)
            if stage is None:
                continue
            if not stage.first and (source := self._rank_of(index - 1)) != dist.get_rank():
                time = tokens.shape[1] // self.mesh.layout.tensor
                x = torch.empty(len(tokens), time, stage.gpt.config.d_model, device=self.mesh.device)
                dist.recv(x, source)
                x = x.to(stage.gpt.residual_dtype or x.dtype)  # as in training; gloo and its peers send fp32
            x = run(stage, x)
            if stage.last:
                found = x
            elif (target := self._rank_of(index + 1)) != dist.get_rank():
                dist.send(x.float().contiguous(), target)
        return found

    def stage_rank_of(self, index: int) -> int:
        """The pipeline rank that holds a stage."""
        ranks = range(self.mesh.layout.pipeline)
        return next(r for r in ranks if index in stages_of(self.schedule, r, len(ranks)))

    def _rank_of(self, index: int) -> int:
        """The global rank that holds a stage of this rank's own pipeline."""
        width = self.mesh.leader_of_stage(1)
        return self.mesh.leader_of_stage(self.stage_rank_of(index)) + dist.get_rank() % width

    def _take(self, tokens: Tensor) -> Tensor:
        return self.cut.take(tokens) if self.cut is not None else tokens

    def _schedule(self, microbatches: int, size: int) -> Any:
        key = (microbatches, size)  # torch learns the shapes between stages once for each
        if key not in self._schedules:
            group = self.mesh.pipeline.get_group()
            stages = [_TorchStage(s, s.index, self.count, self.mesh.device, group=group) for s in self.stages]
            self._schedules[key] = SCHEDULES[self.schedule](
                stages[0] if self.schedule == "1f1b" else stages, n_microbatches=microbatches, loss_fn=self._loss,
                scale_grads=False,
            )  # fmt: skip
        return self._schedules[key]

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        assert self._divisor is not None
        return output.sum() / self._divisor

    # --- tied embeddings

    @property
    def tied_copies(self) -> list[Tensor]:
        """This rank's copies of a tied embedding, the first stage's first."""
        ends = [s for s in self.stages if s.first or s.last]
        tied = ends and ends[0].gpt.config.tie_word_embeddings
        return [s.gpt.wte.weight for s in sorted(ends, key=lambda s: s.index)] if tied else []

    def _make_tied_group(self) -> dist.ProcessGroup | None:
        """The group of the two ranks that hold the embedding. All ranks must create all groups."""
        if self.schedule == "zero_bubble":
            return None  # one rank has both the first and the last stage
        width = self.mesh.leader_of_stage(1)
        last = self.mesh.leader_of_stage(self.mesh.layout.pipeline - 1)
        groups = [dist.new_group([column, last + column]) for column in range(width)]
        return groups[dist.get_rank() % width]

    def _add_tied_gradients(self) -> None:
        copies = self.tied_copies
        if not copies:
            return
        gradients = [local(p.grad) for p in copies if p.grad is not None]
        if len(gradients) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        else:
            dist.all_reduce(gradients[0], group=self._tied_group)
