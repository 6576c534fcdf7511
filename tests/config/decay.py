"""Which parameters a run decays, and how much."""

import torch

from ingot.config.run import RunConfig
from ingot.model.init import build_model
from ingot.training.optimizer import Optimizer


def decayed(config: RunConfig) -> dict[str, float]:
    """The weight decay of each parameter, by name, as the optimizer has it: of one step at the peak, over its rate."""
    model = build_model(config.model, 0, torch.device("cpu"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = Optimizer(config.optimizer, names)
    groups = [group for part in optimizer.parts.values() for group in part.param_groups]
    return {names[parameter]: group["weight_decay"] for group in groups for parameter in group["params"]}
