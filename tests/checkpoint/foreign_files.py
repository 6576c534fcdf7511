"""Checkpoints of other stacks, written from our model with the names and layouts that those stacks document.

Nothing here uses the code under test: each function does the inverse of what an import has to do.
"""

import random
import sys
from argparse import Namespace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from ingot.config.model import ModelConfig
from ingot.model.gpt import GPT

State = dict[str, Tensor]


def model_of(**values: Any) -> GPT:
    """A model whose weights are multiples of 1/1024, so that sums of a few of them are exact."""
    shape = {"d_model": 32, "n_heads": 4, "n_layers": 4, "vocab_size": 96, "max_seq_len": 16, "vocab_multiple": 1}
    model = GPT(ModelConfig.model_validate(shape | values)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-400, 400, parameter.shape, generator=generator) / 1024)
    return model


def heads_of(config: ModelConfig, fused: Tensor) -> Tensor:
    """Our fused projection by key/value head: [G, queries + key + value, D, ...]."""
    per_group = config.n_heads // config.kv_heads
    return fused.view(config.kv_heads, per_group + 2, config.head_width, *fused.shape[1:])


def blocks_of(config: ModelConfig, fused: Tensor, part: slice = slice(None)) -> Tensor:
    """All queries, then all keys, then all values, of some key/value heads."""
    heads = heads_of(config, fused)[part]
    return torch.cat([heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)])


