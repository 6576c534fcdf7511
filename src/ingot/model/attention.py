"""Attention: one fused projection, positions, and the kernel that fits.

Shapes: B batch, T new tokens, S all tokens so far, H heads, G key/value heads, D head width.

The fused qkv weight holds, for each key/value head, its query heads, then its key, then its value. That is Megatron's
layout: it can be cut between heads for tensor parallelism, which [all Q | all K | all V] cannot.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.config import ModelConfig
from ingot.model.norm import make_norm


class KVCache:
    """Keys and values of the tokens seen so far, so that generating a token costs one token's work."""

    def __init__(self, config: ModelConfig, batch: int, max_tokens: int, device: torch.device, dtype: torch.dtype):
        shape = (config.n_layers, batch, config.kv_heads, max_tokens, config.head_width)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [B, G, T, D]; give back all of them [B, G, S, D]."""
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


def choose_kernel(config: ModelConfig, device: torch.device) -> tuple[str, str]:
    """The attention kernel for training on a device, and why."""
    if config.positions != "alibi":
        return "sdpa", "plain causal attention: torch picks cuDNN, Flash or its CPU kernel"
    if device.type == "cuda" and config.attn_pdrop == 0:
        return "flex", "FlexAttention adds the ALiBi bias inside the kernel"
    why = "FlexAttention has no dropout" if device.type == "cuda" else "FlexAttention has no backward on CPU"
    return "sdpa", f"ALiBi as an additive mask, since {why}"


def alibi_slopes(n_heads: int, bias_max: float) -> Tensor:
    """One slope per head, as MPT defines them; head counts that are no power of two interleave the next power's."""
    power = 2 ** math.ceil(math.log2(n_heads))
    slopes = 2.0 ** -(torch.arange(1, power + 1, dtype=torch.float32) * (bias_max / power))
    if power != n_heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:n_heads]
    return slopes  # [H]


def causal_bias(slopes: Tensor | None, new: int, total: int, device: torch.device) -> Tensor:
    """Added to the scores of the last `new` of `total` tokens: ALiBi where there is one, -inf for the future."""
    query = torch.arange(total - new, total, device=device)[:, None]
    key = torch.arange(total, device=device)[None, :]
    distance = (key - query).float()  # [T, S], zero or less where visible
    bias = distance * slopes[:, None, None].to(device) if slopes is not None else torch.zeros_like(distance)[None]
    return bias.masked_fill(distance > 0, float("-inf"))[None]  # [1, H or 1, T, S]


