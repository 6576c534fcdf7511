"""Refuses a model that does not fit into the memory of a machine without GPUs, before anything is built: the operating
system would kill the process without a message."""

from collections.abc import Callable
from dataclasses import replace

from ingot.config.load import load_config
from ingot.config.recipes import recipe_names
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.host_memory import available_memory
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import StepShape, estimate_memory

GIB = 2**30
BYTES_OF_TOKEN = 16  # the token and its label, int64


def check_host_memory(config: RunConfig, layout: Layout, processes: int, available: int | None = None) -> None:
    """Raise if `processes` on this machine cannot hold weights, gradients, optimizer state and the activations of one
    sequence each. This is a lower bound without buffers, so a model that fits is never refused."""
    available = available_memory() if available is None else available
    parts = least_memory(config, layout, processes)
    least = sum(parts.values())
    if available is None or least <= available:
        return
    listed = ", ".join(f"{name} {count / GIB:.1f}" for name, count in parts.items())
    holders = "one process" if processes == 1 else f"{processes} processes"
    raise ConfigError(
        f"the model has {config.model.parameters:,} parameters; training it takes at least {least / GIB:.1f} GiB for "
        f"{holders} here ({listed}), and {available / GIB:.1f} GiB are available; "
        f"{_what_fits(config, layout, processes, available)}, or use more machines, whose processes share the weights "
        "(parallel.shard)"
    )


def check_batch_memory(config: RunConfig, layout: Layout, processes: int, available: int | None = None) -> None:
    """Raise if the batches that wait for their step, which are in this machine's memory also with GPUs, do not fit."""
    available = available_memory() if available is None else available
    batches, sequence = config.sources.prefetch_batches + 1, config.max_seq_len * BYTES_OF_TOKEN
    one = batches * processes * sequence / layout.data  # of a sequence more in the global batch
    if available is None or one * config.global_train_batch_size <= available:
        return
    fits = int(available / one)
    key, remedy = ("global_train_batch_size", f"use at most {fits}") if fits else ("max_seq_len", "use a smaller one")
    raise ConfigError(
        f"{key} = {getattr(config, key)}: the tokens of {batches} batches, which are kept ready "
        f"(data.prefetch_batches), take {one * config.global_train_batch_size / GIB:.1f} GiB, and "
        f"{available / GIB:.1f} GiB are available; {remedy}"
    )


def least_memory(config: RunConfig, layout: Layout, processes: int) -> dict[str, float]:
    """Bytes that the processes of this machine need at least, by what they are for."""
    recompute = "full" if isinstance(config.activation_checkpointing, float) else StepShape.of(config).recompute
    step = replace(StepShape.of(config), micro=1, recompute=recompute)
    whole = estimate_memory(config.model, Layout(), config.parallel, step)  # of the unsharded model
    state, activations = processes * layout.replicate / layout.size, processes * layout.data / layout.size
    return {"weights": whole.weights * state, "gradients": whole.gradients * state,
            "optimizer": whole.optimizer * state, "activations": whole.activations * activations}  # fmt: skip


def _what_fits(config: RunConfig, layout: Layout, processes: int, available: int) -> str:
    """What to change: the sequence length if only the activations are too large, otherwise the model."""

    def fits(other: RunConfig) -> bool:
        return sum(least_memory(other, layout, processes).values()) <= available

    length = _largest(config.max_seq_len, lambda n: fits(config.model_copy(update={"max_seq_len": n})))
    if length >= 64:
        return f"max_seq_len={length} would fit"
    sizes = {name: load_config(RunConfig, [name]) for name in recipe_names()}
    fitting = [name for name in sorted(sizes, key=lambda name: sizes[name].model.parameters) if fits(sizes[name])]
    return f"choose a smaller recipe: the largest that fits is {fitting[-1]}" if fitting else "choose a smaller model"


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest half, quarter and so on of a number that fits; 0 if none does."""
    while most > 0 and not fits(most):
        most //= 2
    return most
