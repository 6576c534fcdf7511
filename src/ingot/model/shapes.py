"""What a model's config says about its size: parameter shapes."""

import torch
from torch import Tensor

from ingot.config.model import ModelConfig
from ingot.model.gpt import GPT


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a hidden weight matrix: not an embedding, head, norm or bias."""
    return name.startswith("blocks.") and parameter.ndim == 2


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape, in the model's own order; nothing is allocated."""
    with torch.device("meta"):
        model = GPT(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}
