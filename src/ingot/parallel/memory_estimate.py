"""How much memory a process of a layout needs, and which layout is the smallest that fits, by arithmetic alone: this
runs before torch is loaded.

Bytes are those of an eager step in mixed precision as FSDP2 runs it; a dry run of the real program, which takes a
minute where this takes none, says the same within a tenth or so (the tests compare them).
"""

import itertools
from dataclasses import astuple, dataclass, fields

from ingot.config.model import ModelConfig
from ingot.config.parallel import ParallelConfig
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.parallel.layout import STAGES_PER_RANK, Layout, complete_layout

USABLE = 0.9  # of a device's memory: the rest is for kernels, communication buffers and fragments
OPTIMIZER_BYTES = {"lion": 4, "muon": 4}  # per hidden weight in fp32; AdamW keeps two moments


@dataclass(frozen=True)
class StepShape:
    """What a process does at a time, as far as memory is concerned."""

    seq_len: int
    micro: int = 1
    precision: str = "bf16"
    recompute: str | None = None
    optimizer: str = "adamw"
    holds_weights: bool = False
    """Whether FSDP2 gathers all weights once per step, and sums their gradients before it reduces them."""

    @classmethod
    def of(cls, config: RunConfig) -> "StepShape":
        """What a process of a run computes at a time: the microbatch, or where that is chosen later a single sequence;
        and where recomputation is chosen later, all of it."""
        micro = 1 if config.device_train_microbatch_size == "auto" else config.device_train_microbatch_size
        recompute = "full" if config.activation_checkpointing == "auto" else config.recompute
        return cls(config.max_seq_len, micro, config.precision, recompute, config.optimizer.name)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Weights put together for a pass, and gradients before they are cut again."""
    activations: float
    working: float
    """Logits and their gradient, or what the backward pass of a block makes on the way: the larger."""

    @property
    def total(self) -> float:
        return sum(astuple(self))

    @property
    def saved(self) -> float:
        """Bytes of a checkpoint, but for the headers of its files: fp32 weights, and the optimizer's state."""
        return self.weights + self.optimizer

    def __str__(self) -> str:
        parts = ", ".join(f"{f.name} {getattr(self, f.name) / 2**30:.1f}" for f in fields(self))
        return f"{self.total / 2**30:.1f} GiB ({parts})"


def estimate_memory(m: ModelConfig, layout: Layout, parallel: ParallelConfig, work: StepShape) -> MemoryEstimate:
    """The bytes that the process with most of them needs."""
    # parameters of this process: t processes share each matrix, p the layers, `sharers` what is left
    t, p, sharers = layout.tensor, layout.pipeline, layout.shard * layout.context
    layers = -(-m.n_layers // p)
    block, ends = m.block_parameters / t, m.end_parameters / t
    head = m.vocab_rows * m.d_model / t
    own = (layers * block + ends) / sharers  # in a pipeline, the stage with the larger end
    hidden = layers * block / sharers
    half = 4 if work.precision == "fp32" else 2  # bytes of a number in a matrix product
    reshard = parallel.reshard_after_forward if parallel.reshard_after_forward != "auto" else p == 1
    reshard = reshard and not work.holds_weights

    # activations: bytes per token and layer
    tokens = work.micro * work.seq_len / layout.context
    heads, groups, f = m.n_heads * m.head_width, m.kv_heads * m.head_width, m.ffn_width
    gated = m.activation == "swiglu"
    # bf16 runs keep the residual stream in bf16, fp16 runs keep it in fp32
    residual, gathered_input = (2 if work.precision in ("bf16", "fp8") else 4) * m.d_model / t, 2 * half * m.d_model
    products = half * (heads + 2 * groups + heads + f * (2 if gated else 1)) / t  # of matrix products, attention
    rotated = half * (heads + groups) / t if m.positions == "rotary" or m.qk_ln else 0
    cheap = half * (heads + f * (2 if gated else 1)) / t + rotated  # to recompute
    dropped = 2 * m.d_model * (1 + half) / t if m.resid_pdrop else 0
    whole = 2 * residual + gathered_input + products + cheap + dropped
    kept = {None: whole, "selective": residual + products + 2 * half * m.d_model / t, "full": residual}[work.recompute]
    again = 0 if work.recompute is None else whole  # one block at a time is recomputed
    in_flight = p * (1 if STAGES_PER_RANK[parallel.pipeline_schedule] == 1 else 1.5) if p > 1 else 1

    # what exists for a moment: the head's weights in half precision; a block's gradients, and what is sent of them in
    # fp32; logits; what the backward pass of a block computes
    cast = half * head if half == 2 else 0
    blocks = half * block * (2 if reshard else layers) + (half + 4) * block
    if work.holds_weights:
        blocks += 4 * (layers * block + ends - own)
    logits = 12 * m.vocab_rows / t * tokens
    backward = (again + 2 * residual + half * (f * (2 if gated else 1) + 3 * heads) / t) * tokens + 4 * ends
    return MemoryEstimate(
        weights=4 * own,
        gradients=4 * own,
        optimizer=hidden * OPTIMIZER_BYTES.get(work.optimizer, 8)
        + (own - hidden) * (4 if work.optimizer == "lion" else 8),
        gathered=4 * ends + cast + blocks,
        activations=kept * tokens * layers * in_flight,
        working=max(logits, backward),
    )


def choose_layout(
    config: ParallelConfig,
    world: int,
    model: ModelConfig,
    batch: int,
    work: StepShape,
    memory: int | None = None,
    node: int | None = None,
) -> tuple[Layout, str]:
    """The smallest layout for a number of processes that fits into `memory` bytes each, and why.

    Sharding comes first, since it costs least; then tensor parallelism up to the processes of a machine (`node`), then
    context, then pipeline. An impossible layout is refused with the nearest that work, one that is too large with its
    numbers. Without `memory` everything fits.
    """
    free = {
        "pipeline": range(1, model.n_layers + 1),
        "context": range(1, world + 1),
        "tensor": range(1, (node or world) + 1),
    }
    axes = [axis for axis in free if getattr(config, axis) == "auto"]
    options = itertools.product(*([n for n in free[axis] if world % n == 0] for axis in axes))
    impossible: ConfigError | None = None
    smallest: tuple[MemoryEstimate, Layout] | None = None
    for degrees in options:
        try:
            asked = config.model_copy(update=dict(zip(axes, degrees, strict=True)))
            layout, why = complete_layout(asked, world, model, work.seq_len, batch)
        except ConfigError as error:
            impossible = impossible or error
            continue
        if memory is None or world == 1:
            return layout, why
        needs = estimate_memory(model, layout, config, work)
        figures = f"about {needs} of {memory / 2**30:.0f} GiB per device with a microbatch of {work.micro}"
        if needs.total <= USABLE * memory:
            tried = f"; {smallest[1]} would need {smallest[0].total / 2**30:.1f} GiB" if smallest else ""
            return layout, f"{'the smallest that fits' if axes else why}, {figures}{tried}"
        if not axes:
            return layout, f"{why}; too tight by our estimate, {figures}"
        if smallest is None or needs.total < smallest[0].total:
            smallest = needs, layout
    if smallest is None:
        assert impossible is not None
        raise impossible
    raise ConfigError(
        f"no layout of {world} processes fits: the least is {smallest[0]} on {smallest[1]}, of "
        f"{(memory or 0) / 2**30:.0f} GiB per device; use activation_checkpointing=true, more processes, or a shorter "
        "max_seq_len"
    )
