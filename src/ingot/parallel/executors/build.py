"""Builds the executor of a run: a model in one process, or this rank's part of one."""

from typing import TYPE_CHECKING

import torch

from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.model.attention import choose_kernel
from ingot.model.init import build_model
from ingot.parallel.executors.base import Messages
from ingot.parallel.executors.single import SingleProcess
from ingot.parallel.layout import Layout
from ingot.parallel.rendezvous import World

if TYPE_CHECKING:
    from ingot.parallel.executors.distributed import Distributed


def build_single(config: RunConfig, device: torch.device, compiled: bool, messages: Messages) -> SingleProcess:
    """The whole model with its initial weights, and the kernels that suit the device."""
    model = build_model(config.model, config.seed, device)
    kernel, why = choose_kernel(config.model, device)
    model.use_kernel(kernel, config.max_seq_len, device)
    if note := model.use_precision(config.precision, device):
        messages.note(note)
    messages.note(f"attention {kernel}: {why}")
    return SingleProcess(model, config, device, compiled, messages)


def build_distributed(config: RunConfig, layout: Layout, world: World, device: torch.device, compiled: bool,
                      messages: Messages) -> "Distributed":  # fmt: skip
    """This rank's part of the model with its initial weights."""
    from ingot.parallel.executors.distributed import Distributed  # a second of imports that one process does not need
    from ingot.parallel.parallelize import spread_model

    kernel, why = choose_kernel(config.model, device)
    model = spread_model(
        config.model, config.parallel, layout, device, seq_len=config.max_seq_len, precision=config.precision,
        kernel=kernel, recompute=None, compiled=compiled,
    )  # fmt: skip
    messages.note(f"attention {kernel}: {why}")
    executor = Distributed(model, config, world)
    executor.init_weights(config.seed)
    return executor


def check_distributed(config: RunConfig, layout: Layout) -> None:
    """Refuse what several ranks cannot do, before they meet."""
    if config.precision == "fp8":
        raise ConfigError("precision=fp8 works on one process only, since its weights are not sharded yet; use bf16")
    if layout.pipeline > 1 and config.parallel.pipeline_schedule == "zero_bubble" and config.recompute == "selective":
        raise ConfigError("activation_checkpointing=selective does not work with zero_bubble; use full or none")
