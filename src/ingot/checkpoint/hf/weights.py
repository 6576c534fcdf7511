"""Converts parameters to Hugging Face names and layouts and back, one at a time.

Each conversion rearranges rows or transposes, so a round trip preserves every bit. Shapes: H heads, G key/value
heads, D head width, d d_model.
"""

import torch
from torch import Tensor

from ingot.checkpoint.hf.config import GPT2, LLAMA, MPT, NEOX
from ingot.config.model import ModelConfig

PREFIX = {MPT: "transformer.", GPT2: "transformer.", NEOX: "gpt_neox.", LLAMA: "model."}
EMBEDDINGS = ("wte.weight", "head.weight")  # their rows may be padded
# Our module -> theirs, without the prefix, which some published files omit. The head has no prefix.
MODULES: dict[str, dict[str, str]] = {
    MPT: {
        "wte": "wte", "norm_f": "norm_f", "head": "lm_head",
        "norm_1": "blocks.{}.norm_1", "attn.qkv": "blocks.{}.attn.Wqkv", "attn.out": "blocks.{}.attn.out_proj",
        "norm_2": "blocks.{}.norm_2", "mlp.up": "blocks.{}.ffn.up_proj", "mlp.down": "blocks.{}.ffn.down_proj",
    },
    GPT2: {
        "wte": "wte", "wpe": "wpe", "norm_f": "ln_f", "head": "lm_head",
        "norm_1": "h.{}.ln_1", "attn.qkv": "h.{}.attn.c_attn", "attn.out": "h.{}.attn.c_proj",
        "norm_2": "h.{}.ln_2", "mlp.up": "h.{}.mlp.c_fc", "mlp.down": "h.{}.mlp.c_proj",
    },
    NEOX: {
        "wte": "embed_in", "norm_f": "final_layer_norm", "head": "embed_out",
        "norm_1": "layers.{}.input_layernorm", "attn.qkv": "layers.{}.attention.query_key_value",
        "attn.out": "layers.{}.attention.dense", "norm_2": "layers.{}.post_attention_layernorm",
        "mlp.up": "layers.{}.mlp.dense_h_to_4h", "mlp.down": "layers.{}.mlp.dense_4h_to_h",
    },
    LLAMA: {
        "wte": "embed_tokens", "norm_f": "norm", "head": "lm_head",
        "norm_1": "layers.{}.input_layernorm", "attn.qkv": "layers.{}.self_attn.{{q,k,v}}_proj",
        "attn.out": "layers.{}.self_attn.o_proj", "norm_2": "layers.{}.post_attention_layernorm",
        "mlp.gate": "layers.{}.mlp.gate_proj", "mlp.up": "layers.{}.mlp.up_proj", "mlp.down": "layers.{}.mlp.down_proj",
    },
}  # fmt: skip


def hf_names(hf: str, name: str) -> list[str]:
    """The names of our parameter in a class, without prefix: one, or three for Llama's q, k and v."""
    module, _, leaf = name.rpartition(".")
    if module.startswith("blocks."):
        _, layer, module = module.split(".", 2)
        theirs = MODULES[hf][module].format(layer)
    else:
        theirs = MODULES[hf][module]
    if "{q,k,v}" in theirs:
        return [f"{theirs.replace('{q,k,v}', part)}.{leaf}" for part in "qkv"]
    return [f"{theirs}.{leaf}"]


def to_hf(hf: str, config: ModelConfig, name: str, tensor: Tensor) -> list[Tensor]:
    """Our parameter as the tensors that `hf_names` lists. Padding rows of the vocabulary are cut."""
    if name in EMBEDDINGS:
        return [tensor[: config.vocab_size]]
    if ".attn.qkv." in name and hf != NEOX:
        parts = split_qkv(config, tensor)
        tensors = list(parts) if hf == LLAMA else [torch.cat(parts)]
    else:
        tensors = [tensor]
    return [t.T for t in tensors] if _transposed(hf, name, tensor) else tensors


def from_hf(hf: str, config: ModelConfig, name: str, tensors: list[Tensor]) -> Tensor:
    """The inverse of `to_hf`, for a vocabulary without padding."""
    if _transposed(hf, name, tensors[0]):
        tensors = [t.T for t in tensors]
    if ".attn.qkv." in name and hf != NEOX:
        q, k, v = tensors if hf == LLAMA else tensors[0].chunk(3)
        return fuse_qkv(config, q, k, v)
    return tensors[0]


def _transposed(hf: str, name: str, tensor: Tensor) -> bool:
    """GPT-2 stores the weights of its linear layers as [in, out]."""
    return hf == GPT2 and name.startswith("blocks.") and tensor.ndim == 2


def split_qkv(config: ModelConfig, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Our fused rows (for each key/value head: its queries, its key, its value) as Q [H*D, ...], K and V [G*D, ...]."""
    per_group = config.n_heads // config.kv_heads
    grouped = fused.reshape(config.kv_heads, per_group + 2, config.head_width, *fused.shape[1:])
    q, k, v = grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1]
    rest = fused.shape[1:]
    return q.reshape(-1, *rest), k.reshape(-1, *rest), v.reshape(-1, *rest)


def fuse_qkv(config: ModelConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The inverse of `split_qkv`."""
    width, rest = config.head_width, q.shape[1:]
    groups = k.shape[0] // width  # of a slice, fewer than the model has
    heads = [t.reshape(groups, -1, width, *rest) for t in (q, k, v)]  # [G, H/G or 1, D, ...]
    return torch.cat(heads, dim=1).reshape(-1, *rest)
