"""How many sequences go through the model at once, and what of them is recomputed in the backward pass to save memory.

Memory is measured before the first step. Activation checkpointing costs up to a quarter of the speed and a small
microbatch little, so the cheapest kind wins that leaves room for a few thousand tokens (7b on an H200 reaches 63% of
the peak with 4,096 tokens and nothing recomputed). Tens of thousands of tokens gain nothing more: 125m is 1.6% slower
with 131,072 than with 65,536. A size that does not fit later is recorded in the run folder, so that a run which any
launcher restarts continues from its last checkpoint with a smaller one.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ingot.config.run import RunConfig
from ingot.divisors import divisors
from ingot.errors import ConfigError
from ingot.parallel.executors.base import Executor, MemoryUse
from ingot.parallel.executors.oom import OutOfMemory, as_out_of_memory
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import StepShape, estimate_memory
from ingot.storage.atomic import write_whole
from ingot.training.runtime.run_files import MICROBATCH

CPU_TOKENS = 4096  # per microbatch: beyond this a CPU gains nothing and its caches lose
ENOUGH_TOKENS = 4096  # per microbatch that holds its weights: beyond this a GPU gains little
GPU_TOKENS = 65536  # and beyond this it gains nothing
TRIED = 1.04  # of the memory that a step may use: a pass alone cannot fail below that
ESTIMATE_MARGIN = 1.15  # on what the estimate says that two kinds differ by


class MemoryPlan(NamedTuple):
    """What is kept in memory for speed."""

    recompute: str | None
    """What blocks recompute in the backward pass: full, selective or nothing."""
    holds_weights: bool
    """See `Executor.hold_weights`."""

    def apply(self, executor: Executor) -> None:
        executor.set_recompute(self.recompute)
        executor.hold_weights(self.holds_weights)


def choose_microbatch(config: RunConfig, executor: Executor, folder: Path, fresh: bool = False) -> list[str]:
    """Set the executor's microbatch, what it recomputes, and whether it holds weights. Return the decisions with their
    reasons. The size divides the largest part of the global batch that a rank has. What an earlier run left in the
    folder does not count for a fresh one."""
    asked = config.device_train_microbatch_size
    too_large = None if fresh else read_oom_size(folder, executor)
    sizes, why = candidate_sizes(config, executor, too_large)
    plans = candidate_plans(config, executor)
    limit = executor.memory_limit()
    cap = GPU_TOKENS if limit is not None else CPU_TOKENS
    if asked == "auto":
        sizes = [n for n in sizes if n * config.max_seq_len <= cap] or sizes[:1]
    if limit is None or (asked != "auto" and len(plans) == 1):
        executor.microbatch = sizes[-1]
        MemoryPlan(plans[0].recompute, plans[0 if limit is not None else -1].holds_weights).apply(executor)
        why = why or f"largest divisor of {rank_batch(config, executor.layout)} within {cap:,} tokens, enough for a CPU"
        return [f"microbatch: {_sequences(executor.microbatch)} ({why})"]

    def estimate(plan: MemoryPlan, size: int) -> float:
        shape = replace(StepShape.of(config), micro=size, recompute=plan.recompute, holds_weights=plan.holds_weights)
        return estimate_memory(config.model, executor.layout, config.parallel, shape).total

    search = MemorySearch(executor, sizes, limit, estimate)
    plan, size = search.run(plans, config.max_seq_len)
    if size == 0 and asked == "auto":
        raise ConfigError(what_would_fit(config, executor.layout, limit))
    executor.microbatch = size or sizes[-1]  # a configured size that does not fit is for the first step to halve
    plan.apply(executor)
    why = why or search.reason(plan, size, rank_batch(config, executor.layout))
    return [f"microbatch: {_sequences(executor.microbatch)} ({why})", search.comparison(plan, size)]


def what_would_fit(config: RunConfig, layout: Layout, limit: int) -> str:
    """The error for a run of which not even one sequence fits: what it needs by the estimate, and what would fit."""

    def needs(layout: Layout = layout, seq_len: int = config.max_seq_len, recompute: str | None = "full") -> float:
        shape = replace(StepShape.of(config), seq_len=seq_len, micro=1, recompute=recompute)
        return estimate_memory(config.model, layout, config.parallel, shape).total

    kind = "full" if config.activation_checkpointing == "auto" else config.recompute
    advice = []
    if kind != "full" and needs() <= limit:
        advice.append("activation_checkpointing=full")
    lengths = (config.max_seq_len >> halving for halving in range(1, 8))
    if (
        length := next((n for n in lengths if n >= 128 and needs(seq_len=n, recompute=kind) <= limit), None)
    ) is not None:
        advice.append(f"max_seq_len={length}")
    shards = (layout.shard << doubling for doubling in range(1, 11))
    if (
        shard := next((n for n in shards if needs(replace(layout, shard=n), recompute=kind) <= limit), None)
    ) is not None:
        count = layout.size // layout.shard * shard
        advice.append(f"{count} such GPUs (parallel.shard={shard})")
    parts = estimate_memory(
        config.model, layout, config.parallel, replace(StepShape.of(config), micro=1, recompute=kind)
    )
    return (
        f"not even one sequence of {config.max_seq_len:,} tokens fits: about {parts}, of {limit / 2**30:.1f} GiB; use "
        f"{', or '.join([*advice, 'a smaller model'])}"
    )


def _sequences(count: int) -> str:
    return f"{count} sequence" + ("" if count == 1 else "s")


def rank_batch(config: RunConfig, layout: Layout) -> int:
    """The largest part of the global batch that a rank has."""
    return -(-config.global_train_batch_size // layout.data)


def candidate_sizes(config: RunConfig, executor: Executor, too_large: int | None) -> tuple[list[int], str]:
    """The sizes to choose from, ascending, and why if there is no choice."""
    asked = config.device_train_microbatch_size
    batch = rank_batch(config, executor.layout)
    if asked == "auto":
        batch = max(1, batch // executor.min_microbatches)
    sizes = divisors(batch)
    if too_large is not None:
        sizes = [n for n in sizes if n <= too_large // 2] or [1]
    if asked == "auto":
        return sizes, ""
    assert isinstance(asked, int)
    if too_large is not None and asked >= too_large:
        return sizes[-1:], f"{too_large} did not fit into memory earlier in this run"
    return [min(asked, batch)], "as configured" if asked <= batch else "all sequences that a rank has"


def candidate_plans(config: RunConfig, executor: Executor) -> list[MemoryPlan]:
    """The plans to choose from, the fastest first."""
    kinds = executor.recompute_kinds if config.activation_checkpointing == "auto" else (config.recompute,)
    return [MemoryPlan(kind, hold) for kind, hold in product(kinds, sorted(executor.hold_choices, reverse=True))]


class MemorySearch:
    """Measures sizes from below, doubling, for one plan after the other.

    An executor that can recover from a failed allocation tries the fastest plan first, and every size until one fails.
    Any other must never fail, since other ranks would wait inside a collective. It begins with one sequence and the
    plan that needs the least memory, and tries only what cannot fail: memory that is not kept between steps grows at
    most in proportion to the size. Up to the next doubling, it then trusts the line through the last two peaks.
    """

    def __init__(self, executor: Executor, sizes: list[int], limit: int, estimate: Callable[[MemoryPlan, int], float]):
        self.executor, self.sizes, self.limit, self.estimate = executor, sizes, limit, estimate
        self.measured: dict[tuple[MemoryPlan, int], MemoryUse] = {}
        self.largest: dict[MemoryPlan, int] = {}

    def run(self, plans: Sequence[MemoryPlan], seq_len: int) -> tuple[MemoryPlan, int]:
        """The fastest plan whose largest size has enough tokens, or the one with the largest, and that size; 0 if no
        size fits."""
        if not self.executor.can_recover_from_oom:
            self._probe(plans[-1], 1)
        for plan in plans:
            tokens = ENOUGH_TOKENS if plan.holds_weights else self.executor.enough_tokens
            self.largest[plan] = self._largest(plan)
            if self.largest[plan] >= min(self.sizes[-1], -(-tokens // seq_len)):
                return plan, self.largest[plan]
        best = max(plans, key=lambda plan: self.largest[plan])  # of equals the fastest
        return (best, self.largest[best]) if self.largest[best] else (plans[-1], 0)

    def _largest(self, plan: MemoryPlan) -> int:
        fits, fails = 0, self.sizes[-1] + 1
        while candidates := [n for n in self.sizes if fits < n < fails]:
            size = max([n for n in candidates if n <= 2 * fits], default=candidates[0])
            may_try = self.executor.can_recover_from_oom or self._bound(plan, size) <= TRIED * self.limit
            if (plan, size) in self.measured or (may_try and self._probe(plan, size)):
                if not self.executor.can_recover_from_oom and self.measured[plan, size].peak > self.limit:
                    break
                fits = size
            else:
                fails = size
        if self.executor.can_recover_from_oom:
            return fits
        return max([n for n in self.sizes if n <= 2 * fits and self._line(plan, n) <= self.limit], default=fits)

    def _probe(self, plan: MemoryPlan, size: int) -> bool:
        plan.apply(self.executor)
        use = self.executor.probe_memory(size)
        if use is not None:
            self.measured[plan, size] = use
        return use is not None

    def _bound(self, plan: MemoryPlan, size: int) -> float:
        """What the peak of a size cannot exceed, from the nearest one measured; of a plan that was not measured yet,
        by the estimate of what it adds to one that was."""
        own = [(n, use) for (p, n), use in self.measured.items() if p == plan]
        if own:
            n, use = max(own, key=lambda measured: measured[0])
            return use.kept + (use.peak - use.kept) * size / n
        (other, n), use = next(reversed(self.measured.items()))
        return use.peak + ESTIMATE_MARGIN * max(0.0, self.estimate(plan, size) - self.estimate(other, n))

    def _line(self, plan: MemoryPlan, size: int) -> float:
        """The peak of a size on the line through the last two of at least three that were measured."""
        points = sorted((n, use.peak) for (p, n), use in self.measured.items() if p == plan)
        if len(points) < 3:  # that of one sequence is mostly something else
            return self._bound(plan, size)
        (low, base), (high, top) = points[-2:]
        return top + max(0.0, (top - base) / (high - low)) * (size - high)

    def reason(self, plan: MemoryPlan, size: int, batch: int) -> str:
        cap = f" within {GPU_TOKENS:,} tokens" if size == self.sizes[-1] else " that fits"
        how = "tested" if (plan, size) in self.measured else "computed from smaller ones tested"
        return f"largest divisor of {batch}{cap}; {how} before step 1"

    def comparison(self, chosen: MemoryPlan, size: int) -> str:
        """The plan and its memory, next to the plans that leave less room."""
        said = f"activation checkpointing: {self._name(chosen)}"
        if size:
            peak, limit = self._line(chosen, size) / 2**30, self.limit / 2**30
            said += f" ({peak:.1f} of {limit:.1f} GiB with optimizer state)"
        others = [f"{self._name(plan)}: {_sequences(n)}" for plan, n in self.largest.items() if plan != chosen]
        return said + (f"; the largest microbatch otherwise: {', '.join(others)}" if others else "")

    def _name(self, plan: MemoryPlan) -> str:
        choices = self.executor.hold_choices
        return (plan.recompute or "none") + (f", {choices[plan.holds_weights]}" if len(choices) > 1 else "")


@contextmanager
def recording_oom(folder: Path, executor: Executor, where: str) -> Iterator[None]:
    """Turn a failed allocation into an error that says what to do, and record the size that did not fit."""
    try:
        yield
    except (RuntimeError, MemoryError, OutOfMemory) as error:  # torch's out-of-memory error is a RuntimeError
        problem = as_out_of_memory(error, where, executor.microbatch)
        if problem is None:
            raise
        if problem.next_microbatch is not None:
            record_oom_size(folder, problem.microbatch, executor.layout)
        raise problem from None


def record_oom_size(folder: Path, size: int, layout: Layout) -> None:
    """Record in the run folder that a size did not fit, for whatever restarts the run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / MICROBATCH, json.dumps({"too_much": size, "layout": str(layout)}) + "\n")


def read_oom_size(folder: Path, executor: Executor) -> int | None:
    """The smallest size that is known not to fit, the same on every rank."""
    try:
        found = json.loads((folder / MICROBATCH).read_text(encoding="utf-8"))
        size = int(found["too_much"]) if found["layout"] == str(executor.layout) else 0
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: nothing is known
        size = 0
    known = [int(row[0]) for row in executor.all_gather([float(size)]) if row[0]]
    return min(known, default=None)
