"""Attention: one fused projection, positions, and torch's scaled dot-product attention.

Shapes: B batch, T new tokens, S all tokens so far, H heads, G key/value heads, D head width.

The fused qkv weight holds, for each key/value head, its query heads, then its key, then its value. That is Megatron's
layout: tensor parallelism can cut it between heads, which it cannot do with [all Q | all K | all V].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.config.model import ModelConfig
from ingot.model.dropout import attention_keys, dropout
from ingot.model.norm import make_norm


class KVCache:
    """Keys and values of the tokens seen so far, so that generating a token costs one token's work."""

    def __init__(self, config: ModelConfig, batch: int, max_tokens: int, device: torch.device, dtype: torch.dtype):
        shape = (config.n_layers, batch, config.kv_heads, max_tokens, config.head_width)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [B, G, T, D]; returns all of them [B, G, S, D]."""
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query causal self-attention."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        heads, groups, width = config.n_heads, config.kv_heads, config.head_width
        self.qkv = nn.Linear(config.d_model, (heads + 2 * groups) * width, bias=not config.no_bias)
        self.out = nn.Linear(heads * width, config.d_model, bias=not config.no_bias)
        if config.qk_ln:
            each = config.qk_ln == "heads"
            self.q_norm = make_norm(config, width if each else heads * width)
            self.k_norm = make_norm(config, width if each else groups * width)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: "Attend",
        cache: KVCache | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        return self.out(self.values(x, rotary, attend, cache, keys))

    def values(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: "Attend",
        cache: KVCache | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """The input of the output projection, [B, T, H D]."""
        qkv = self.project(x)
        q, k, v = qkv[:, :, :, :-2], qkv[:, :, :, -2], qkv[:, :, :, -1]
        if self.config.qk_ln == "heads":
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        elif self.config.qk_ln:
            q, k = self.q_norm(q.flatten(2)).to(v.dtype), self.k_norm(k.flatten(2)).to(v.dtype)
        q, k = (t.reshape(*x.shape[:1], qkv.shape[1], -1, v.shape[-1]).transpose(1, 2) for t in (q, k))
        v = v.transpose(1, 2)  # [B, G, T, D], as k; q is [B, H, T, D]
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        return attend(q, k, v, keys).transpose(1, 2).flatten(2)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values as the weight holds them, [B, T, G, queries + key + value, D]."""
        c = self.config
        qkv = self.qkv(x)
        if c.clip_qkv is not None:
            qkv = qkv.clamp(-c.clip_qkv, c.clip_qkv)
        return qkv.unflatten(2, (-1, c.n_heads // c.kv_heads + 2, c.head_width))


class Attend(Protocol):
    """softmax(q k^T scale + bias) v: q [B, H, T, D], k and v [B, G, S, D] to [B, H, T, D]. With `keys` [B] the weights
    are dropped out."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None) -> Tensor: ...


class AttentionOp(Protocol):
    """How the blocks of a model attend."""

    def prepare(self, new: int, total: int, device: torch.device, documents: Tensor | None = None) -> Attend:
        """Make what all blocks of a forward pass share, such as masks: the queries are the last `new` of `total`
        tokens, and attend within their document where `documents` [B, T] numbers them."""
        ...


class SdpaAttention:
    """torch's scaled_dot_product_attention, for any length, with a cache or without; ALiBi is an additive mask."""

    def __init__(self, config: ModelConfig, heads: slice | None = None):
        """`heads` are the query heads that this rank computes; None means all."""
        self.config, self.heads = config, heads or slice(0, config.n_heads)

    def slopes(self) -> Tensor | None:
        """The ALiBi slopes of this rank's heads, [H]."""
        if self.config.positions != "alibi":
            return None
        return alibi_slopes(self.config.n_heads, self.config.alibi_bias_max)[self.heads]

    def prepare(self, new: int, total: int, device: torch.device, documents: Tensor | None = None) -> Attend:
        slopes, window = self.slopes(), self.config.sliding_window
        masked = slopes is not None or documents is not None or total > (window or total)
        causal = not masked and new == total  # which torch's kernels know without a mask
        if not masked:  # the last tokens of a sequence: a mask that is stored nowhere
            return SdpaAttend(self.config, causal, None if causal or new == 1 else LastTokens.of(new, total),
                              (self.heads.start, total - new))  # fmt: skip
        bias = causal_bias(slopes, new, total, device, window)
        if documents is not None:
            other = documents[:, None, :, None] != documents[:, None, None, :]  # [B, 1, T, T]
            bias = bias.masked_fill(other, float("-inf"))
        return SdpaAttend(self.config, causal, bias, (self.heads.start, total - new))


@dataclass(frozen=True)
class LastTokens:
    """The causal mask of the last tokens of a sequence, which torch's fused kernels take as a flag.

    It has what torch reads of a `CausalBias`. That is a tensor, whose constructor allocates memory of the mask's shape.
    """

    seq_len_q: int
    seq_len_kv: int
    variant: Any
    dispatch: Callable[..., Tensor]

    @classmethod
    def of(cls, new: int, total: int) -> "LastTokens":
        from torch.nn.attention.bias import CausalBias, CausalVariant  # which imports the compiler

        return cls(new, total, CausalVariant.LOWER_RIGHT, CausalBias._dispatch)

    def _materialize(self, device: torch.device) -> Tensor:
        """For a device without such kernels."""
        shape = self.seq_len_q, self.seq_len_kv
        return torch.ones(shape, device=device, dtype=torch.bool).tril(self.seq_len_kv - self.seq_len_q)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, grouped: bool) -> Tensor:
        return self.dispatch(q, k, v, self, scale=scale, enable_gqa=grouped)


class SdpaAttend:
    """One forward pass of SdpaAttention."""

    def __init__(self, config: ModelConfig, causal: bool, bias: Tensor | LastTokens | None, first: tuple[int, int]):
        """`first` is the number of this rank's first head, and the place of the first query in the sequence."""
        self.scale = config.softmax_scale or 1 / math.sqrt(config.head_width)
        self.grouped = config.kv_heads != config.n_heads
        self.causal, self.bias, self.first, self.pdrop = causal, bias, first, config.attn_pdrop

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None) -> Tensor:
        if keys is not None and self.pdrop > 0:
            return self._with_dropout(q, k, v, keys)
        if isinstance(self.bias, LastTokens):
            return self.bias.attend(q, k, v, self.scale, self.grouped)
        bias = self.bias.to(q.dtype) if self.bias is not None else None
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=self.causal, scale=self.scale, enable_gqa=self.grouped
        )

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        """By the formula: torch's kernels draw masks of their own."""
        heads, new = q.shape[1:3]
        bias = self.bias
        if bias is None or isinstance(bias, LastTokens):
            bias = causal_bias(None, new, k.shape[2], q.device)
        q = q.unflatten(1, (k.shape[1], -1))  # [B, G, H / G, T, D]
        scores = (q @ k.unsqueeze(2).mT).flatten(1, 2).float() * self.scale + bias  # [B, H, T, S]
        rows = attention_keys(keys, self.first[0], heads, self.first[1], new)  # [B, H, T]
        weights = dropout(scores.softmax(-1), rows, self.pdrop).to(v.dtype)
        return (weights.unflatten(1, (k.shape[1], -1)) @ v.unsqueeze(2)).flatten(1, 2)


