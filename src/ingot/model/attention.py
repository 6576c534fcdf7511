"""Attention: one fused projection, positions, and the kernel that fits.

Shapes: B batch, T new tokens, S all tokens so far, H heads, G key/value heads, D head width.

The fused qkv weight holds, for each key/value head, its query heads, then its key, then its value. That is Megatron's
layout: it can be cut between heads for tensor parallelism, which [all Q | all K | all V] cannot.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.config.model import ModelConfig
from ingot.model.kernels.bf16_weights import TRITON, autocast_dtype, fuses, leave_bias
from ingot.model.norm import make_norm

if TRITON:
    from ingot.model.kernels.split_qkv import split_heads


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
    special = {
        "ALiBi": config.positions == "alibi", "documents apart": config.document_mask,
        "a sliding window": config.sliding_window is not None,
    }  # fmt: skip
    what = ", ".join(name for name, wanted in special.items() if wanted)
    if not what:
        return "sdpa", "plain causal attention: torch picks cuDNN, Flash or its CPU kernel"
    if device.type != "cuda":
        return "sdpa", f"{what} as an additive mask, since our kernel for it needs a GPU"
    if config.attn_pdrop > 0:
        return "sdpa", f"{what} as an additive mask, since our kernel for it has no dropout"
    if not TRITON:
        return "sdpa", f"{what} as an additive mask, since our kernel for it needs Triton, which is not installed"
    return "triton", f"our kernel for {what}, which skips what is not seen"


def alibi_slopes(n_heads: int, bias_max: float) -> Tensor:
    """One slope per head, as MPT defines them; head counts that are no power of two interleave the next power's."""
    power = 2 ** math.ceil(math.log2(n_heads))
    slopes = 2.0 ** -(torch.arange(1, power + 1, dtype=torch.float32) * (bias_max / power))
    if power != n_heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:n_heads]
    return slopes  # [H]


def own_slopes(config: ModelConfig, heads: slice | None) -> Tensor:
    """The slopes of all heads, or of those that a process has."""
    slopes = alibi_slopes(config.n_heads, config.alibi_bias_max)
    return slopes[heads] if heads is not None else slopes


def causal_bias(slopes: Tensor | None, new: int, total: int, device: torch.device, window: int | None = None) -> Tensor:
    """Added to the scores of the last `new` of `total` tokens: ALiBi where there is one, -inf for the future and for
    what lies before the window."""
    query = torch.arange(total - new, total, device=device)[:, None]
    key = torch.arange(total, device=device)[None, :]
    distance = (key - query).float()  # [T, S], zero or less where visible
    bias = distance * slopes[:, None, None].to(device) if slopes is not None else torch.zeros_like(distance)[None]
    unseen = (distance > 0) | (distance <= -(window or total))
    return bias.masked_fill(unseen, float("-inf"))[None]  # [1, H or 1, T, S]


def visible_span(length: int, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor | None:
    """The first key that each query sees and the last query that sees each key, [2, B or 1, T], where it is not all;
    documents [B, T] are numbered in rising order."""
    if window is None and documents is None:
        return None
    at = torch.arange(length, device=device)[None]
    window = window or length
    first, last = (at - window + 1).clamp(min=0), (at + window - 1).clamp(max=length - 1)
    if documents is not None:
        first = torch.maximum(first, torch.searchsorted(documents, documents))
        last = torch.minimum(last, torch.searchsorted(documents, documents, right=True) - 1)
    return torch.stack([first, last]).int()


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
    ) -> Tensor:
        return self.out(self.attended(x, rotary, attend, cache))

    def attended(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, attend: "Attend", cache: KVCache | None
    ) -> Tensor:
        """What the output projection gets, [B, T, H D]."""
        c = self.config
        as_it_lies = not c.qk_ln and rotary is None and cache is None
        dropout = c.attn_pdrop if self.training else 0.0
        per_group = c.n_heads // c.kv_heads
        if as_it_lies and c.clip_qkv is None and fuses(self.qkv, x):
            qkv, bias = leave_bias(self.qkv, x)
            if isinstance(attend, AlibiAttend):
                return attend.fused(qkv.unflatten(2, (c.kv_heads, per_group + 2, c.head_width)), bias).flatten(2)
            q, k, v = split_heads(qkv, bias, c.kv_heads, c.head_width)
            return attend(q, k, v, dropout).transpose(1, 2).flatten(2)
        qkv = self.qkv(x)
        batch, time, _ = qkv.shape
        if c.clip_qkv is not None:
            qkv = qkv.clamp(-c.clip_qkv, c.clip_qkv)
        qkv = qkv.view(batch, time, -1, per_group + 2, c.head_width)  # [B, T, G, queries + key + value, D]
        q, k, v = qkv[:, :, :, :per_group], qkv[:, :, :, per_group], qkv[:, :, :, per_group + 1]
        if as_it_lies and isinstance(attend, AlibiAttend) and attend.takes(qkv):
            return attend.fused(qkv).view(batch, time, -1)
        if c.qk_ln == "heads":
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        elif c.qk_ln:
            q = self.q_norm(q.reshape(batch, time, -1)).to(v.dtype)
            k = self.k_norm(k.reshape(batch, time, -1)).to(v.dtype)
        q = q.reshape(batch, time, -1, c.head_width).transpose(1, 2)  # [B, H, T, D]
        k = k.reshape(batch, time, -1, c.head_width).transpose(1, 2)  # [B, G, T, D]
        v = v.transpose(1, 2)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        return attend(q, k, v, dropout).transpose(1, 2).flatten(2)


