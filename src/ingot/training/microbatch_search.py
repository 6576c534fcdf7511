"""How many sequences go through the model at once, and what of them is recomputed for want of memory.

Memory is tried before the first step. Recomputing costs up to a quarter of the speed and a small microbatch little, so
as little is recomputed as leaves room for a few thousand tokens (7b on an H200 reaches 63% of the peak with 4096 at a
time and nothing recomputed). A larger microbatch than some tens of thousands of tokens gains nothing: 125m is 1.6%
slower with 131,072 than with 65,536. What turns out not to fit later is written down in the run folder, so that a
run that any launcher starts again goes on from its last checkpoint with a smaller size.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.parallel.dtensor import local
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import USABLE as ESTIMATED
from ingot.parallel.memory_estimate import StepShape, estimate_memory
from ingot.storage.atomic import write_whole
from ingot.training.device import autocast
from ingot.training.oom import OutOfMemory
from ingot.training.runtime.run_files import MICROBATCH

if TYPE_CHECKING:
    from ingot.parallel.executors.distributed import Spread

CPU_TOKENS = 4096  # beyond this a CPU gains nothing and its caches lose
GPU_TOKENS = 65536  # and beyond this a GPU
ENOUGH_TOKENS = 4096  # to keep a GPU busy
ENOUGH_SPREAD = 8192  # where weights have to be gathered too, for each microbatch
KINDS = (None, "selective", "full")  # of recomputing, the cheapest first
NEVER = 1 << 62
USABLE = 0.94  # of a device's memory, by measured peaks: the rest is for communication and fragments


def choose_recompute(config: RunConfig, layout: Layout, memory: int | None) -> tuple[str | None, str]:
    """What the blocks of a spread model recompute, and why. By arithmetic: to try it might fail on a single process,
    and leave the others waiting inside a collective."""
    if config.activation_checkpointing != "auto":
        return config.recompute, "as configured"
    if memory is None:
        return None, "auto recomputes on GPUs alone"
    asked, batch = config.device_train_microbatch_size, -(-config.global_train_batch_size // layout.data)
    micro = asked if isinstance(asked, int) else min(batch, -(-ENOUGH_SPREAD // config.max_seq_len))
    split = layout.pipeline > 1 and config.parallel.pipeline_schedule == "zero_bubble"
    for kind in KINDS:
        if kind == "selective" and split:  # which torch cannot do
            continue
        work = replace(StepShape.of(config), micro=micro, recompute=kind)
        needs = estimate_memory(config.model, layout, config.parallel, work).total
        figures = f"about {needs / 2**30:.1f} of {memory / 2**30:.0f} GiB per device with a microbatch of {micro}"
        if needs <= ESTIMATED * memory:
            return kind, f"the least that leaves room for {micro * config.max_seq_len:,} tokens: {figures}"
    return "full", f"too tight by our estimate even so: {figures}"


def choose_microbatch(
    config: RunConfig,
    model: Any,
    device: torch.device,
    spread: "Spread | None",
    folder: Path,
    fresh: bool = False,
) -> tuple[int, str]:
    """The microbatch size, and why. It always divides the largest part of the global batch that a process has. What a
    run that starts over has left in the folder does not count. A model in one process is left recomputing what
    `activation_checkpointing=auto` comes to."""
    layout = spread.mesh.layout if spread is not None else Layout()
    batch = -(-config.global_train_batch_size // layout.data)
    asked = config.device_train_microbatch_size
    if asked == "auto" and layout.pipeline > 1:  # enough microbatches to keep every stage busy
        batch = max(1, batch // (2 * layout.pipeline))
    sizes = [n for n in range(1, batch + 1) if batch % n == 0]
    too_much = None if fresh else _too_much(folder, layout, spread)
    if too_much is not None:
        sizes = [n for n in sizes if n <= too_much // 2] or [1]
    if isinstance(asked, int):
        size = min(asked, batch)
        why = "as configured" if size == asked else "all that a process has"
        if too_much is not None and asked >= too_much:
            size, why = sizes[-1], f"{too_much} was too much for the memory earlier in this run"
        if config.activation_checkpointing == "auto" and device.type == "cuda" and spread is None:
            _try_kinds(config, model, device, [size], size)  # if none fits, the first step will halve the size
            why += f"; recomputed: {model.gpt.activation_checkpointing or 'nothing'}"
        return size, why
    if device.type == "cpu":
        size = max([n for n in sizes if n * config.max_seq_len <= CPU_TOKENS] or [1])
        return size, f"the largest part of the batch within {CPU_TOKENS} tokens, enough to keep a CPU busy"
    sizes = [n for n in sizes if n * config.max_seq_len <= GPU_TOKENS] or sizes[:1]
    if spread is not None:
        return _largest_by_measure(config, spread, device, sizes, folder)
    return _try_sizes(config, model, device, sizes)


def remember_too_much(folder: Path, size: int, layout: Layout) -> None:
    """Leave word in the run folder that a size did not fit, for whatever starts the run again."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / MICROBATCH, json.dumps({"too_much": size, "layout": str(layout)}) + "\n")


