"""What a model's config says about its size: parameter shapes and FLOPs."""

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


def flops_per_token(config: ModelConfig, seq_len: int, causal: bool = False) -> float:
    """Training FLOPs per token, forward and backward: 6 N + 12 L d S.

    The attention term is the full square, as the field reports it; `causal` counts the half that is computed. N leaves
    out an input embedding that is not also the head.
    """
    n = config.parameters
    if not config.tie_word_embeddings:
        n -= config.vocab_rows * config.d_model
    attention = 12 * config.n_layers * config.n_heads * config.head_width * seq_len
    return 6 * n + attention / (2 if causal else 1)
