"""Builds the executor of a run: a model in one process, or this rank's part of one."""

from typing import TYPE_CHECKING

import torch

from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.parallel.executors.base import Messages, recompute_kinds
from ingot.parallel.executors.single import SingleProcess
from ingot.parallel.layout import Layout
from ingot.parallel.loss_model import BuildOptions, build_loss_model
from ingot.parallel.rendezvous import World

if TYPE_CHECKING:
    from ingot.parallel.executors.distributed import Distributed


def build_single(config: RunConfig, device: torch.device, compiled: bool, messages: Messages) -> SingleProcess:
    """The whole model with its initial weights, and the kernels that suit the device."""
    options = BuildOptions(device, config.precision, config.max_seq_len)
    model, notes = build_loss_model(config.model, config.seed, options)
    for note in notes:
        messages.note(note)
    return SingleProcess(model, config, device, compiled, messages)


def build_distributed(
    config: RunConfig, layout: Layout, world: World, device: torch.device, compiled: bool, messages: Messages
) -> "Distributed":
    """This rank's part of the model with its initial weights."""
    from ingot.parallel.executors.distributed import Distributed  # a second of imports that one process does not need
    from ingot.parallel.parallelize import parallelize

    options = BuildOptions(device, config.precision, config.max_seq_len, compiled=compiled)
    model = parallelize(config.model, config.parallel, layout, options)
    for note in model.notes:
        messages.note(note)
    executor = Distributed(model, config, world, messages)
    executor.init_weights(config.seed)
    return executor


def check_distributed(config: RunConfig, layout: Layout) -> None:
    """Refuse what several ranks cannot do, before they meet."""
    if config.precision == "fp8":
        split = next((axis for axis in ("tensor", "pipeline") if getattr(layout, axis) > 1), None)
        if split is not None:
            raise ConfigError(f"precision=fp8 does not work with parallel.{split}={getattr(layout, split)}; use bf16")
        if config.parallel.reshard_after_forward is True:
            raise ConfigError(
                "precision=fp8 keeps 8-bit weights between passes, so parallel.reshard_after_forward=true saves "
                "nothing; use auto"
            )
    if config.cuda_graphs is True and config.parallel.reshard_after_forward is True:
        raise ConfigError(
            "cuda_graphs=true keeps gathered weights, which parallel.reshard_after_forward=true frees; use auto"
        )
    if config.recompute not in recompute_kinds(config, layout):
        raise ConfigError("activation_checkpointing=selective does not work with zero_bubble; use full or none")
