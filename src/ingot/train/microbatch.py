"""How many sequences go through the model at once."""

import torch

from ingot.errors import ConfigError
from ingot.model.gpt import GPT
from ingot.train.config import RunConfig
from ingot.train.device import autocast

CPU_TOKENS = 4096  # beyond this a CPU gains nothing and its caches lose


def choose_microbatch(config: RunConfig, model: GPT, device: torch.device) -> tuple[int, str]:
    """The microbatch size, and why. It always divides the global batch."""
    if isinstance(config.device_train_microbatch_size, int):
        return config.device_train_microbatch_size, "as configured"
    batch = config.global_train_batch_size
    sizes = [n for n in range(1, batch + 1) if batch % n == 0]
    if device.type == "cpu":
        size = max([n for n in sizes if n * config.max_seq_len <= CPU_TOKENS] or [1])
        return size, f"the largest part of the batch within {CPU_TOKENS} tokens, enough to keep a CPU busy"
    return _largest_that_fits(config, model, device, sizes)


def _largest_that_fits(config: RunConfig, model: GPT, device: torch.device, sizes: list[int]) -> tuple[int, str]:
    # stands for the two moments of the optimizer, which do not exist before the first step
    reserve = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]
    best, peak = 0, 0
    model.train()
    for size in sizes:
        torch.cuda.reset_peak_memory_stats(device)
        try:
            tokens = torch.zeros(size, config.max_seq_len, dtype=torch.long, device=device)
            with autocast(config.precision, device):
                loss = model(tokens, tokens)
            loss.backward()
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            break
        finally:
            loss = None
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        best, peak = size, torch.cuda.max_memory_allocated(device)
    del reserve
    if best == 0:
        raise ConfigError(
            "not even one sequence fits into the GPU's memory: use activation_checkpointing=true, a shorter "
            "max_seq_len or a smaller model"
        )
    return best, f"the largest that fits, tried before the first step ({peak / 2**30:.1f} GiB with optimizer state)"
