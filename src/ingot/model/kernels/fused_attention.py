"""Attention by the ALiBi kernel, and the projection before it without a copy of its result.

`AlibiAttention` fills the `attention_op` slot; `FusedAttention` replaces the attention modules, so that kernels read
the fused projection as it is and add up the gradient of its bias.
"""

import math

import torch
from torch import Tensor, nn

from ingot.config.model import ModelConfig
from ingot.model.attention import Attend, Attention, KVCache, SdpaAttention
from ingot.model.kernels.bf16_weights import linear_without_bias_grad
from ingot.model.kernels.conditions import TRITON, autocast_dtype, kernels_apply

if TRITON:
    from ingot.model.kernels.alibi_attention import alibi_attention
    from ingot.model.kernels.split_qkv import split_heads


def choose_attention(config: ModelConfig, device: torch.device, precision: str) -> tuple[str, str]:
    """The attention kernel for training on a device, and why."""
    special = {
        "ALiBi": config.positions == "alibi", "document masks": config.document_mask,
        "a sliding window": config.sliding_window is not None,
    }  # fmt: skip
    what = ", ".join(name for name, wanted in special.items() if wanted)
    if not what:
        return "sdpa", "plain causal attention: torch picks cuDNN, Flash or its CPU kernel"
    if device.type != "cuda":
        return "sdpa", f"{what} as an additive mask, since our kernel for it needs a GPU"
    if precision == "fp32":
        return "sdpa", f"{what} as an additive mask, since our kernel for it is not exact enough for fp32"
    if config.attn_pdrop > 0:
        return "sdpa", f"{what} as an additive mask, since our kernel for it has no dropout"
    if not TRITON:
        return "sdpa", f"{what} as an additive mask, since our kernel for it needs Triton, which is not installed"
    return "triton", f"our kernel for {what}, which skips what is not seen"


def visible_span(length: int, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor | None:
    """The first key that each query sees and the last query that sees each key, [2, B or 1, T].

    None where every query sees all keys before it. `documents` [B, T] are numbered in rising order.
    """
    if window is None and documents is None:
        return None
    at = torch.arange(length, device=device)[None]
    window = window or length
    first, last = (at - window + 1).clamp(min=0), (at + window - 1).clamp(max=length - 1)
    if documents is not None:
        first = torch.maximum(first, torch.searchsorted(documents, documents))
        last = torch.minimum(last, torch.searchsorted(documents, documents, right=True) - 1)
    return torch.stack([first, last]).int()


class AlibiAttention:
    """The Triton kernel for training with ALiBi, sliding windows and document masks; otherwise the reference."""

    def __init__(self, reference: SdpaAttention, device: torch.device):
        config = reference.config
        self.reference, self.window = reference, config.sliding_window
        self.scale = config.softmax_scale or 1 / math.sqrt(config.head_width)
        slopes = reference.slopes()
        if slopes is None:
            slopes = torch.zeros(config.n_heads)[reference.heads]
        self.slopes = slopes.to(device)  # [H]

    def prepare(self, new: int, total: int, device: torch.device, documents: Tensor | None = None) -> Attend:
        if new != total or autocast_dtype(device) is None:  # fp32 products would be in TF32
            return self.reference.prepare(new, total, device, documents)
        return AlibiAttend(self.slopes, self.scale, visible_span(new, self.window, documents, device))


class AlibiAttend:
    """One forward pass of AlibiAttention."""

    def __init__(self, slopes: Tensor, scale: float, span: Tensor | None):
        self.slopes, self.scale, self.span = slopes, scale, span

    def fused(self, qkv: Tensor, bias: Tensor | None = None) -> Tensor:
        """[B, T, G, queries + key + value, D] to [B, T, H, D]; the gradient of `bias`, which the projection has
        added, is left to the kernel."""
        return alibi_attention(qkv, self.slopes, self.scale, self.span, bias)[0]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None) -> Tensor:
        q = q.transpose(1, 2).unflatten(2, (k.shape[1], -1))  # [B, T, G, queries, D]
        k, v = (t.transpose(1, 2).unsqueeze(3) for t in (k, v))
        return self.fused(torch.cat([q, k, v], 3)).transpose(1, 2)


class FusedAttention(Attention):
    """Attention whose queries, keys and values stay in the fused projection. It knows neither rotary positions nor
    norms of queries and keys, and shares the layers of the module that it replaces."""

    def __init__(self, attention: Attention, fuse_bias: bool):
        """`fuse_bias`: whether kernels make the gradient of the projection's bias."""
        nn.Module.__init__(self)
        self.config, self.layer, self.training = attention.config, attention.layer, attention.training
        self.qkv, self.out = attention.qkv, attention.out
        self.fuse_bias = fuse_bias and self.config.clip_qkv is None

    def values(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: Attend,
        cache: KVCache | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        groups, width = self.config.kv_heads, self.config.head_width
        fuse_bias = self.fuse_bias and kernels_apply(x)
        if isinstance(attend, AlibiAttend) and cache is None:
            if not fuse_bias:
                return attend.fused(self.project(x)).flatten(2)
            qkv, bias = linear_without_bias_grad(self.qkv, x)
            return attend.fused(qkv.unflatten(2, (groups, -1, width)), bias).flatten(2)
        if fuse_bias and cache is None:
            q, k, v = split_heads(*linear_without_bias_grad(self.qkv, x), groups, width)
            return attend(q, k, v, keys).transpose(1, 2).flatten(2)
        return super().values(x, rotary, attend, cache, keys)
