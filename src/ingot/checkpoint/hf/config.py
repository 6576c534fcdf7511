"""Our model config as a Hugging Face config.json, and back.

A plain dict on both sides, so neither direction needs transformers. Four of its classes can compute what our GPT
computes; a model or a file that none of them expresses exactly is refused by the name of the field, never approximated.
Only dropout may be lost: it is not part of the function that is exported.
"""

import math
from typing import Any

from pydantic import ValidationError

from ingot.config.model import ModelConfig
from ingot.errors import CheckpointError

MPT, GPT2, NEOX, LLAMA = "MptForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "LlamaForCausalLM"
CLASS_OF_TYPE = {"mpt": MPT, "gpt2": GPT2, "gpt_neox": NEOX, "llama": LLAMA}
ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
}
ALIASES = {  # spellings that transformers takes for every model type
    "mpt": {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    "gpt2": {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
             "max_position_embeddings": "n_positions"},
}  # fmt: skip
KEYS: dict[str, dict[str, tuple[str, Any]]] = {  # our field: their key, and what its absence means to transformers
    "mpt": {
        "d_model": ("d_model", 2048), "n_heads": ("n_heads", 16), "n_layers": ("n_layers", 24),
        "vocab_size": ("vocab_size", 50368), "max_seq_len": ("max_seq_len", 2048),
        "norm": ("norm_type", "low_precision_layernorm"), "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", True), "emb_pdrop": ("emb_pdrop", 0.0),
        "resid_pdrop": ("resid_pdrop", 0.0), "init_std": ("initializer_range", 0.02),
    },
    "gpt2": {
        "d_model": ("n_embd", 768), "n_heads": ("n_head", 12), "n_layers": ("n_layer", 12),
        "ffn_hidden_size": ("n_inner", None), "vocab_size": ("vocab_size", 50257), "max_seq_len": ("n_positions", 1024),
        "norm_eps": ("layer_norm_epsilon", 1e-5), "tie_word_embeddings": ("tie_word_embeddings", True),
        "emb_pdrop": ("embd_pdrop", 0.1), "resid_pdrop": ("resid_pdrop", 0.1), "attn_pdrop": ("attn_pdrop", 0.1),
        "init_std": ("initializer_range", 0.02),
    },
    "gpt_neox": {
        "d_model": ("hidden_size", 6144), "n_heads": ("num_attention_heads", 64), "n_layers": ("num_hidden_layers", 44),
        "ffn_hidden_size": ("intermediate_size", 24576), "vocab_size": ("vocab_size", 50432),
        "max_seq_len": ("max_position_embeddings", 2048), "norm_eps": ("layer_norm_eps", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", False), "parallel_residual": ("use_parallel_residual", True),
        "rotary_base": ("rotary_emb_base", 10000.0), "rotary_pct": ("rotary_pct", 0.25),
        "resid_pdrop": ("hidden_dropout", 0.0), "attn_pdrop": ("attention_dropout", 0.0),
        "init_std": ("initializer_range", 0.02),
    },
    "llama": {
        "d_model": ("hidden_size", 4096), "n_heads": ("num_attention_heads", 32), "n_layers": ("num_hidden_layers", 32),
        "head_dim": ("head_dim", None), "n_kv_heads": ("num_key_value_heads", None),
        "ffn_hidden_size": ("intermediate_size", 11008), "vocab_size": ("vocab_size", 32000),
        "max_seq_len": ("max_position_embeddings", 2048), "norm_eps": ("rms_norm_eps", 1e-6),
        "tie_word_embeddings": ("tie_word_embeddings", False), "rotary_base": ("rope_theta", 10000.0),
        "attn_pdrop": ("attention_dropout", 0.0), "init_std": ("initializer_range", 0.02),
    },
}  # fmt: skip
OPEN = {"max_seq_len": "context", "ffn_hidden_size": "ffn_width", "n_kv_heads": "kv_heads", "head_dim": "head_width"}
"""Fields that a config may leave unset, and the properties with their actual values."""


def hf_class(config: ModelConfig) -> str:
    """The transformers class that computes exactly this model."""
    if config.positions == "none":
        raise _inexpressible(config, "positions", "no Hugging Face class that we export to works without positions")
    rotary = LLAMA if config.norm == "rmsnorm" else NEOX
    name = {"alibi": MPT, "learned": GPT2, "rotary": rotary}[config.positions]
    for field, fits, need in _needs(config, name):
        if not fits:
            raise _inexpressible(config, field, f"{name}, the closest Hugging Face class, {need}")
    return name


def _inexpressible(config: ModelConfig, field: str, reason: str) -> CheckpointError:
    return CheckpointError(f"cannot export a model with {field}={getattr(config, field)}: {reason}")


def _needs(config: ModelConfig, name: str) -> list[tuple[str, bool, str]]:
    """What a class hard-codes: the field, whether the model agrees, and what the class does."""
    c, biased = config, name in (GPT2, NEOX)
    default_scale = c.softmax_scale is None or math.isclose(c.softmax_scale, c.head_width**-0.5)
    norm_bias = c.norm_bias is None or c.has_norm_bias == biased
    needs = [
        ("qk_ln", not c.qk_ln, "does not normalize queries and keys"),
        ("sliding_window", c.sliding_window is None, "attends to all previous tokens"),
        ("norm_bias", norm_bias, f"has {'biases' if biased else 'none'} in its norms"),
        ("parallel_residual", not c.parallel_residual or name == NEOX, "runs attention before the MLP"),
        ("clip_qkv", c.clip_qkv is None or name == MPT, "does not clip"),
        ("softmax_scale", default_scale or name == MPT, "scales by 1/sqrt(head_dim)"),
    ]
    if name == LLAMA:
        return [
            *needs,
            ("no_bias", c.no_bias, "has no biases"),
            ("activation", c.activation == "swiglu", "has a swiglu MLP"),
            ("rotary_pct", c.rotary_dim == c.head_width, "rotates whole heads"),
            ("n_heads", c.d_model % c.n_heads == 0, "wants n_heads to divide d_model even when head_dim is given"),
        ]
    gelu = ("gelu",) if name == MPT else ("gelu", "gelu_tanh")
    needs += [
        ("norm", c.norm != "rmsnorm", "uses layer norms"),
        ("no_bias", c.no_bias != biased, "has biases" if biased else "has no biases"),
        ("activation", c.activation in gelu, f"has an MLP with {' or '.join(gelu)}"),
        ("n_kv_heads", c.kv_heads == c.n_heads, "has a key and a value for every head"),
        ("head_dim", c.head_width * c.n_heads == c.d_model, "divides d_model evenly into heads"),
    ]
    if name == MPT:
        width = "ffn_hidden_size" if c.ffn_hidden_size else "expansion_ratio"
        needs += [
            (width, c.ffn_width == 4 * c.d_model, "has an MLP of 4 x d_model"),
            ("alibi_bias_max", c.alibi_bias_max == 8, "takes alibi_bias_max as 8 whatever its config says"),
        ]
    return needs


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json for the model's class, in the keys that both old and new transformers read."""
    c, name = config, hf_class(config)
    kind = next(kind for kind, of in CLASS_OF_TYPE.items() if of == name)
    values = {theirs: getattr(c, OPEN.get(ours, ours)) for ours, (theirs, _) in KEYS[kind].items()}
    values |= {"architectures": [name], "model_type": kind, "use_cache": True}
    act = "gelu" if c.activation == "gelu" else "gelu_new"
    rope = {"rope_type": "default", "rope_theta": c.rotary_base}
    if name == MPT:
        attention = {"alibi": True, "alibi_bias_max": 8, "clip_qkv": c.clip_qkv, "softmax_scale": c.softmax_scale}
        return {**values, "expansion_ratio": 4, "no_bias": True, "learned_pos_emb": False, "attn_config": attention}
    if name == GPT2:
        return {**values, "activation_function": act}
    if name == NEOX:
        rope["partial_rotary_factor"] = c.rotary_pct
        return {**values, "hidden_act": act, "attention_bias": True, "rope_parameters": rope}
    return {**values, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_parameters": rope}


def from_hf_config(values: dict[str, Any], where: str) -> ModelConfig:
    """Our config for a config.json. Absent keys have the defaults of transformers."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CLASS_OF_TYPE:
        raise CheckpointError(f"{where}: model_type is {kind!r}; we import {', '.join(CLASS_OF_TYPE)}")
    _only(values, where, quantization_config=(None,))
    aliases = ALIASES.get(kind, {})
    values = {aliases.get(key, key): value for key, value in values.items()}
    ours = {field: values.get(theirs, absent) for field, (theirs, absent) in KEYS[kind].items()}
    ours |= {"mpt": _from_mpt, "gpt2": _from_gpt2, "gpt_neox": _from_neox, "llama": _from_llama}[kind](values, where)
    try:
        return ModelConfig.model_validate(ours)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or first.get("ctx", {}).get("key", "")
        raise CheckpointError(f"{where}: {key}: {first['msg']}") from None


def _only(values: dict[str, Any], where: str, **allowed: tuple[Any, ...]) -> None:
    """Refuse a key whose value needs math that their class or our model does not implement. Absent keys are fine."""
    for key, accepted in allowed.items():
        if key in values and values[key] not in accepted:
            wanted = " or ".join(map(repr, accepted))
            raise CheckpointError(
                f"{where}: cannot import a model with {key}={values[key]!r}; only {wanted} is supported"
            )


def _section(values: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    section = values.get(key) or {}
    if not isinstance(section, dict):
        raise CheckpointError(f"{where}: {key} should be a mapping, not {section!r}")
    return section


def _from_mpt(v: dict[str, Any], where: str) -> dict[str, Any]:
    attention, ffn = _section(v, "attn_config", where), _section(v, "ffn_config", where)
    _only(attention, where, alibi=(True,), attn_type=("multihead_attention",), qk_ln=(False,), prefix_lm=(False,),
          attn_uses_sequence_id=(False,), rope=(False,), qk_gn=(False,), sliding_window_size=(-1, None))  # fmt: skip
    _only(ffn, where, ffn_type=("mptmlp",), ffn_act_fn=(None,))
    _only(v, where, no_bias=(True,), norm_type=("layernorm", "low_precision_layernorm"), logit_scale=(None,),
          embedding_fraction=(1, 1.0), expansion_ratio=(4,))  # fmt: skip
    return {
        "family": "mpt", "positions": "alibi", "no_bias": True, "activation": "gelu",
        "alibi_bias_max": attention.get("alibi_bias_max", 8), "clip_qkv": attention.get("clip_qkv") or None,
        "softmax_scale": attention.get("softmax_scale"), "attn_pdrop": attention.get("attn_pdrop", 0.0),
    }  # fmt: skip


def _from_gpt2(v: dict[str, Any], where: str) -> dict[str, Any]:
    _only(v, where, activation_function=tuple(ACTIVATIONS), scale_attn_weights=(True,),
          scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))  # fmt: skip
    act = ACTIVATIONS[v.get("activation_function", "gelu_new")]
    return {"family": "gpt3", "positions": "learned", "activation": act, "vocab_multiple": 1}


def _from_neox(v: dict[str, Any], where: str) -> dict[str, Any]:
    _only(v, where, hidden_act=tuple(ACTIVATIONS), attention_bias=(True,))
    rope = _rope(v, where)
    newer = {"rotary_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    found = {field: rope[theirs] for field, theirs in newer.items() if theirs in rope}
    act = ACTIVATIONS[v.get("hidden_act", "gelu")]
    return {"family": "neox", "activation": act, "emb_pdrop": v.get("hidden_dropout", 0.0), **found}


def _from_llama(v: dict[str, Any], where: str) -> dict[str, Any]:
    _only(v, where, hidden_act=("silu", "swish"), attention_bias=(False,), mlp_bias=(False,))
    rope = _rope(v, where)
    _only({**v, **rope}, where, partial_rotary_factor=(1, 1.0, None))
    base = rope.get("rope_theta", v.get("rope_theta", 10000.0))
    return {"family": "llama", "rotary_base": base, "attn_pdrop": v.get("attention_dropout") or 0.0}


def _rope(v: dict[str, Any], where: str) -> dict[str, Any]:
    """The rotary parameters, under their old or new key; any scaling of the frequencies is refused."""
    rope = _section(v, "rope_scaling", where) or _section(v, "rope_parameters", where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"{where}: cannot import a model with other rotary positions for each kind of layer")
    if kind != "default" and not (kind == "linear" and rope.get("factor") == 1):
        raise CheckpointError(
            f"{where}: cannot import a model with rope scaling {kind!r}; only plain rotary is supported"
        )
    return rope