def _too_much(folder: Path, layout: Layout, spread: "Spread | None") -> int | None:
    """The smallest size that is known not to fit, the same on every process."""
    try:
        found = json.loads((folder / MICROBATCH).read_text(encoding="utf-8"))
        size = int(found["too_much"]) if found["layout"] == str(layout) else None
    except (OSError, ValueError, KeyError, TypeError):  # no file, or none of ours: nothing is known
        size = None
    if spread is not None:
        size = int(spread.lowest(size or NEVER))
        return size if size < NEVER else None
    return size


def _largest_by_measure(
    config: RunConfig, spread: "Spread", device: torch.device, sizes: list[int], folder: Path
) -> tuple[int, str]:
    """What fits on the tightest process, from the peaks of real passes of 1, 2, 4, ... sequences.

    A pass is made only if it must fit on every process: one that fails on a single process would leave the others
    waiting inside a collective for ever. The size that is left in doubt is computed from the last two.
    """
    reserve = [torch.empty_like(local(p)) for p in spread.names for _ in range(2)]  # the optimizer's two moments
    free, total = torch.cuda.mem_get_info(device)
    room = USABLE * (free + torch.cuda.memory_reserved(device))
    peaks: dict[int, int] = {}
    kept = 0  # weights, gradients and moments, whatever the size
    for size in sizes:
        if peaks and size < 2 * max(peaks):
            continue
        if peaks and not spread.lowest(must_fit(peaks, kept, room, size)):
            break
        torch.cuda.reset_peak_memory_stats(device)
        try:
            for _ in range(2):  # the second time with gradients in place
                _pass(config, spread, device, size)
        except torch.OutOfMemoryError as error:
            if size > 1:
                remember_too_much(folder, size, spread.mesh.layout)
            raise OutOfMemory("before the first step", size, str(error).partition("\n")[0]) from None
        torch.cuda.synchronize(device)
        peaks[size], kept = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        for parameter in spread.names:
            parameter.grad = None
        torch.cuda.empty_cache()
    del reserve
    if spread.pipeline is not None:
        spread.pipeline.forget_shapes()
    size = int(spread.lowest(largest_within(peaks, room, sizes)))
    if size in peaks:
        how = f"tried before the first step ({peaks[size] / 2**30:.1f} of {total / 2**30:.0f} GiB with optimizer state)"
    else:
        how = (
            f"computed from passes of up to {max(peaks)} tried before the first step (about "
            f"{_line(peaks)(size) / 2**30:.1f} of {total / 2**30:.0f} GiB with optimizer state)"
        )
    return size, f"the largest that fits, {how}"


def must_fit(peaks: dict[int, int], kept: int, room: float, size: int) -> bool:
    """Whether a size cannot exceed the room: what comes beside the kept memory grows at most in proportion."""
    last = max(peaks)
    return kept + (peaks[last] - kept) * size / last <= room


def largest_within(peaks: dict[int, int], room: float, sizes: list[int]) -> int:
    """The largest size within the room: of those up to the next doubling, by the line through the last two that were
    tried; at least the first."""
    line = _line(peaks)
    return max([n for n in sizes if n <= 2 * max(peaks) and line(n) <= room], default=sizes[0])


def _line(peaks: dict[int, int]) -> Callable[[int], float]:
    (low, base), (high, top) = sorted(peaks.items())[-2:] if len(peaks) > 1 else 2 * list(peaks.items())
    slope = max(0.0, (top - base) / (high - low)) if high > low else 0.0
    return lambda size: top + slope * (size - high)


