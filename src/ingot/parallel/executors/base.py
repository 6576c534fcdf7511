"""What the training loop needs from a model, whether one process or many hold it.

The trainer, the microbatch search, evaluation and checkpoints talk to an `Executor` and to nothing below it: no mesh,
no pipeline, no DTensor. `SingleProcess` and `Distributed` implement it. A loss is always this rank's share of the mean
(or summed) loss; `sum_loss` returns the whole.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.data.loading.token_dataset import IGNORE
from ingot.model.branch_attention import TokenRows
from ingot.model.dropout import sequence_keys
from ingot.model.gpt import GPT
from ingot.model.shapes import is_matrix
from ingot.parallel.coordinator import Coordinator
from ingot.parallel.dtensor import local
from ingot.parallel.layout import Layout
from ingot.parallel.rank_env import RankEnv

RECOMPUTE_KINDS: tuple[str | None, ...] = (None, "selective", "full")  # of activation checkpointing, the cheapest first


@dataclass(frozen=True)
class NamedParameter:
    """A parameter that this rank holds, whole or a shard of it."""

    name: str
    """In the whole model, for example blocks.0.attn.qkv.weight."""
    tensor: Tensor
    is_tied_copy: bool = False
    """Whether this is the second copy of a tied embedding: stepped, but neither saved nor counted in the norm."""


@dataclass(frozen=True)
class MemoryUse:
    """Device memory of a step in bytes, on the rank that needs the most."""

    kept: int
    """Between steps: weights, gradients and optimizer state, whatever the microbatch."""
    peak: int


class Messages(Protocol):
    """Where an executor reports its decisions: the listener of a run."""

    def note(self, text: str) -> None:
        """A decision, in a sentence."""

    def warn(self, text: str) -> None:
        """A problem that does not stop the run."""


class NoMessages:
    """Where there is no run to listen to."""

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


class Executor(Protocol):
    """This rank's part of the model, and every operation that involves other ranks.

    Unless a method says otherwise, all ranks must call it, in the same order.
    """

    device: torch.device
    layout: Layout
    rank_env: RankEnv
    coordinator: Coordinator
    """For short messages between ranks. Each thread needs its own, from `coordinator.for_topic`."""
    parameters: list[NamedParameter]
    parameter_shapes: dict[str, tuple[int, ...]]
    """Of all parameters of the whole model, in the model's order."""
    microbatch: int
    """Sequences per forward pass. Set by the microbatch search; an out-of-memory retry may halve it."""
    recompute: str | None
    """What blocks recompute in the backward pass: full, selective or nothing."""
    recompute_kinds: tuple[str | None, ...]
    """The kinds of activation checkpointing that work here, the cheapest first."""
    min_microbatches: int
    """Microbatches per step that keep every stage of a pipeline busy; 1 without a pipeline."""
    can_recover_from_oom: bool
    """Whether a failed allocation leaves the run intact. False where other ranks would wait inside a collective."""
    hold_choices: dict[bool, str]
    """What `hold_weights` may be called with, and what each does."""
    whole_model: GPT | None
    """The model, where one process holds all of it as plain tensors."""
    enough_tokens: int
    """Tokens per microbatch beyond which a GPU gains little speed, if weights are not held."""

    # --- one step

    @property
    def data_rank(self) -> int:
        """Which of `layout.data` parts of each batch this rank works on."""

    def batch_part(self, batch_size: int) -> tuple[int, int]:
        """The first row of this rank's part of a global batch, and the row after its last. Local."""

    def begin_step(self, step: int) -> None:
        """Name the step (the number of finished batches) that the next `accumulate` belongs to. Local."""

    def accumulate(self, batch: Batch, loss_scale: Tensor | None = None) -> Tensor:
        """Add the gradients of the global batch's mean loss, of which `batch` is this rank's part. Return this rank's
        share of the loss, on the device. With `loss_scale` the gradients are that many times as large."""

    def clip_gradients(self, limit: float | None, loss_scale: Tensor | None = None) -> Tensor:
        """Divide the gradients by `loss_scale` and scale them to a global norm of at most `limit`. Return the norm
        between the two, on the device, the same on all ranks."""

    def weights_changed(self) -> None:
        """Refresh everything derived from the weights. Call it after each update, each load, and each time that
        gradients are dropped. Local."""

    # --- evaluation

    def evaluating(self) -> AbstractContextManager[None]:
        """Without gradients and dropout. Local."""

    def loss_sum(self, tokens: np.ndarray, labels: np.ndarray) -> Tensor:
        """This rank's share of the summed loss of its own [B, T] tokens, within `evaluating`."""

    def token_scores(self, rows: TokenRows) -> Tensor:
        """This rank's share of what the model makes of the scored tokens of its own rows, within `evaluating`: [P, 3],
        see `CrossEntropy.token_scores`. Ranks with the same part of a batch pass the same rows; others may pass any."""

    # --- reductions: the result is the same on all ranks

    def sum_loss(self, share: Tensor) -> Tensor:
        """The sum of all ranks' shares of a loss."""

    def sum_data(self, value: Tensor) -> Tensor:
        """The sum of a value over the parts of a batch, each counted once however many ranks share it."""

    def all_gather(self, values: list[float]) -> list[list[float]]:
        """The values of every rank, in rank order."""

    def from_rank_0(self, value: bool) -> bool:
        """What rank 0 says."""

    def any_rank(self, flag: int) -> int:
        """The largest flag of all ranks. Returns at once: across ranks the answer is the one of the previous call."""

    def check_same(self, what: str, values: dict[str, str]) -> None:
        """Raise an error on every rank unless all pass the same values; it says which rank differs, or is missing."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    # --- weights

    def full_tensors(
        self, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, one at a time, on rank 0; the other ranks take part and receive nothing. `tensors` holds this
        rank's shards by `PARAMETER` or `KEY/PARAMETER`, `shapes` the names and shapes on all ranks."""

    def differing_replicas(self) -> tuple[list[int], str] | None:
        """Ranks whose weights differ from their replicas, and the first such parameter; None if all agree."""

    # --- memory and time

    def set_recompute(self, kind: str | None) -> None:
        """Choose what blocks recompute in the backward pass. Local."""

    def hold_weights(self, hold: bool) -> None:
        """Choose whether the weights in the type of the matrix products stay in memory for a whole step: copies on one
        process, gathered shards on several. Local."""

    def memory_limit(self) -> int | None:
        """Bytes of device memory that the tightest rank may use; None on a CPU, where it is not measured."""

    def probe_memory(self, microbatch: int) -> MemoryUse | None:
        """Run a step's passes and allocations once with a microbatch size and measure them. None if they do not fit;
        where `can_recover_from_oom` is False, that is an error instead."""

    def start_comm_timer(self) -> None:
        """Start measuring how long this rank waits for others. Local."""

    def stop_comm_timer(self) -> None:
        """Stop measuring. Local."""

    def comm_seconds(self) -> float | None:
        """Seconds of waiting since `start_comm_timer`; None if there is nobody to wait for. Local."""

    def close(self) -> None:
        """Leave the other ranks after the last collective of a run that ended well."""


