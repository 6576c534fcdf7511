"""Attention by the ALiBi kernel, and the projection before it without a copy of its result.

`AlibiAttention` fills the `attention_op` slot; `FusedAttention` replaces the attention modules, so that kernels read
the fused projection as it is and add up the gradient of its bias.
"""

import math

import torch
from torch import Tensor, nn

from ingot.config.model import ModelConfig
from ingot.model.attention import Attend, Attention, KVCache, SdpaAttention
from ingot.model.dropout import attention_keys
from ingot.model.kernels.bf16_weights import linear_without_bias_grad
from ingot.model.kernels.conditions import TRITON, autocast_dtype, kernels_apply, why_no_triton
from ingot.model.kernels.cudnn_attention import cudnn_attention, why_no_cudnn

MOST_WIDTH = 128  # of heads in our kernel: wider ones would not fit into the registers

if TRITON:
    from ingot.model.kernels.alibi_attention import alibi_attention
    from ingot.model.kernels.split_qkv import split_heads


def choose_attention(config: ModelConfig, device: torch.device, precision: str) -> tuple[str, str]:
    """The attention kernel for training on a device, and why."""
    special = {
        "ALiBi": config.positions == "alibi", "document masks": config.document_mask,
        "a sliding window": config.sliding_window is not None,
        "dropout of attention weights": config.attn_pdrop > 0,
        "deterministic=true": torch.are_deterministic_algorithms_enabled() and device.type == "cuda",
    }  # fmt: skip
    what = ", ".join(name for name, wanted in special.items() if wanted)
    if not what:
        return "sdpa", "plain causal attention; torch picks cuDNN, Flash or its CPU kernel"
    plain = "by the formula" if config.attn_pdrop > 0 else "torch's kernels with a mask"
    if device.type != "cuda":
        return "sdpa", f"{what}: {plain}; our kernel needs a GPU"
    if precision == "fp32":
        return "sdpa", f"{what}: {plain}; our kernel is not exact enough for fp32"
    if why := why_no_triton(device):
        return "sdpa", f"{what}: {plain}, not our kernel: {why}"
    if config.head_width > MOST_WIDTH:
        return "sdpa", f"{what}: {plain}; our kernel takes heads of up to {MOST_WIDTH}, not {config.head_width}"
    if what == "deterministic=true" and precision != "fp16":
        why = why_no_cudnn(device, config.n_heads, config.kv_heads, config.head_width)
        if why is None:
            return "cudnn", "deterministic=true: its deterministic backward pass, 2 to 25% slower than its default"
        return "triton", f"our kernel for {what}, 1.3 to 1.5 times the time of cuDNN's attention; {why}"
    cost = "which skips keys that are not seen"
    if config.attn_pdrop > 0:
        cost = "with which a step of 125m takes 16% longer than without (H200)"
    return "triton", f"our kernel for {what}, {cost}"


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
        self.pdrop, self.first_head = config.attn_pdrop, reference.heads.start

    def prepare(self, new: int, total: int, device: torch.device, documents: Tensor | None = None) -> Attend:
        if new != total or autocast_dtype(device) is None:  # fp32 products would be in TF32
            return self.reference.prepare(new, total, device, documents)
        return AlibiAttend(self, visible_span(new, self.window, documents, device))


class AlibiAttend:
    """One forward pass of AlibiAttention."""

    def __init__(self, op: AlibiAttention, span: Tensor | None):
        self.slopes, self.scale, self.span = op.slopes, op.scale, span
        self.pdrop, self.first_head = op.pdrop, op.first_head

    def fused(self, qkv: Tensor, keys: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """[B, T, G, queries + key + value, D] to [B, T, H, D]; the gradient of `bias`, which the projection has
        added, is left to the kernel."""
        rows = None
        if keys is not None and self.pdrop > 0:
            rows = attention_keys(keys, self.first_head, len(self.slopes), 0, qkv.shape[1])
        return alibi_attention(qkv, self.slopes, self.scale, self.span, bias, rows, self.pdrop)[0]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None) -> Tensor:
        q = q.transpose(1, 2).unflatten(2, (k.shape[1], -1))  # [B, T, G, queries, D]
        k, v = (t.transpose(1, 2).unsqueeze(3) for t in (k, v))
        return self.fused(torch.cat([q, k, v], 3), keys).transpose(1, 2)


class CudnnAttention:
    """cuDNN's deterministic kernels for plain causal attention in bf16; otherwise the reference."""

    def __init__(self, reference: SdpaAttention):
        self.reference = reference
        self.scale = reference.config.softmax_scale or 1 / math.sqrt(reference.config.head_width)

    def prepare(self, new: int, total: int, device: torch.device, documents: Tensor | None = None) -> Attend:
        if new != total or documents is not None or autocast_dtype(device) != torch.bfloat16:
            return self.reference.prepare(new, total, device, documents)
        return lambda q, k, v, keys: cudnn_attention(q, k, v, self.scale)[0]


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
                return attend.fused(self.project(x), keys).flatten(2)
            qkv, bias = linear_without_bias_grad(self.qkv, x)
            return attend.fused(qkv.unflatten(2, (groups, -1, width)), keys, bias).flatten(2)
        if fuse_bias and cache is None:
            q, k, v = split_heads(*linear_without_bias_grad(self.qkv, x), groups, width)
            return attend(q, k, v, keys).transpose(1, 2).flatten(2)
        return super().values(x, rotary, attend, cache, keys)