def _pass(config: RunConfig, spread: "Spread", device: torch.device, size: int) -> None:
    """Forward and backward on sequences of zeros, as many as are in flight at a time. Not compiled, which would take
    longer than the passes; compiled ones need less memory."""
    spread.train()
    count = spread.pipeline.microbatches(1) if spread.pipeline is not None else 1
    tokens = torch.zeros(count * size, config.max_seq_len, dtype=torch.long, device=device)
    with torch.compiler.set_stance("force_eager"):
        if spread.pipeline is not None:
            spread.pipeline.accumulate(tokens, tokens, count, torch.ones((), device=device))
            return
        spread.before_backward(last=True)
        with autocast(config.precision, device):
            loss = spread.roots[0](tokens, tokens)
        loss.backward()


def _try_sizes(config: RunConfig, model: Any, device: torch.device, sizes: list[int]) -> tuple[int, str]:
    """The largest size that fits, with as little recomputed as leaves room for enough tokens."""
    enough = min(sizes[-1], -(-ENOUGH_TOKENS // config.max_seq_len))
    kinds = KINDS if config.activation_checkpointing == "auto" else (config.recompute,)
    tried = _try_kinds(config, model, device, sizes, enough, kinds)
    size, peak = tried[model.gpt.activation_checkpointing]
    if size == 0:
        advice = "" if model.gpt.activation_checkpointing == "full" else "activation_checkpointing=true, "
        raise ConfigError(
            f"not even one sequence fits into the GPU's memory: use {advice}a shorter max_seq_len or a smaller model"
        )
    largest = f"the largest part of the batch within {GPU_TOKENS} tokens, enough to keep a GPU busy, which fits"
    why = largest if size == sizes[-1] else "the largest that fits"
    why += f", tried before the first step ({peak / 2**30:.1f} GiB with optimizer state)"
    if config.activation_checkpointing == "auto":
        others = ", ".join(
            f"{n} with {kind or 'nothing'}"
            for kind, (n, _) in tried.items()
            if kind != model.gpt.activation_checkpointing
        )
        why += f"; recomputed: {model.gpt.activation_checkpointing or 'nothing'}"
        why += f", since the largest would be {others}" if others else ""
    return size, why


def _try_kinds(
    config: RunConfig,
    model: Any,
    device: torch.device,
    sizes: list[int],
    enough: int,
    kinds: tuple[str | None, ...] = KINDS,
) -> dict[str | None, tuple[int, int]]:
    """The largest size that fits and its peak by what is recomputed, until it is enough. The model is left with the
    best, of equals the one that recomputes least; where nothing fits, with the last."""
    tried: dict[str | None, tuple[int, int]] = {}
    for kind in kinds:
        model.gpt.activation_checkpointing = kind
        tried[kind] = _largest_that_fits(config, model, device, sizes)
        if tried[kind][0] >= enough:
            break
    if any(size for size, _ in tried.values()):
        model.gpt.activation_checkpointing = max(tried, key=lambda kind: tried[kind][0])
    return tried


def _largest_that_fits(config: RunConfig, model: Any, device: torch.device, sizes: list[int]) -> tuple[int, int]:
    """The largest size with which a forward and backward pass fit, and the bytes at their peak; 0 if none does."""
    # stands for the two moments of the optimizer, which do not exist before the first step
    try:
        reserve = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]
    except torch.OutOfMemoryError:
        return 0, 0
    best, peak = 0, 0
    model.train()
    for size in reversed(sizes):  # from above: what does not fit fails at once, what fits takes time
        torch.cuda.reset_peak_memory_stats(device)
        loss = None
        try:
            tokens = torch.zeros(size, config.max_seq_len, dtype=torch.long, device=device)
            for _ in range(2):  # the second time with gradients in place
                with autocast(config.precision, device):
                    loss = model(tokens, tokens)
                loss.backward()
            torch.cuda.synchronize(device)
            best, peak = size, torch.cuda.max_memory_allocated(device)
            break
        except torch.OutOfMemoryError:
            continue
        finally:
            loss = None
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    del reserve
    return best, peak
