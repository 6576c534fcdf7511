"""The one GPT. Every family is this class with other parts; it knows nothing of devices or how it is spread.

Shapes: B batch, T tokens, d d_model, V vocab_size.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ingot.model.attention import Attend, Attention, KVCache, rotary_tables
from ingot.model.config import ModelConfig
from ingot.model.mlp import MLP
from ingot.model.norm import make_norm

IGNORE = -100  # a label that takes no part in the loss


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.parallel = config.parallel_residual
        self.norm_1 = make_norm(config, config.d_model)
        self.attn = Attention(config, layer)
        self.norm_2 = make_norm(config, config.d_model)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, attend: Attend, cache: KVCache | None = None
    ) -> Tensor:
        attended = self.dropout(self.attn(self.norm_1(x), rotary, attend, cache))
        if self.parallel:
            return x + attended + self.dropout(self.mlp(self.norm_2(x)))
        x = x + attended
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """Token ids [B, T] to logits [B, T, V], or with labels to the summed cross-entropy."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_rows, config.d_model)
        if config.positions == "learned":
            self.wpe = nn.Embedding(config.context, config.d_model)
        self.dropout = nn.Dropout(config.emb_pdrop)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm_f = make_norm(config, config.d_model)
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.d_model, config.vocab_rows, bias=False)
        self.attention_kernel = "sdpa"
        self.recompute_blocks = False

    def forward(self, tokens: Tensor, labels: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        hidden = self.hidden(tokens, cache)
        logits = self.logits(hidden)
        if labels is None:
            return logits
        return F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )  # scalar: the caller divides by the tokens of the whole global batch

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """The normalised output of the last block, [B, T, d]."""
        config, device = self.config, tokens.device
        new = tokens.shape[1]
        start = cache.length if cache is not None else 0
        x = self.wte(tokens)  # [B, T, d]
        if config.positions == "learned":
            x = x + self.wpe(torch.arange(start, start + new, device=device))
        x = self.dropout(x)
        rotary = rotary_tables(config, start, new, device) if config.positions == "rotary" else None
        attend = Attend(config, self.attention_kernel, new, start + new, device)
        for block in self.blocks:
            if self.recompute_blocks and self.training:
                x = checkpoint(block, x, rotary, attend, use_reentrant=False)
            else:
                x = block(x, rotary, attend, cache)
        if cache is not None:
            cache.length += new
        return self.norm_f(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the real tokens; the padding rows of the embedding are cut off."""
        weight = self.wte.weight if self.config.tie_word_embeddings else self.head.weight
        return F.linear(hidden, weight)[..., : self.config.vocab_size]  # [B, T, V]

    def named_matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Hidden weight matrices: not embeddings, head, norms or biases."""
        for name, parameter in self.named_parameters():
            if name.startswith("blocks.") and parameter.ndim == 2:
                yield name, parameter


def parameter_count(config: ModelConfig) -> int:
    """Exact number of parameters, from the model itself; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def flops_per_token(config: ModelConfig, seq_len: int, causal: bool = False) -> float:
    """Training FLOPs per token, forward and backward: 6 N + 12 L d S, the full square of attention as the field
    reports it; `causal` counts only the half that is computed. N leaves out an input embedding that is not the head.
    """
    n = parameter_count(config)
    if not config.tie_word_embeddings:
        n -= config.vocab_rows * config.d_model
    attention = 12 * config.n_layers * config.n_heads * config.head_width * seq_len
    return 6 * n + attention / (2 if causal else 1)