# --- what both implementations share


def run_microbatches(
    forward_backward: Callable[[Tensor, Tensor, Tensor | None, bool], Tensor],
    batch: Batch,
    size: int,
    device: torch.device,
    sequence_keys: Tensor | None,
) -> Tensor:
    """The sum of what `forward_backward` returns over the microbatches of a batch, each given by its tokens, its
    labels, its sequences' dropout keys and whether it is the last."""
    total = torch.zeros((), device=device)
    for start in range(0, len(batch.tokens), size):
        rows, last = slice(start, start + size), start + size >= len(batch.tokens)
        keys = sequence_keys[rows] if sequence_keys is not None else None
        tokens, labels = to_device(batch.tokens[rows], device), to_device(batch.labels[rows], device)
        total += forward_backward(tokens, labels, keys, last)
    return total


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def count_labels(batch: Batch, device: torch.device) -> Tensor:
    """How many labels of a batch count in the loss. On the device, because a CUDA graph cannot divide by a number of
    the host, and torch rounds the two divisions differently."""
    return torch.full((), int(np.count_nonzero(batch.labels != IGNORE)), dtype=torch.float32, device=device)


def pad_batch(batch: Batch, rows: int) -> Batch:
    """A batch with rows added that carry no loss."""
    missing = ((0, rows - len(batch.tokens)), (0, 0))
    labels = np.pad(batch.labels, missing, constant_values=IGNORE)
    return Batch(np.pad(batch.tokens, missing), labels, batch.samples)