class Attend(Protocol):
    """softmax(q k^T scale + bias) v, for all layers of one forward pass."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor: ...


class SdpaAttend:
    """torch's scaled_dot_product_attention. Any length, with a cache or without; ALiBi as an additive mask."""

    def __init__(self, config: ModelConfig, new: int, total: int, device: torch.device, heads: slice | None = None):
        """The queries are the last `new` of `total` tokens, and of all query heads those in `heads`."""
        self.scale = config.softmax_scale or 1 / math.sqrt(config.head_width)
        self.grouped = config.kv_heads != config.n_heads
        alibi, self.window = config.positions == "alibi", config.sliding_window
        masked = alibi or total > (self.window or total)
        self.causal = not masked and new == total
        self.bias: Tensor | None = None
        if masked or not (self.causal or new == 1):
            slopes = own_slopes(config, heads) if alibi else None
            self.bias = causal_bias(slopes, new, total, device, self.window)

    def within(self, documents: Tensor) -> "SdpaAttend":
        """Attention that keeps to documents, which are numbered [B, T]."""
        apart = documents[:, None, :, None] != documents[:, None, None, :]  # [B, 1, T, T]
        time = documents.shape[1]
        bias = self.bias
        if bias is None:
            bias = causal_bias(None, time, time, documents.device, self.window)
        self.bias, self.causal = bias.masked_fill(apart, float("-inf")), False
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        bias = self.bias.to(q.dtype) if self.bias is not None else None
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=self.causal, scale=self.scale, enable_gqa=self.grouped
        )


class AlibiAttend:
    """Our Triton kernel for training on sequences of one length, with ALiBi (or slopes of zero), windows and documents.
    It reads the fused projection where it lies."""

    def __init__(
        self,
        config: ModelConfig,
        length: int,
        device: torch.device,
        heads: slice | None = None,
        slopes: Tensor | None = None,
        documents: Tensor | None = None,
    ):
        self.config, self.length, self.heads = config, length, heads
        self.scale = config.softmax_scale or 1 / math.sqrt(config.head_width)
        if slopes is None:
            slopes = own_slopes(config, heads).to(device)
            slopes = slopes if config.positions == "alibi" else torch.zeros_like(slopes)
        self.slopes = slopes  # [H]
        self.span = visible_span(length, config.sliding_window, documents, device)
        self.exact: SdpaAttend | None = None
        if documents is None or autocast_dtype(device) is None:  # a mask for each sequence is large
            self.exact = SdpaAttend(config, length, length, device, heads)
            if documents is not None:
                self.exact.within(documents)

    def within(self, documents: Tensor) -> "AlibiAttend":
        """Attention that keeps to documents, which are numbered [B, T]."""
        return AlibiAttend(self.config, self.length, documents.device, self.heads, self.slopes, documents)

    def takes(self, qkv: Tensor) -> bool:
        """Whether the kernel is exact enough for a projection: in fp32 its products would be in TF32."""
        return qkv.dtype != torch.float32

    def fused(self, qkv: Tensor, bias: Tensor | None = None) -> Tensor:
        """[B, T, G, queries + key + value, D] to [B, T, H, D]; a bias whose gradient is left to us may come with it."""
        from ingot.model.kernels.alibi_attention import alibi_attention

        return alibi_attention(qkv, self.slopes, self.scale, self.span, bias)[0]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        if not self.takes(q):
            assert self.exact is not None
            return self.exact(q, k, v, dropout)
        q = q.transpose(1, 2).unflatten(2, (k.shape[1], -1))  # [B, T, G, queries, D]
        k, v = (t.transpose(1, 2).unsqueeze(3) for t in (k, v))
        return self.fused(torch.cat([q, k, v], 3)).transpose(1, 2)