def alibi_slopes(n_heads: int, bias_max: float) -> Tensor:
    """One slope per head, as MPT defines them. Head counts that are not powers of two interleave the next power's."""
    power = 2 ** math.ceil(math.log2(n_heads))
    slopes = 2.0 ** -(torch.arange(1, power + 1, dtype=torch.float32) * (bias_max / power))
    if power != n_heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:n_heads]
    return slopes  # [H]


def causal_bias(slopes: Tensor | None, new: int, total: int, device: torch.device, window: int | None = None) -> Tensor:
    """Added to the scores of the last `new` of `total` tokens: ALiBi where there is one, -inf for the future and for
    tokens before the window."""
    query = torch.arange(total - new, total, device=device)[:, None]
    key = torch.arange(total, device=device)[None, :]
    distance = (key - query).float()  # [T, S], zero or less where visible
    bias = distance * slopes[:, None, None].to(device) if slopes is not None else torch.zeros_like(distance)[None]
    unseen = (distance > 0) | (distance <= -(window or total))
    return bias.masked_fill(unseen, float("-inf"))[None]  # [1, H or 1, T, S]


def rotary_tables(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, rotary_dim] for the half-split (GPT-NeoX, Llama) form of rotary positions [T]; of positions
    [B, T], [B, 1, T, rotary_dim]."""
    dim = config.rotary_dim
    inverse = 1.0 / config.rotary_base ** (torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = positions.float()[..., None] * inverse
    angles = torch.cat([angles, angles], dim=-1)
    angles = angles[:, None] if positions.ndim == 2 else angles
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first rotary_dim dimensions of every head; x is [B, H, T, D]."""
    cos, sin = (t.to(x.dtype) for t in tables)
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    half = torch.cat([-turned[..., dim // 2 :], turned[..., : dim // 2]], dim=-1)
    turned = turned * cos + half * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
