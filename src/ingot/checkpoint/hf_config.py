"""Our model config as a Hugging Face config.json, and back.

A plain dict on both sides, so neither direction needs transformers. Four of its classes can compute what our GPT
computes; a model or a file that none of them expresses exactly is refused by the name of the field, never bent to fit.
Dropout is the one thing that may be lost: it is no part of the function that is exported.
"""

import math
from typing import Any

from pydantic import ValidationError

from ingot.errors import CheckpointError
from ingot.model.config import ModelConfig

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


def hf_class(config: ModelConfig) -> str:
    """The transformers class that computes exactly this model."""
    if config.positions == "none":
        raise _inexpressible(config, "positions", "no Hugging Face class we write goes without positions")
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
    c = config
    default_scale = c.softmax_scale is None or math.isclose(c.softmax_scale, c.head_width**-0.5)
    needs = [
        ("qk_ln", not c.qk_ln, "does not normalise queries and keys"),
        ("sliding_window", c.sliding_window is None, "attends to all that came before"),
        (
            "norm_bias",
            c.norm_bias is None or c.has_norm_bias == (name in (GPT2, NEOX)),
            f"has {'biases' if name in (GPT2, NEOX) else 'none'} in its norms",
        ),
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
        ("no_bias", c.no_bias == (name == MPT), "has no biases" if name == MPT else "has biases"),
        ("activation", c.activation in gelu, f"has an MLP with {' or '.join(gelu)}"),
        ("n_kv_heads", c.kv_heads == c.n_heads, "has a key and a value for every head"),
        ("head_dim", c.head_width * c.n_heads == c.d_model, "cuts d_model evenly into heads"),
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
    act = "gelu" if c.activation == "gelu" else "gelu_new"
    common: dict[str, Any] = {
        "architectures": [name],
        "model_type": next(kind for kind, of in CLASS_OF_TYPE.items() if of == name),
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tie_word_embeddings,
        "initializer_range": c.init_std,
        "use_cache": True,
    }
    if name == MPT:
        attention = {"alibi": True, "alibi_bias_max": 8, "clip_qkv": c.clip_qkv, "softmax_scale": c.softmax_scale}
        return {
            **common, "d_model": c.d_model, "n_heads": c.n_heads, "n_layers": c.n_layers, "expansion_ratio": 4,
            "max_seq_len": c.context, "layer_norm_epsilon": c.norm_eps, "norm_type": c.norm, "no_bias": True,
            "learned_pos_emb": False, "emb_pdrop": c.emb_pdrop, "resid_pdrop": c.resid_pdrop, "attn_config": attention,
        }  # fmt: skip
    if name == GPT2:
        return {
            **common, "n_embd": c.d_model, "n_head": c.n_heads, "n_layer": c.n_layers, "n_inner": c.ffn_width,
            "n_positions": c.context, "layer_norm_epsilon": c.norm_eps, "activation_function": act,
            "embd_pdrop": c.emb_pdrop, "resid_pdrop": c.resid_pdrop, "attn_pdrop": c.attn_pdrop,
        }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": c.rotary_base}
    common |= {
        "hidden_size": c.d_model, "num_attention_heads": c.n_heads, "num_hidden_layers": c.n_layers,
        "intermediate_size": c.ffn_width, "max_position_embeddings": c.context, "attention_dropout": c.attn_pdrop,
    }  # fmt: skip
    if name == NEOX:
        return {
            **common, "layer_norm_eps": c.norm_eps, "hidden_act": act, "use_parallel_residual": c.parallel_residual,
            "hidden_dropout": c.resid_pdrop, "attention_bias": True,
            "rotary_pct": c.rotary_pct, "rotary_emb_base": c.rotary_base,
            "rope_parameters": {**rope, "partial_rotary_factor": c.rotary_pct},
        }  # fmt: skip
    return {
        **common, "rms_norm_eps": c.norm_eps, "hidden_act": "silu", "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_width, "attention_bias": False, "mlp_bias": False,
        "rope_theta": c.rotary_base, "rope_parameters": rope,
    }  # fmt: skip


def from_hf_config(values: dict[str, Any], where: str) -> ModelConfig:
    """Our config for a config.json; keys that are absent mean what transformers takes them to mean."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CLASS_OF_TYPE:
        raise CheckpointError(f"{where}: model_type is {kind!r}; we import {', '.join(CLASS_OF_TYPE)}")
    _only(values, where, quantization_config=(None,))
    aliases = ALIASES.get(kind, {})
    values = {aliases.get(key, key): value for key, value in values.items()}
    read = {"mpt": _from_mpt, "gpt2": _from_gpt2, "gpt_neox": _from_neox, "llama": _from_llama}[kind]
    try:
        return ModelConfig.model_validate(read(values, where))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or first.get("ctx", {}).get("key", "")
        raise CheckpointError(f"{where}: {key}: {first['msg']}") from None


def _only(values: dict[str, Any], where: str, **allowed: tuple[Any, ...]) -> None:
    """Refuse a key whose value asks for math that the class, or ours, does not do; absent keys are fine."""
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
        "d_model": v.get("d_model", 2048), "n_heads": v.get("n_heads", 16), "n_layers": v.get("n_layers", 24),
        "vocab_size": v.get("vocab_size", 50368), "max_seq_len": v.get("max_seq_len", 2048),
        "norm": v.get("norm_type", "low_precision_layernorm"), "norm_eps": v.get("layer_norm_epsilon", 1e-5),
        "alibi_bias_max": attention.get("alibi_bias_max", 8), "clip_qkv": attention.get("clip_qkv") or None,
        "softmax_scale": attention.get("softmax_scale"), "tie_word_embeddings": v.get("tie_word_embeddings", True),
        "attn_pdrop": attention.get("attn_pdrop", 0.0), "emb_pdrop": v.get("emb_pdrop", 0.0),
        "resid_pdrop": v.get("resid_pdrop", 0.0), "init_std": v.get("initializer_range", 0.02),
    }  # fmt: skip


def _from_gpt2(v: dict[str, Any], where: str) -> dict[str, Any]:
    act = v.get("activation_function", "gelu_new")
    _only(v, where, activation_function=tuple(ACTIVATIONS), scale_attn_weights=(True,),
          scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))  # fmt: skip
    return {
        "family": "gpt3", "positions": "learned", "activation": ACTIVATIONS[act], "vocab_multiple": 1,
        "d_model": v.get("n_embd", 768), "n_heads": v.get("n_head", 12), "n_layers": v.get("n_layer", 12),
        "ffn_hidden_size": v.get("n_inner"), "vocab_size": v.get("vocab_size", 50257),
        "max_seq_len": v.get("n_positions", 1024), "norm_eps": v.get("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": v.get("tie_word_embeddings", True), "emb_pdrop": v.get("embd_pdrop", 0.1),
        "resid_pdrop": v.get("resid_pdrop", 0.1), "attn_pdrop": v.get("attn_pdrop", 0.1),
        "init_std": v.get("initializer_range", 0.02),
    }  # fmt: skip


def _from_neox(v: dict[str, Any], where: str) -> dict[str, Any]:
    act = v.get("hidden_act", "gelu")
    _only(v, where, hidden_act=tuple(ACTIVATIONS), attention_bias=(True,))
    rope = _rope(v, where)
    dropout = v.get("hidden_dropout", 0.0)
    return {
        "family": "neox", "activation": ACTIVATIONS[act], "parallel_residual": v.get("use_parallel_residual", True),
        "d_model": v.get("hidden_size", 6144), "n_heads": v.get("num_attention_heads", 64),
        "n_layers": v.get("num_hidden_layers", 44), "ffn_hidden_size": v.get("intermediate_size", 24576),
        "vocab_size": v.get("vocab_size", 50432), "max_seq_len": v.get("max_position_embeddings", 2048),
        "norm_eps": v.get("layer_norm_eps", 1e-5), "tie_word_embeddings": v.get("tie_word_embeddings", False),
        "rotary_base": rope.get("rope_theta", v.get("rotary_emb_base", 10000.0)),
        "rotary_pct": rope.get("partial_rotary_factor", v.get("rotary_pct", 0.25)),
        "emb_pdrop": dropout, "resid_pdrop": dropout, "attn_pdrop": v.get("attention_dropout", 0.0),
        "init_std": v.get("initializer_range", 0.02),
    }  # fmt: skip


def _from_llama(v: dict[str, Any], where: str) -> dict[str, Any]:
    _only(v, where, hidden_act=("silu", "swish"), attention_bias=(False,), mlp_bias=(False,))
    rope = _rope(v, where)
    _only({**v, **rope}, where, partial_rotary_factor=(1, 1.0, None))
    return {
        "family": "llama", "head_dim": v.get("head_dim"), "n_kv_heads": v.get("num_key_value_heads"),
        "d_model": v.get("hidden_size", 4096), "n_heads": v.get("num_attention_heads", 32),
        "n_layers": v.get("num_hidden_layers", 32), "ffn_hidden_size": v.get("intermediate_size", 11008),
        "vocab_size": v.get("vocab_size", 32000), "max_seq_len": v.get("max_position_embeddings", 2048),
        "norm_eps": v.get("rms_norm_eps", 1e-6), "tie_word_embeddings": v.get("tie_word_embeddings", False),
        "rotary_base": rope.get("rope_theta", v.get("rope_theta", 10000.0)),
        "attn_pdrop": v.get("attention_dropout") or 0.0, "init_std": v.get("initializer_range", 0.02),
    }  # fmt: skip


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