def write_composer(path: Path, model: GPT, style: str = "mpt", inside: dict[str, Any] | None = None) -> None:
    """`style` is mpt, mosaic_gpt (2023), or mosaic_gpt-torch (2022, on torch's own attention)."""
    new = style == "mpt"
    names = {
        "norm_1": "norm_1" if new else "ln_1", "norm_2": "norm_2" if new else "ln_2",
        "attn.qkv": "attn.Wqkv", "attn.out": "attn.out_proj", "attn.q_norm": "attn.q_ln", "attn.k_norm": "attn.k_ln",
        "mlp.up": "ffn.up_proj" if new else "mlp.mlp_up", "mlp.down": "ffn.down_proj" if new else "mlp.mlp_down",
        "mlp.gate": "ffn.gate_proj",
    }  # fmt: skip
    if style == "mosaic_gpt-torch":
        names |= {"attn.qkv": "causal_attn.mhsa.in_proj", "attn.out": "causal_attn.mhsa.out_proj"}
    state: State = {}
    for name, value in model.state_dict().items():
        module, leaf = name.rsplit(".", 1)
        if module.startswith("blocks."):
            _, layer, part = module.split(".", 2)
            value = blocks_of(model.config, value) if part == "attn.qkv" else value
            joint = "_" if names[part].endswith("in_proj") else "."
            state[f"model.transformer.blocks.{layer}.{names[part]}{joint}{leaf}"] = value
        elif module == "head":
            state["model.lm_head.weight"] = value
        else:
            module = module if new else module.replace("norm_f", "ln_f")
            state[f"model.transformer.{module}.{leaf}"] = value
    optimizer = {"DecoupledAdamW": {"state": {name: {"exp_avg": torch.ones(3)} for name in state}}}
    content = {
        "state": {"model": state, "optimizers": optimizer, "run_name": "x", "timestamp": {"wall": timedelta(3)}},
        "rng": [{"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}],
    }
    if inside is not None:
        config = {"file_extension": ".json", "content": inside, "class": "llmfoundry.models.mpt.MPTForCausalLM"}
        content["state"]["integrations"] = {"huggingface": {"model": {"config": config}, "tokenizer": {}}}
    torch.save(content, path)


def mpt_config(config: ModelConfig, **attention: Any) -> dict[str, Any]:
    """What a Hugging Face config of LLM Foundry says, its generic keys included."""
    kinds = {
        "alibi": config.positions == "alibi",
        "rope": False,
        "alibi_bias_max": 8,
        "attn_type": "multihead_attention",
    }
    return {
        "model_type": "mpt", "architectures": ["MPTForCausalLM"], "torch_dtype": "float32", "transformers_version": "4",
        "d_model": config.d_model, "n_heads": config.n_heads, "n_layers": config.n_layers, "expansion_ratio": 4,
        "max_seq_len": config.context, "vocab_size": config.vocab_size, "no_bias": config.no_bias,
        "learned_pos_emb": config.positions == "learned", "norm_type": "low_precision_layernorm", "logit_scale": None,
        "tie_word_embeddings": config.tie_word_embeddings, "resid_pdrop": 0.0, "emb_pdrop": 0.0, "embedding_fraction": 1.0,
        "attn_config": {"attn_impl": "flash", "attn_pdrop": 0.0, "clip_qkv": config.clip_qkv, "softmax_scale": None,
                        "qk_ln": config.qk_ln, "attn_temperature_tuning": {"floor_scale": 8192, "attn_scale": 0.0},
                        **kinds, **attention},
        "ffn_config": {"ffn_type": "mptmlp"}, "fc_type": {"name": "torch", "bias": True},
        "init_config": {"name": "kaiming_normal_", "init_std": None, "init_div_is_residual": True, "emb_init_std": 0.3},
    }  # fmt: skip


def slices(name: str, value: Tensor, tp: int, config: ModelConfig, qkv: str = "grouped") -> list[Tensor]:
    """A parameter as `tp` ranks hold it: columns or rows of it, or a copy."""
    module, leaf = name.rsplit(".", 1)
    part = module.split(".", 2)[2] if module.startswith("blocks.") else module
    if part == "attn.qkv":
        groups = config.kv_heads // tp
        parts = [slice(r * groups, (r + 1) * groups) for r in range(tp)]
        if qkv == "blocks":
            return [blocks_of(config, value, part) for part in parts]
        heads = heads_of(config, value)
        if qkv == "last":
            return [heads[part].transpose(1, 2).flatten(0, 2) for part in parts]  # [heads, D, 3]
        return [heads[part].flatten(0, 2) for part in parts]
    if f"{part}.{leaf}" in ("attn.out.weight", "mlp.down.weight"):
        return list(value.chunk(tp, dim=1))
    if part in ("mlp.up", "mlp.gate", "wte", "head"):
        return list(value.chunk(tp))
    return [value] * tp


def write_neox(
    folder: Path, model: GPT, config: dict[str, Any], tp: int = 1, pipeline: int = 1, legacy: bool = False
) -> Path:
    """`global_step10` and what is next to it; `pipeline` 0 is a model without pipeline stages, one file per rank."""
    c = model.config
    names = {
        "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "attn.qkv": "attention.query_key_value",
        "attn.out": "attention.dense", "mlp.up": "mlp.dense_h_to_4h" if legacy else "mlp.linear1",
        "mlp.down": "mlp.dense_4h_to_h" if legacy else "mlp.linear2",
    }  # fmt: skip
    layers: list[dict[int, State]] = [{} for _ in range(tp)]
    scale = c.norm == "rmsnorm"
    gated: dict[str, list[Tensor]] = {}
    for name, value in model.state_dict().items():
        module, leaf = name.rsplit(".", 1)
        number, _, part = module.removeprefix("blocks.").partition(".")
        parts = slices(name, value, tp, c, "blocks" if c.kv_heads != c.n_heads else "grouped")
        if c.parallel_residual and name.endswith(("attn.out.bias", "mlp.down.bias")):
            half = torch.full_like(value, 3 / 1024)  # each rank has its own; they add up to the model's
            parts = [value - (tp - 1) * half] + [half] * (tp - 1)
        if not module.startswith("blocks."):
            layer = {"wte": 0, "wpe": 0, "norm_f": c.n_layers + 3, "head": c.n_layers + 4}[module]
            theirs = {"wte": "word_embeddings", "wpe": "position_embeddings", "norm_f": "norm", "head": "final_linear"}
            key = theirs[module]
        elif part in ("mlp.gate", "mlp.up") and c.activation == "swiglu":
            gated[f"{number}.{part}"] = parts
            if f"{number}.mlp.up" not in gated or f"{number}.mlp.gate" not in gated:
                continue
            halves = zip(gated[f"{number}.mlp.up"], gated[f"{number}.mlp.gate"], strict=True)
            parts = [torch.cat(pair) for pair in halves]
            layer, key = int(number) + 2, names["mlp.up"]
        else:
            layer, key = int(number) + 2, names[part]
        leaf = "scale" if scale and "norm" in key else leaf
        for rank, state in enumerate(layers):
            state.setdefault(layer, {})[f"{key}.{leaf}"] = parts[rank].clone()
    step = folder / "global_step10"
    (step / "configs").mkdir(parents=True)
    for file, values in (("model.yml", config), ("local_setup.yml", {"data-path": "data/x", "save": "checkpoints"})):
        (step / "configs" / file).write_text(yaml.safe_dump(values))
    (folder / "latest").write_text("global_step10")
    for rank, state in enumerate(layers):
        if pipeline:
            for layer, content in state.items():
                torch.save(content, step / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
            for stage in range(pipeline):  # holds no weights then
                torch.save({"module": None, "args": {}}, step / f"mp_rank_{stage * tp + rank:02d}_model_states.pt")
        else:
            flat = {f"sequential.{layer}.{key}": v for layer, content in state.items() for key, v in content.items()}
            torch.save(
                {"module": flat, "optimizer": None, "iteration": 10}, step / f"mp_rank_{rank:02d}_model_states.pt"
            )
    return folder


def neox_config(config: ModelConfig, **more: Any) -> dict[str, Any]:
    return {
        "num-layers": config.n_layers, "hidden-size": config.d_model, "num-attention-heads": config.n_heads,
        "seq-length": config.context, "max-position-embeddings": config.context, "norm": config.norm,
        "pos-emb": config.positions, "rotary-pct": config.rotary_pct, "no-weight-tying": not config.tie_word_embeddings,
        "gpt-j-residual": config.parallel_residual, "tokenizer_type": "HFTokenizer", "vocab-file": "none.json",
        "train-iters": 10, "lr-decay-style": "cosine", "zero_optimization": {"stage": 1}, "made_up_key": 1, **more,
    }  # fmt: skip


def write_megatron(
    folder: Path, model: GPT, tp: int = 1, pp: int = 1, style: str = "mcore", version: float | None = 3.0,
    chunks: int = 1, **more: Any,
) -> Path:  # fmt: skip
    """`style` is mcore, te (norms inside linear layers) or legacy; `chunks` are model parts per interleaved stage."""
    c = model.config
    legacy = style == "legacy"
    names = {
        "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm" if legacy else "pre_mlp_layernorm",
        "attn.qkv": "self_attention.query_key_value" if legacy else "self_attention.linear_qkv",
        "attn.out": "self_attention.dense" if legacy else "self_attention.linear_proj",
        "mlp.up": "mlp.dense_h_to_4h" if legacy else "mlp.linear_fc1",
        "mlp.down": "mlp.dense_4h_to_h" if legacy else "mlp.linear_fc2",
        "attn.q_norm": "self_attention.q_layernorm", "attn.k_norm": "self_attention.k_layernorm",
    }  # fmt: skip
    multiple, per_chunk = 16, c.n_layers // (pp * chunks)
    rows = -(-c.vocab_size // (multiple * tp)) * multiple * tp
    qkv = {None: "blocks", 1.0: "last"}.get(version, "grouped")
    parts: list[list[list[State]]] = [[[{} for _ in range(chunks)] for _ in range(pp)] for _ in range(tp)]
    state = model.state_dict()
    for name, value in state.items():
        module, leaf = name.rsplit(".", 1)
        chunk = stage = 0
        if module in ("wte", "head"):
            padding = torch.full((rows - value.shape[0], value.shape[1]), 7.0)
            value = torch.cat([value, padding]) if len(padding) else value
        if module.startswith("blocks."):
            _, number, part = module.split(".", 2)
            place, local = divmod(int(number), per_chunk)
            chunk, stage = divmod(place, pp)
            if part == "mlp.up" and c.activation == "swiglu":
                gates = slices(name, state[f"blocks.{number}.mlp.gate.{leaf}"], tp, c)
                sliced = [torch.cat(pair) for pair in zip(gates, slices(name, value, tp, c), strict=True)]
            elif part == "mlp.gate":
                continue
            else:
                sliced = slices(name, value, tp, c, qkv)
            key = f"layers.{local}.{names[part]}.{leaf}"
            if style == "te" and part == "norm_1":
                key = f"layers.{local}.self_attention.linear_qkv.layer_norm_{leaf}"
            elif style == "te" and part == "norm_2":
                key = f"layers.{local}.mlp.linear_fc1.layer_norm_{leaf}"
        else:
            sliced = slices(name, value, tp, c)
            key = {"wte": "embedding.word_embeddings", "wpe": "embedding.position_embeddings", "norm_f": "final_layernorm",
                   "head": "output_layer"}[module] + f".{leaf}"  # fmt: skip
            if module in ("norm_f", "head"):
                chunk, stage = chunks - 1, pp - 1
            if module == "wte" and pp > 1 and c.tie_word_embeddings:
                for rank in range(tp):
                    parts[rank][-1][-1]["tied copy"] = sliced[rank].clone()
        for rank in range(tp):
            parts[rank][stage][chunk][key] = sliced[rank].clone()
    step = folder / "iter_0000010"
    args = megatron_args(c, tp, pp, multiple, rows, **more)
    for rank in range(tp):
        for stage in range(pp):
            content: dict[str, Any] = {"iteration": 10, "args": args, "optimizer": {"state": [torch.ones(4)]}}
            content |= {} if version is None else {"checkpoint_version": version}
            for chunk in range(chunks):
                key = f"model{chunk}" if chunks > 1 else "model"
                content[key] = (_legacy if legacy else _core)(parts[rank][stage][chunk])
            place = step / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            place.mkdir(parents=True)
            _save_with_enums(content, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return folder


def _core(state: State) -> dict[str, Any]:
    """Megatron-core: flat names, and an extra state for each of Transformer Engine's modules."""
    flat: dict[str, Any] = {
        "decoder.layers.0.self_attention.linear_qkv._extra_state": torch.zeros(2, dtype=torch.uint8)
    }
    for key, value in state.items():
        inside = key.startswith(("layers.", "final_layernorm."))
        flat["output_layer.weight" if key == "tied copy" else f"decoder.{key}" if inside else key] = value
    return flat


def _legacy(state: State) -> dict[str, Any]:
    """The older form: nested for the embedding and the encoder, flat inside."""
    model: dict[str, Any] = {"language_model": {}}
    encoder = {key: v for key, v in state.items() if key.startswith(("layers.", "final_layernorm."))}
    embedding = {key.split(".")[1]: {"weight": v} for key, v in state.items() if key.startswith("embedding.")}
    if encoder:
        model["language_model"]["encoder"] = encoder
    if embedding:
        model["language_model"]["embedding"] = embedding
    if "output_layer.weight" in state:
        model["language_model"]["output_layer"] = {"weight": state["output_layer.weight"]}
    if "tied copy" in state:
        model["word_embeddings_for_head"] = {"weight": state["tied copy"]}
    return model


def megatron_args(c: ModelConfig, tp: int, pp: int, multiple: int, rows: int, **more: Any) -> dict[str, Any]:
    return {
        "num_layers": c.n_layers, "hidden_size": c.d_model, "num_attention_heads": c.n_heads, "seq_length": c.context,
        "max_position_embeddings": c.context, "ffn_hidden_size": c.ffn_width, "kv_channels": c.head_width,
        "group_query_attention": c.n_kv_heads is not None, "num_query_groups": c.n_kv_heads or 1,
        "position_embedding_type": {"learned": "learned_absolute", "rotary": "rope"}[c.positions],
        "rotary_percent": 1.0, "rotary_base": int(c.rotary_base), "rotary_interleaved": False,
        "normalization": "RMSNorm" if c.norm == "rmsnorm" else "LayerNorm", "norm_epsilon": c.norm_eps,
        "qk_layernorm": c.qk_ln == "heads", "window_size": None,
        "swiglu": c.activation == "swiglu", "add_bias_linear": not c.no_bias, "bias_gelu_fusion": not c.no_bias,
        "untie_embeddings_and_output_weights": not c.tie_word_embeddings, "make_vocab_size_divisible_by": multiple,
        "padded_vocab_size": rows, "vocab_size": c.vocab_size, "tokenizer_type": "HuggingFaceTokenizer",
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "num_experts": None, "lr": 1e-4, "some_new_option": [1, 2], "rampup_batch_size": None,
        "params_dtype": torch.float32, "mtp_num_layers": None, "fp8": None, **more,
    }  # fmt: skip


def _save_with_enums(content: dict[str, Any], path: Path) -> None:
    """As Megatron saves: the args are a Namespace with an enum of a module that no one else has."""
    names = ["megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.enums"]
    sys.modules |= {name: ModuleType(name) for name in names}
    backend = Enum("AttnBackend", ["flash", "auto"], module=names[-1])
    sys.modules[names[-1]].AttnBackend = backend  # type: ignore[attr-defined]
    try:
        torch.save({**content, "args": Namespace(**content["args"], attention_backend=backend.auto)}, path)
    finally:
        for name in names:
            del sys.modules[name]
