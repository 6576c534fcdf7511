"""Many processes hold the model together, by any mix of data, tensor, context and pipeline parallelism.

One process may run this as well (`parallel.shard=1`): the same program on a world of one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.model.attention import AttentionOp
from ingot.model.branch_attention import BranchAttention, TokenRows, attending_by
from ingot.model.gpt import GPT
from ingot.model.init import init_weight
from ingot.model.kernels import refresh
from ingot.model.precision import autocast
from ingot.model.shapes import parameter_shapes
from ingot.parallel import fsdp
from ingot.parallel.context import GatheredBranchAttention, SequenceCut
from ingot.parallel.coordinator import Coordinator, LocalCoordinator, StoreCoordinator
from ingot.parallel.dtensor import fill, gather, local
from ingot.parallel.executors.base import (
    MemoryUse,
    Messages,
    NamedParameter,
    NoMessages,
    count_labels,
    dropout_keys,
    measure_memory,
    pad_batch,
    recompute_kinds,
    run_microbatches,
    scale_gradients,
    squared_norm,
    to_device,
)
from ingot.parallel.executors.comm_timer import CommTimer
from ingot.parallel.executors.cuda_graph import GraphChoice, MicrobatchGraph
from ingot.parallel.executors.device import usable_memory
from ingot.parallel.executors.oom import OutOfMemory
from ingot.parallel.loss_model import uncompiled
from ingot.parallel.parallelize import ParallelModel
from ingot.parallel.pipeline import stage_of_parameter
from ingot.parallel.rendezvous import World, leave_world


class Distributed:
    """Implements `Executor` for one of several ranks."""

    can_recover_from_oom = False
    whole_model: GPT | None = None
    enough_tokens = 8192  # more than on one process, if each microbatch gathers the weights again

    def __init__(self, model: ParallelModel, config: RunConfig, world: World, messages: Messages = NoMessages()):
        self.config, self.world, self.rank_env, self.messages = config, world, world.rank_env, messages
        self.mesh, self.roots, self.pipeline, self._stages = model.mesh, model.roots, model.pipeline, model.stages
        self.device, self.layout, self.data_rank = self.mesh.device, self.mesh.layout, self.mesh.data_rank
        self.coordinator: Coordinator = StoreCoordinator(world) if world.rank_env.world > 1 else LocalCoordinator()
        self.microbatch = 1
        self.min_microbatches = 2 * self.layout.pipeline if self.pipeline is not None else 1
        self.recompute_kinds = recompute_kinds(config, self.layout)
        self.recompute: str | None = None
        # a tied embedding exists twice in a pipeline; the first stage's copy counts
        copies = self.pipeline.tied_copies if self.pipeline is not None else []
        tied_copy = copies[-1] if self.pipeline is not None and self.pipeline.has_last and copies else None
        self._sharded_modules = fsdp.sharded_modules(self.roots)
        self._accumulation = fsdp.GradientAccumulation(self.roots)
        self.hold_choices = _hold_choices(config, self.pipeline is not None)
        named = [pair for root in self.roots for pair in root.gpt.named_parameters()]
        self.parameters = [NamedParameter(name, p, is_tied_copy=p is tied_copy) for name, p in named]
        self.parameter_shapes = parameter_shapes(config.model)
        # the share of a gradient's square that this rank counts, where several ranks hold the same shard
        shares = [0.0 if p.is_tied_copy else 1 / _holders(p.tensor) for p in self.parameters]
        self._shares = torch.tensor(shares, dtype=torch.float64, device=self.device)
        self._counts_loss = self.mesh.tensor_rank == 0 and (self.pipeline is None or self.pipeline.has_last)
        self._step, self._steps_done = 0, 0
        self.graph: MicrobatchGraph | None = None
        self._wants_graph = config.cuda_graphs is True
        self._comm_timer = CommTimer(self.device)
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._flag_reduction: dist.Work | None = None

    # --- one step

    def batch_part(self, batch_size: int) -> tuple[int, int]:
        return self.layout.part(self.data_rank, batch_size)

    def begin_step(self, step: int) -> None:
        self._step = step

    def accumulate(self, batch: Batch, loss_scale: Tensor | None = None) -> Tensor:
        divisor = self.sum_data(count_labels(batch, self.device)).clamp(min=1.0)
        if loss_scale is not None:
            divisor = divisor / loss_scale
        count = self._microbatch_count()
        batch = pad_batch(batch, count * self.microbatch)
        keys = dropout_keys(self, self.config, self._step, len(batch.tokens))
        if self.pipeline is not None:
            tokens, labels = to_device(batch.tokens, self.device), to_device(batch.labels, self.device)
            loss = self.pipeline.accumulate(tokens, labels, keys, count, divisor)
        else:
            if self._wants_graph and self._steps_done == 1:  # the first step compiles
                self._capture_graph(batch, divisor)
            graph = self.graph
            loss = self._launch(batch, divisor, keys) if graph is None else self._replay(graph, batch, divisor)
        self._steps_done += 1
        return loss if loss_scale is None else loss / loss_scale

    def clip_gradients(self, limit: float | None, loss_scale: Tensor | None = None) -> Tensor:
        gradients = [local(p.tensor.grad) for p in self.parameters if p.tensor.grad is not None]
        norm = self.mesh.sum(squared_norm(gradients, self._shares)).sqrt().float()
        return scale_gradients(gradients, norm, limit, loss_scale)

    def weights_changed(self) -> None:
        for module in self._sharded_modules:  # after an evaluation some weights are still gathered
            module.reshard()
        for root in self.roots:
            refresh(root)

    def _launch(self, batch: Batch, divisor: Tensor, keys: Tensor | None) -> Tensor:
        """A step whose passes overlap with the communication of FSDP2."""

        def forward_backward(tokens: Tensor, labels: Tensor, keys: Tensor | None, last: bool) -> Tensor:
            self._accumulation.before_microbatch(last)
            return self.forward_backward(tokens, labels, divisor, keys)

        self._start_accumulating()
        return run_microbatches(forward_backward, batch, self.microbatch, self.device, keys)

    def _replay(self, graph: MicrobatchGraph, batch: Batch, divisor: Tensor) -> Tensor:
        """A step whose passes are a CUDA graph, between one gathering and one reduction."""

        def forward_backward(tokens: Tensor, labels: Tensor, keys: Tensor | None, last: bool) -> Tensor:
            return graph.run(tokens, labels, divisor)

        self._accumulation.gather()
        loss = run_microbatches(forward_backward, batch, self.microbatch, self.device, None)
        self._accumulation.reduce()
        return loss

    def forward_backward(self, tokens: Tensor, labels: Tensor, divisor: Tensor, keys: Tensor | None = None) -> Tensor:
        """Add the gradients of a microbatch's part of the loss. Return that part."""
        with autocast(self.config.precision, self.device):
            loss = self.roots[0](tokens, labels, keys) / divisor
        loss.backward()
        self._accumulation.after_microbatch()
        return loss.detach()

    def _capture_graph(self, batch: Batch, divisor: Tensor) -> None:
        """Capture the pass of a microbatch, for later steps to replay."""
        self._wants_graph = False
        tokens, labels = (to_device(x[: self.microbatch], self.device) for x in (batch.tokens, batch.labels))
        choice = GraphChoice(self.config, self.device, self.recompute, self.layout, 0.0)
        self._accumulation.stay_in_place(True)
        self._accumulation.gather()
        self.graph, reason = choice.measure(self.forward_backward, [], (tokens, labels, divisor))
        self._drop_gradients()
        if self.graph is None:
            self._accumulation.stay_in_place(False)
        self.messages.note(reason)

    def _start_accumulating(self) -> None:
        if self.holds_weights and self.layout.tensor == 1:  # torch accumulates DTensors itself
            self._accumulation.start()

    def _microbatch_count(self) -> int:
        """Microbatches per step, the same on every rank: collectives must meet."""
        rows = -(-self.config.global_train_batch_size // self.layout.data)
        count = -(-rows // self.microbatch)
        return self.pipeline.microbatches(count) if self.pipeline is not None else count

    # --- evaluation

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        for root in self.roots:
            root.eval()
        try:
            with torch.no_grad():  # not inference_mode: weights that FSDP2 gathers there cannot be trained on later
                yield
        finally:
            for root in self.roots:
                root.train()

    def loss_sum(self, tokens: np.ndarray, labels: np.ndarray) -> Tensor:
        inputs, targets = to_device(tokens, self.device), to_device(labels, self.device)
        if self.pipeline is not None:
            return self.pipeline.evaluate(inputs, targets)
        with autocast(self.config.precision, self.device):
            return self.roots[0](inputs, targets)

    def token_scores(self, rows: TokenRows) -> Tensor:
        layout = self.layout
        rows = rows.padded(layout.tensor * (2 * layout.context if layout.context > 1 else 1))
        with ExitStack() as stack:
            for root in self.roots:
                if rows.has_branches:
                    stack.enter_context(attending_by(root.gpt, self._branch_attention(rows)))
                stack.enter_context(uncompiled(root.gpt))
            if self.pipeline is not None:
                return self.pipeline.token_scores(rows)
            with autocast(self.config.precision, self.device):
                return self.roots[0].token_scores(rows)

    def _branch_attention(self, rows: TokenRows) -> AttentionOp:
        """Attention of this rank's heads, and of its part of each row."""
        heads = self.config.model.n_heads // self.layout.tensor
        first = heads * self.mesh.tensor_rank
        op = BranchAttention(self.config.model, slice(first, first + heads))
        if self.mesh.context is None:
            op.set_rows(rows.question, rows.branch, rows.position)
            return op
        cut = SequenceCut(self.mesh, rows.tokens.shape[1])
        op.set_rows(rows.question, rows.branch, rows.position, cut.positions)
        return GatheredBranchAttention(op, cut)

    # --- reductions

    def sum_loss(self, share: Tensor) -> Tensor:
        return self.mesh.sum(share, self._counts_loss)

    def sum_data(self, value: Tensor) -> Tensor:
        return self.mesh.sum(value, self.mesh.is_first_of_data_rank)

    def all_gather(self, values: list[float]) -> list[list[float]]:
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        return [row.tolist() for row in found]

    def from_rank_0(self, value: bool) -> bool:
        return bool(self.all_gather([value])[0][0])

    def any_rank(self, flag: int) -> int:
        found = 0
        if self._flag_reduction is not None:
            self._flag_reduction.wait()
            found = int(self._flag)
        self._flag.fill_(flag)
        self._flag_reduction = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return found

    def check_same(self, what: str, values: dict[str, str]) -> None:
        self.world.agree(what, values)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        leave_world()

    # --- weights

    def init_weights(self, seed: int) -> None:
        """The same initial weights as on one process."""
        with torch.no_grad():
            for parameter in self.parameters:
                whole = torch.empty(parameter.tensor.shape, device=self.device)
                init_weight(whole, parameter.name, self.config.model, seed)
                fill(parameter.tensor, whole)

    def full_tensors(
        self, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        rank = dist.get_rank()
        for name, shape in shapes.items():
            stage = stage_of_parameter(name.rpartition("/")[2], self.config.model, self._stages)
            owner = self.pipeline.stage_rank_of(stage) if self.pipeline is not None else 0
            leader = self.mesh.leader_of_stage(owner)
            if owner == self.mesh.stage_rank:
                whole = gather(tensors[name]).cpu()
                if rank == leader != 0:
                    dist.send(whole.contiguous(), 0)
            elif rank == 0:
                whole = torch.empty(shape)
                dist.recv(whole, leader)
            if rank == 0:
                yield name, whole

    def differing_replicas(self) -> tuple[list[int], str] | None:
        names = list(self.parameter_shapes)
        number = {name: index for index, name in enumerate(names)}
        own = [local(p.tensor.detach()).contiguous().view(torch.int32) for p in self.parameters]
        sums = torch.stack([x.sum(dtype=torch.int64) for x in own])
        index = torch.tensor([number[p.name] for p in self.parameters], device=self.device)
        # of all parameters of the model: ranks of other pipeline stages hold others
        bits = torch.zeros(len(names), dtype=torch.int64, device=self.device).index_add_(0, index, sums)
        found = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
        dist.all_gather(found, bits)
        for ranks in self.mesh.replicas():
            counts = Counter(tuple(found[r].tolist()) for r in ranks)
            if len(counts) > 1:
                (usual, most), (other, second) = counts.most_common(2)
                name = next(name for name, a, b in zip(names, usual, other, strict=True) if a != b)
                return [r for r in ranks if most == second or tuple(found[r].tolist()) != usual], name
        return None

    # --- memory and time

    def set_recompute(self, kind: str | None) -> None:
        self.recompute = kind
        for root in self.roots:
            root.gpt.activation_checkpointing = kind

    @property
    def holds_weights(self) -> bool:
        return self._accumulation.holds_weights

    def hold_weights(self, hold: bool) -> None:
        if self.pipeline is None:
            self._accumulation.hold_weights(hold)

    def memory_limit(self) -> int | None:
        limit = usable_memory(self.device)
        return int(min(row[0] for row in self.all_gather([limit]))) if limit is not None else None

    def probe_memory(self, microbatch: int) -> MemoryUse | None:
        try:
            use = measure_memory(self, self.config, microbatch, self._probe_pass)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("before the first step", microbatch, str(error).partition("\n")[0]) from None
        if self.pipeline is not None:
            self.pipeline.forget_shapes()
        self._drop_gradients()
        torch.cuda.empty_cache()
        ranks = self.all_gather([use.kept, use.peak])
        return MemoryUse(*(int(max(column)) for column in zip(*ranks, strict=True)))

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.tensor.grad = None
        self._accumulation.stop()
        self.weights_changed()

    def _probe_pass(self, tokens: np.ndarray, last: bool) -> None:
        one = torch.ones((), device=self.device)
        if self.pipeline is not None:
            count = self.pipeline.microbatches(1)  # as many as are in flight at a time
            tokens = np.tile(tokens, (count, 1))
            inputs = to_device(tokens, self.device)
            self.pipeline.accumulate(inputs, inputs, None, count, one)
        else:
            inputs = to_device(tokens, self.device)
            if self.holds_weights:
                self._drop_gradients()
            self._start_accumulating()
            self._accumulation.before_microbatch(last)
            self.forward_backward(inputs, inputs, one)

    def start_comm_timer(self) -> None:
        self._comm_timer.start()

    def stop_comm_timer(self) -> None:
        self._comm_timer.stop()

    def comm_seconds(self) -> float | None:
        return self._comm_timer.seconds


def _hold_choices(config: RunConfig, in_pipeline: bool) -> dict[bool, str]:
    choices = {True: "weights gathered once per step", False: "weights gathered for each pass"}
    reshard = config.parallel.reshard_after_forward
    if in_pipeline:  # torch's schedules gather and reduce by themselves
        reshard = True
    elif config.precision == "fp8" or config.cuda_graphs is True:  # which keep weights between passes anyway
        reshard = False
    return choices if reshard == "auto" else {not reshard: choices[not reshard]}


def _holders(parameter: Tensor) -> int:
    """How many ranks hold the same values of a parameter's shard."""
    assert isinstance(parameter, DTensor)
    copies = 1
    for axis, placement in enumerate(parameter.placements):
        if not hasattr(placement, "dim"):
            copies *= parameter.device_mesh.size(axis)
    return copies