def squared_norm(gradients: list[Tensor], shares: Tensor | float = 1.0) -> Tensor:
    """The squared norm of this rank's gradients, each weighted by the share of it that this rank counts."""
    return (torch.stack(torch._foreach_norm(list(gradients), 2.0)).double() ** 2 * shares).sum()


def scale_gradients(gradients: list[Tensor], norm: Tensor, limit: float | None, loss_scale: Tensor | None) -> Tensor:
    """Divide gradients of a given global norm by `loss_scale` and scale them to a norm of at most `limit`, in one
    pass. Return the norm between the two."""
    factor = None
    if loss_scale is not None:
        norm, factor = norm / loss_scale, 1 / loss_scale
    if limit is not None:
        clip = (limit / (norm + 1e-6)).clamp(max=1.0)
        factor = clip if factor is None else clip * factor
    if factor is not None:
        torch._foreach_mul_(list(gradients), factor)
    return norm


def recompute_kinds(config: RunConfig, layout: Layout) -> tuple[str | None, ...]:
    """The kinds of activation checkpointing that work with a layout, the cheapest first."""
    if layout.pipeline > 1 and config.parallel.pipeline_schedule == "zero_bubble":
        return (None, "full")  # torch cannot split a selectively recomputed backward pass
    return RECOMPUTE_KINDS


def dropout_keys(executor: Executor, config: RunConfig, step: int, rows: int) -> Tensor | None:
    """What determines the dropout of this rank's rows of a step's batch, [rows]; None without dropout."""
    if max(config.model.emb_pdrop, config.model.resid_pdrop, config.model.attn_pdrop) == 0:
        return None
    first, _ = executor.batch_part(config.global_train_batch_size)
    return sequence_keys(config.seed, step, first, rows, executor.device)


def measure_memory(
    executor: Executor, config: RunConfig, microbatch: int, run_pass: Callable[[np.ndarray, bool], None]
) -> MemoryUse:
    """The memory of real passes over `microbatch` sequences, all of whose tokens count in the loss, next to what the
    optimizer will keep. `run_pass` gets the tokens and whether they are the last of a step. Not compiled: that takes
    longer than the passes, and compiled passes need less memory."""
    device, name = executor.device, config.optimizer.name
    torch.cuda.reset_peak_memory_stats(device)
    moments = []  # of the optimizer, which allocates them in the first step
    for parameter in executor.parameters:
        one = name == "lion" or (name == "muon" and is_matrix(parameter.name, parameter.tensor))
        moments += [torch.empty_like(local(parameter.tensor)) for _ in range(1 if one else 2)]
    with torch.compiler.set_stance("force_eager"):
        for last in (True, False):  # the second time with gradients in place
            run_pass(np.zeros((microbatch, config.max_seq_len), dtype=np.int64), last)
        kept = torch.cuda.memory_allocated(device)
        if config.sources.eval_sources:  # may take more sequences, and logits that training never holds whole
            tokens = np.zeros((config.device_eval_batch_size or microbatch, config.max_seq_len), dtype=np.int64)
            with executor.evaluating():
                executor.loss_sum(tokens, tokens)
    torch.cuda.synchronize(device)
    return MemoryUse(kept, torch.cuda.max_memory_allocated(device))
