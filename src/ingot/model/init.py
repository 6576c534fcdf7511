"""Initial weights. Each is drawn from its own generator, seeded with the run's seed and the parameter's name.

So a weight does not depend on which others are drawn before it, and every parallel layout starts from the same values.
"""

import hashlib
import math

import torch
from torch import Tensor

from ingot.config.model import ModelConfig
from ingot.model.gpt import GPT, allocate

RESIDUAL = ("attn.out.weight", "mlp.down.weight")  # projections that write to the residual stream


def build_model(config: ModelConfig, seed: int, device: torch.device) -> GPT:
    """A model with its initial weights, drawn on the device."""
    model = allocate(config, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_weight(parameter, name, config, seed)
    return model


def weight_std(name: str, shape: torch.Size, config: ModelConfig) -> float:
    """Standard deviation of a weight matrix or embedding."""
    if name.endswith(RESIDUAL) and config.residual_init == "wang":
        return 2 / (config.n_layers * math.sqrt(config.d_model))
    std = {
        "kaiming_normal": math.sqrt(2 / shape[1]),
        "normal": config.init_std,
        "small": math.sqrt(2 / (5 * config.d_model)),
    }[config.init]
    if name.endswith(RESIDUAL) and config.residual_init == "scaled":
        std /= math.sqrt(2 * config.n_layers)
    return std


def init_weight(parameter: Tensor, name: str, config: ModelConfig, seed: int) -> None:
    """Fill one whole weight in place."""
    if name.endswith(".bias"):
        parameter.zero_()
    elif parameter.ndim == 1:  # norms
        parameter.fill_(1.0)
    else:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest, "big") >> 1)
        parameter.normal_(0.0, weight_std(name, parameter.shape, config), generator=generator)
