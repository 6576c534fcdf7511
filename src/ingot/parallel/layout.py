"""How many processes share what: the five axes of a layout, and whether a layout can work.

A layout is execution: it changes speed and memory, never the result. Whatever makes one impossible is found here, from
numbers alone, before a process starts or torch is loaded.
"""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ingot.config.model import ModelConfig
from ingot.config.parallel import ParallelConfig
from ingot.errors import ConfigError

AXES = ("replicate", "shard", "context", "tensor", "pipeline")
STAGES_PER_RANK = {"1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 2}


@dataclass(frozen=True)
class Layout:
    """Processes along each axis."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        return math.prod(astuple(self))

    @property
    def data(self) -> int:
        """Parts that a global batch is cut into."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        parts = [f"{axis}={n}" for axis, n in zip(AXES, astuple(self), strict=True) if n > 1]
        return " ".join(parts) or "one process"

    def as_overrides(self) -> str:
        """The layout as one would type it."""
        return " ".join(f"parallel.{part}" for part in str(self).split()) if self.size > 1 else "one process"

    def part(self, data_rank: int, batch: int) -> tuple[int, int]:
        """A data rank's contiguous slice of the global batch; slices differ by at most one sequence."""
        return batch * data_rank // self.data, batch * (data_rank + 1) // self.data


def complete_layout(
    config: ParallelConfig, world: int, model: ModelConfig, seq_len: int, batch: int
) -> tuple[Layout, str]:
    """The layout for a number of processes, and why, where `auto` of tensor, context and pipeline stands for 1; an
    impossible one is refused with the nearest that work."""
    asked = {axis: getattr(config, axis) for axis in AXES}
    for axis, value in asked.items():
        if value != "auto" and value < 1:
            raise ConfigError(f"parallel.{axis}={value}: must be at least 1, or auto")
    fixed = {a: 1 if asked[a] == "auto" else int(asked[a]) for a in AXES}
    rest, left = divmod(world, math.prod(fixed.values()))
    why = "as configured"
    if left == 0 and rest > 1:
        # sharding costs least memory, so it takes what is left over, unless its size was given
        free = next((a for a in ("shard", "replicate") if asked[a] == "auto"), None)
        if free is not None:
            fixed[free] *= rest
            why = f"parallel.{free} takes what the other axes leave"
    layout = Layout(**fixed)
    if problem := next(problems(layout, config, world, model, seq_len, batch), None):
        near = nearest(layout, config, world, model, seq_len, batch)
        hint = ", or ".join(option.as_overrides() for option in near)
        raise ConfigError(f"{problem}; " + (f"the nearest that work: {hint}" if near else "no layout works here"))
    return layout, why


def problems(
    layout: Layout, config: ParallelConfig, world: int, model: ModelConfig, seq_len: int, batch: int
) -> Iterator[str]:
    """Why a layout cannot work; nothing if it can."""
    if layout.size != world:
        comparison = "more" if layout.size > world else "fewer"
        yield f"the layout ({layout}) needs {layout.size} processes, {comparison} than the {world} of this run"
    if layout.data > batch:
        yield (
            f"{layout.data} data-parallel processes cannot share a global_train_batch_size of {batch}; "
            f"set it to at least {layout.data}"
        )
    t, c = layout.tensor, layout.context
    if t > 1:
        for name, count in (
            ("n_heads", model.n_heads),
            ("kv_heads", model.kv_heads),
            ("MLP width", model.ffn_width),
            ("embedding rows (see model.vocab_multiple)", model.vocab_rows),
        ):
            if count % t:
                yield f"parallel.tensor={t} does not divide the model's {name}, {count}"
        if model.positions == "learned" and model.context % t:
            yield f"parallel.tensor={t} does not divide the rows of the position table, {model.context}"
    if c > 1 and seq_len % (2 * c):
        yield (
            f"parallel.context={c} cuts each sequence into {2 * c} chunks, but max_seq_len {seq_len} is not divisible "
            f"by {2 * c}"
        )
    if seq_len % (c * t):
        yield f"max_seq_len {seq_len} is not divisible by parallel.context x parallel.tensor, {c * t}"
    if (model.document_mask or model.document_positions) and (c > 1 or layout.pipeline > 1):
        yield "model.document_mask and document_positions do not work with parallel.context or pipeline above 1"
    if layout.pipeline > 1 and config.pipeline_schedule == "zero_bubble" and config.reshard_after_forward is True:
        yield "parallel.reshard_after_forward=true does not work with pipeline_schedule=zero_bubble; leave it on auto"
    stages = layout.pipeline * STAGES_PER_RANK[config.pipeline_schedule]
    if layout.pipeline > 1 and model.n_layers < stages:
        yield f"{model.n_layers} layers cannot fill {stages} pipeline stages ({config.pipeline_schedule})"


def nearest(
    layout: Layout, config: ParallelConfig, world: int, model: ModelConfig, seq_len: int, batch: int, count: int = 3
) -> list[Layout]:
    """Layouts of the same number of processes that work, most like the given one first."""

    def distance(other: Layout) -> tuple[float, int]:
        steps = sum(abs(math.log2(a / b)) for a, b in zip(astuple(layout), astuple(other), strict=True))
        return steps, other.pipeline * other.tensor * other.context  # of two as near, the one that is simpler

    working = [
        option
        for option in (Layout(*degrees) for degrees in _factorizations(world, len(AXES)))
        if not any(True for _ in problems(option, config, world, model, seq_len, batch))
    ]
    return sorted(working, key=distance)[:count]


def _factorizations(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    if factors == 1:
        yield (n,)
        return
    for first in (d for d in range(1, n + 1) if n % d == 0):
        for rest in _factorizations(n // first, factors - 1):
            yield (first, *rest)
