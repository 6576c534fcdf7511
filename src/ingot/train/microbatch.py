"""How many sequences go through the model at once."""

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from ingot.errors import ConfigError
from ingot.model.gpt import parameter_shapes
from ingot.parallel.config import Layout
from ingot.train.config import RunConfig
from ingot.train.device import autocast

if TYPE_CHECKING:
    from ingot.parallel.apply import Spread

CPU_TOKENS = 4096  # beyond this a CPU gains nothing and its caches lose


def choose_microbatch(
    config: RunConfig, model: nn.Module, device: torch.device, spread: "Spread | None" = None
) -> tuple[int, str]:
    """The microbatch size, and why. It always divides the global batch."""
    layout = spread.mesh.layout if spread is not None else Layout()
    batch = -(-config.global_train_batch_size // layout.data)  # the largest part of a process
    if isinstance(config.device_train_microbatch_size, int):
        size = min(config.device_train_microbatch_size, batch)
        return size, "as configured" if size == config.device_train_microbatch_size else "all that a process has"
    if layout.pipeline > 1:  # enough microbatches to keep every stage busy
        batch = max(1, batch // (2 * layout.pipeline))
    sizes = [n for n in range(1, batch + 1) if batch % n == 0]
    if device.type == "cpu":
        size = max([n for n in sizes if n * config.max_seq_len <= CPU_TOKENS] or [1])
        return size, f"the largest part of the batch within {CPU_TOKENS} tokens, enough to keep a CPU busy"
    if spread is not None:
        return _estimate(config, layout, device, sizes)
    return _largest_that_fits(config, model, device, sizes)


def _estimate(config: RunConfig, layout: Layout, device: torch.device, sizes: list[int]) -> tuple[int, str]:
    """By arithmetic, since a try that fails on one process would leave the others waiting inside a collective."""
    m, gpu = config.model, torch.cuda.get_device_properties(device).total_memory
    parameters = sum(map(math.prod, parameter_shapes(m).values()))
    state = 16 * parameters / (layout.size / layout.replicate)  # weights, gradients and two moments in fp32
    gathered = 3 * 4 * parameters / m.n_layers / layout.tensor  # a block's weights, the next one's, and gradients
    tokens = config.max_seq_len / layout.context
    kept = {None: 34, "selective": 18, "full": 2}[config.recompute]  # bytes per token, layer and width, in bf16
    layers = m.n_layers  # a pipeline holds 1 / n of the layers and, at its start, n microbatches
    block = 34 * m.d_model * tokens / layout.tensor
    sequence = kept * m.d_model * tokens * layers / layout.tensor + block + 12 * m.vocab_rows * tokens / layout.tensor
    size = max([n for n in sizes if 0.85 * gpu - state - gathered >= n * sequence] or [1])
    why = f"estimated at {(state + gathered + size * sequence) / 2**30:.1f} of {gpu / 2**30:.0f} GiB"
    return size, f"{why}; if that does not fit, the run starts again with half"


def _largest_that_fits(config: RunConfig, model: nn.Module, device: torch.device, sizes: list[int]) -> tuple[int, str]:
    # stands for the two moments of the optimizer, which do not exist before the first step
    reserve = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]
    best, peak = 0, 0
    model.train()
    for size in reversed(sizes):  # from above: what does not fit fails at once, what fits takes time
        torch.cuda.reset_peak_memory_stats(device)
        loss = None
        try:
            tokens = torch.zeros(size, config.max_seq_len, dtype=torch.long, device=device)
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
    if best == 0:
        raise ConfigError(
            "not even one sequence fits into the GPU's memory: use activation_checkpointing=true, a shorter "
            "max_seq_len or a smaller model"
        )
    return best, f"the largest that fits, tried before the first step ({peak / 2**30:.1f} GiB with optimizer state)"