def rotary_tables(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, rotary_dim] for the half-split (GPT-NeoX, Llama) form of rotary positions [T]."""
    dim = config.rotary_dim
    inverse = 1.0 / config.rotary_base ** (torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = torch.outer(positions.float(), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first rotary_dim dimensions of every head; x is [B, H, T, D]."""
    cos, sin = (t.to(x.dtype) for t in tables)
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    half = torch.cat([-turned[..., dim // 2 :], turned[..., : dim // 2]], dim=-1)
    turned = turned * cos + half * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query causal self-attention."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        heads, groups, width = config.n_heads, config.kv_heads, config.head_width
        self.qkv = nn.Linear(config.d_model, (heads + 2 * groups) * width, bias=not config.no_bias)
        self.out = nn.Linear(heads * width, config.d_model, bias=not config.no_bias)
        if config.qk_ln:
            self.q_norm = make_norm(config, heads * width)
            self.k_norm = make_norm(config, groups * width)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: "Attend",
        cache: KVCache | None = None,
    ) -> Tensor:
        c = self.config
        qkv = self.qkv(x)
        batch, time, _ = qkv.shape
        if c.clip_qkv is not None:
            qkv = qkv.clamp(-c.clip_qkv, c.clip_qkv)
        per_group = c.n_heads // c.kv_heads
        qkv = qkv.view(batch, time, -1, per_group + 2, c.head_width)  # [B, T, G, queries + key + value, D]
        q, k, v = qkv[:, :, :, :per_group], qkv[:, :, :, per_group], qkv[:, :, :, per_group + 1]
        if isinstance(attend, AlibiAttend) and not c.qk_ln:
            return self.out(attend.fused(qkv).view(batch, time, -1))
        if c.qk_ln:
            q = self.q_norm(q.reshape(batch, time, -1)).to(v.dtype)
            k = self.k_norm(k.reshape(batch, time, -1)).to(v.dtype)
        q = q.reshape(batch, time, -1, c.head_width).transpose(1, 2)  # [B, H, T, D]
        k = k.reshape(batch, time, -1, c.head_width).transpose(1, 2)  # [B, G, T, D]
        v = v.transpose(1, 2)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = attend(q, k, v, dropout=c.attn_pdrop if self.training else 0.0)  # [B, H, T, D]
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


class Attend(Protocol):
    """softmax(q k^T scale + bias) v, for all layers of one forward pass."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor: ...


class SdpaAttend:
    """torch's scaled_dot_product_attention. Any length, with a cache or without; ALiBi as an additive mask."""

    def __init__(self, config: ModelConfig, new: int, total: int, device: torch.device, heads: slice = slice(None)):
        """The queries are the last `new` of `total` tokens, and of all query heads those in `heads`."""
        self.scale = config.softmax_scale or 1 / math.sqrt(config.head_width)
        self.grouped = config.kv_heads != config.n_heads
        alibi = config.positions == "alibi"
        self.causal = not alibi and new == total
        self.bias: Tensor | None = None
        if alibi or not (self.causal or new == 1):
            slopes = alibi_slopes(config.n_heads, config.alibi_bias_max)[heads] if alibi else None
            self.bias = causal_bias(slopes, new, total, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        bias = self.bias.to(q.dtype) if self.bias is not None else None
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=self.causal, scale=self.scale, enable_gqa=self.grouped
        )


class AlibiAttend:
    """Our Triton kernel, which reads queries, keys and values where the projection left them."""

    def __init__(self, config: ModelConfig, length: int, device: torch.device, heads: slice = slice(None)):
        self.length = length
        self.scale = config.softmax_scale or 1 / math.sqrt(config.head_width)
        self.slopes = alibi_slopes(config.n_heads, config.alibi_bias_max)[heads].to(device)  # [H]

    def fused(self, qkv: Tensor) -> Tensor:
        """[B, T, G, queries + key + value, D] to [B, T, H, D]."""
        from ingot.model.alibi import alibi_attention

        return alibi_attention(qkv, self.slopes, self.scale)[0]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        groups = k.shape[1]
        q = q.transpose(1, 2).unflatten(2, (groups, -1))  # [B, T, G, queries, D]
        k, v = (t.transpose(1, 2).unsqueeze(3) for t in (k, v))
        return self.fused(torch.cat([q, k, v], 3)).transpose(1, 2)


class FlexAttend:
    """FlexAttention with ALiBi inside the kernel, for training on sequences of one length.

    The block mask is made here, once: inside a compiled model it would be traced again and again.
    """

    def __init__(self, config: ModelConfig, length: int, device: torch.device, heads: slice = slice(None)):
        from torch.nn.attention.flex_attention import create_block_mask

        self.length = length
        self.scale = config.softmax_scale or 1 / math.sqrt(config.head_width)
        self.grouped = config.kv_heads != config.n_heads
        self.slopes = alibi_slopes(config.n_heads, config.alibi_bias_max)[heads].to(device)  # [H]
        self.blocks = create_block_mask(_causal, None, None, length, length, device=str(device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        slopes = self.slopes

        def alibi(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + slopes[head] * (key - query)

        kernel = _flex_kernel(torch.compiler.is_compiling())
        return kernel(q, k, v, score_mod=alibi, block_mask=self.blocks, scale=self.scale, enable_gqa=self.grouped)


def _causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _flex_kernel(compiling: bool) -> Callable[..., Tensor]:
    """FlexAttention itself inside a compiled model; outside, compiled alone (uncompiled it is slow and large)."""
    from torch.nn.attention.flex_attention import flex_attention

    global _compiled_flex
    if compiling:
        return flex_attention
    if _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention)
    return _compiled_flex


_compiled_flex: Callable[..., Tensor] | None = None
