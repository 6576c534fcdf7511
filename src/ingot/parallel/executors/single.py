"""One process holds the whole model. What collectives rule out is here: repeating a batch in smaller microbatches when
memory runs out, and deciding on a CUDA graph by a measurement of this process alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.model.branch_attention import BranchAttention, TokenRows, attending_by
from ingot.model.gpt import GPT
from ingot.model.kernels import hold_copies, refresh
from ingot.model.precision import autocast
from ingot.model.shapes import parameter_shapes
from ingot.parallel.coordinator import Coordinator, LocalCoordinator
from ingot.parallel.executors.base import (
    RECOMPUTE_KINDS,
    MemoryUse,
    Messages,
    NamedParameter,
    NoMessages,
    count_labels,
    dropout_keys,
    measure_memory,
    run_microbatches,
    scale_gradients,
    squared_norm,
    to_device,
)
from ingot.parallel.executors.cuda_graph import GraphChoice, MicrobatchGraph
from ingot.parallel.executors.device import peak_flops, usable_memory
from ingot.parallel.executors.oom import is_out_of_memory, retry_without_cache
from ingot.parallel.layout import Layout
from ingot.parallel.loss_model import LossModel, compile_model, uncompiled
from ingot.parallel.rank_env import RankEnv


class SingleProcess:
    """Implements `Executor` for one process."""

    layout, rank_env, data_rank = Layout(), RankEnv(), 0
    coordinator: Coordinator = LocalCoordinator()
    recompute_kinds, min_microbatches = RECOMPUTE_KINDS, 1
    can_recover_from_oom = True
    enough_tokens = 4096

    def __init__(
        self,
        model: LossModel,
        config: RunConfig,
        device: torch.device,
        compiled: bool = False,
        messages: Messages = NoMessages(),
    ):
        self.model, self.config, self.device, self.messages = model, config, device, messages
        self.whole_model: GPT | None = model.gpt
        self._compile_pending = compiled  # until the first step: how depends on what is recomputed
        self.parameters = [NamedParameter(name, p) for name, p in model.gpt.named_parameters()]
        self.parameter_shapes = parameter_shapes(config.model)
        self.microbatch = 1
        self.hold_choices = {True: "bf16 copies of the weights", False: "weights cast for each use"}
        if config.precision != "bf16":
            del self.hold_choices[False]
        self.recompute: str | None = None
        self.graph: MicrobatchGraph | None = None
        self._graph_decided = device.type != "cuda" or config.cuda_graphs is False
        self._step, self._steps_done = 0, 0

    # --- one step

    def batch_part(self, batch_size: int) -> tuple[int, int]:
        return 0, batch_size

    def begin_step(self, step: int) -> None:
        self._step = step

    def accumulate(self, batch: Batch, loss_scale: Tensor | None = None) -> Tensor:
        divisor = count_labels(batch, self.device).clamp(min=1.0)
        if loss_scale is not None:
            divisor = divisor / loss_scale
        if self._steps_done == 1 and not self._graph_decided:  # the first step compiles
            self._choose_graph(batch, divisor)
        while True:
            try:
                loss = self._run(batch, divisor)
                break
            except (RuntimeError, MemoryError) as error:  # torch's out-of-memory error is a RuntimeError
                if not is_out_of_memory(error) or self.microbatch == 1:
                    raise
            # outside the except block: the error's traceback holds the tensors of the failed attempt
            self._halve_microbatch()
        self._steps_done += 1
        return loss if loss_scale is None else loss / loss_scale

    def clip_gradients(self, limit: float | None, loss_scale: Tensor | None = None) -> Tensor:
        gradients = [p.tensor.grad for p in self.parameters if p.tensor.grad is not None]
        where = f"while clipping the gradients of batch {self._step + 1}"
        norm = retry_without_cache(lambda: squared_norm(gradients).sqrt().float(), where, self.microbatch)
        return scale_gradients(gradients, norm, limit, loss_scale)

    def weights_changed(self) -> None:
        refresh(self.model)

    def _run(self, batch: Batch, divisor: Tensor) -> Tensor:
        def forward_backward(tokens: Tensor, labels: Tensor, keys: Tensor | None, last: bool) -> Tensor:
            if self.graph is not None and len(tokens) == self.microbatch:
                return self.graph.run(tokens, labels, divisor)
            return self.forward_backward(tokens, labels, divisor, keys)

        if self._compile_pending:
            compile_model(self.model)
            self._compile_pending = False
        if self.graph is not None:
            self.graph.begin()
        keys = dropout_keys(self, self.config, self._step, len(batch.tokens))
        return run_microbatches(forward_backward, batch, self.microbatch, self.device, keys)

    def forward_backward(self, tokens: Tensor, labels: Tensor, divisor: Tensor, keys: Tensor | None = None) -> Tensor:
        """Add the gradients of a microbatch's part of the loss. Return that part."""
        with autocast(self.config.precision, self.device):
            loss = self.model(tokens, labels, keys) / divisor
        loss.backward()
        return loss.detach()

    def _halve_microbatch(self) -> None:
        self.microbatch //= 2
        self.graph = None
        self._drop_gradients()
        self.messages.warn(
            f"out of memory at batch {self._step + 1}; trying it again with microbatches of {self.microbatch}"
        )

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.tensor.grad = None
        self.weights_changed()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _choose_graph(self, batch: Batch, divisor: Tensor) -> None:
        """Decide by measuring whether later steps replay a CUDA graph."""
        self._graph_decided = True
        tokens, labels = (to_device(x[: self.microbatch], self.device) for x in (batch.tokens, batch.labels))
        flops = self.config.model.flops_per_token(self.config.max_seq_len) * tokens.numel()
        least_seconds = flops / peak_flops(self.device, self.config.precision)[0]
        choice = GraphChoice(self.config, self.device, self.recompute, self.layout, least_seconds)
        tensors = [p.tensor for p in self.parameters]
        self.graph, reason = choice.measure(self.forward_backward, tensors, (tokens, labels, divisor))
        self._drop_gradients()
        self.messages.note(reason)

    # --- evaluation

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:  # a probe of the memory may fail in here, and what is in eval mode does not learn
            self.model.train()

    def loss_sum(self, tokens: np.ndarray, labels: np.ndarray) -> Tensor:
        with autocast(self.config.precision, self.device):
            return self.model(to_device(tokens, self.device), to_device(labels, self.device))

    def token_scores(self, rows: TokenRows) -> Tensor:
        gpt = self.model.gpt
        op = gpt.attention_op
        if rows.has_branches:
            op = BranchAttention(gpt.config)
            op.set_rows(rows.question, rows.branch, rows.position)
        with attending_by(gpt, op), uncompiled(gpt), autocast(self.config.precision, self.device):
            return self.model.token_scores(rows)

    # --- reductions over one process

    def sum_loss(self, share: Tensor) -> Tensor:
        return share

    def sum_data(self, value: Tensor) -> Tensor:
        return value

    def all_gather(self, values: list[float]) -> list[list[float]]:
        return [values]

    def from_rank_0(self, value: bool) -> bool:
        return value

    def any_rank(self, flag: int) -> int:
        return flag

    def check_same(self, what: str, values: dict[str, str]) -> None: ...

    def barrier(self) -> None: ...

    def close(self) -> None: ...

    # --- weights

    def full_tensors(
        self, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        yield from tensors.items()

    def differing_replicas(self) -> tuple[list[int], str] | None:
        return None

    # --- memory and time

    def set_recompute(self, kind: str | None) -> None:
        self.recompute = self.model.gpt.activation_checkpointing = kind

    def hold_weights(self, hold: bool) -> None:
        hold_copies(self.model, hold)

    def memory_limit(self) -> int | None:
        return usable_memory(self.device)

    def probe_memory(self, microbatch: int) -> MemoryUse | None:
        def run_pass(tokens: np.ndarray, last: bool) -> None:
            inputs = to_device(tokens, self.device)
            self.forward_backward(inputs, inputs, torch.ones((), device=self.device))

        try:
            return measure_memory(self, self.config, microbatch, run_pass)
        except torch.OutOfMemoryError:
            return None
        finally:
            self._drop_gradients()

    def start_comm_timer(self) -> None: ...

    def stop_comm_timer(self) -> None: ...

    def comm_seconds(self) -> float | None:
        return None
