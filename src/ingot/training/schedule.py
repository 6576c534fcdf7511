"""The learning rate as a pure function of the number of batches done, so that resuming needs no scheduler state.

Formulas are those of Composer, LLM Foundry, Megatron and GPT-NeoX: the warmup rises from the first step on, and decay
starts where it ends.
"""

import math

from ingot.config.durations import BatchClock
from ingot.config.training import SchedulerConfig


def lr_multiplier(config: SchedulerConfig, clock: BatchClock, batch: int) -> float:
    """Fraction of the peak learning rate for the step that follows `batch` finished ones."""
    warmup = clock.batches(config.t_warmup)
    if batch < warmup:
        done = min(1.0, max(batch, config.warmup_floor) / warmup)
        return config.warmup_start + (1 - config.warmup_start) * done
    return max(config.floor, _after_warmup(config, clock, batch, warmup))


def _after_warmup(config: SchedulerConfig, clock: BatchClock, batch: int, warmup: float) -> float:
    final = config.alpha_f
    end = clock.batches(config.t_max)
    match config.name:
        case "constant_with_warmup":
            return 1.0
        case "linear_decay_with_warmup":
            return 1 - (1 - final) * _progress(batch, warmup, end)
        case "cosine_with_warmup":
            return final + (1 - final) * _cosine(_progress(batch, warmup, end))
        case "inv_sqrt_with_warmup":
            scale = clock.batches(config.t_scale) if config.t_scale is not None else max(warmup, 1.0)
            cooldown = clock.batches(config.t_cooldown)
            start = max(warmup, end - cooldown) if cooldown else math.inf
            rate = final + (1 - final) / math.sqrt(1 + (min(batch, start) - warmup) / scale)
            return rate + (config.alpha_cooldown - rate) * _progress(batch, start, end) if batch > start else rate
        case "exponential_decay_with_warmup":
            return final ** _progress(batch, warmup, end)
        case "wsd":
            start = max(warmup, end - clock.batches(config.t_decay))
            done = _progress(batch, start, end)
            left = {"linear": 1 - done, "cosine": _cosine(done), "sqrt": 1 - math.sqrt(done),
                    "exponential": 2 * 0.5**done - 1}[config.decay_shape]  # fmt: skip
            return final + (1 - final) * left
    raise AssertionError(config.name)


def _progress(batch: float, start: float, end: float) -> float:
    if batch >= end:
        return 1.0  # also where nothing is between start and end
    return max(0.0, (batch - start) / (end - start)) if start < end else 0.0


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
