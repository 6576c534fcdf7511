"""Composer's full-state `.pt` files of LLM Foundry's MPT, and of the mosaic_gpt that came before it.

`state.model` holds the parameters under `model.` and the names of the model class; `state.integrations` the class's own
config, except in the oldest files, whose YAML has to be given.
"""

import re
from pathlib import Path
from typing import Any

from ingot.checkpoint.hf.folder import TensorReader
from ingot.config.dotted_keys import flatten
from ingot.config.model import ModelConfig
from ingot.errors import CheckpointError
from ingot.migrate.checkpoints.merge import MergedTensors, SliceLayout, checked_config
from ingot.migrate.checkpoints.pt_reader import unpack
from ingot.migrate.foundry import FOUNDRY
from ingot.migrate.translation import Translation

CONFIG = "state.integrations.huggingface.model.config.content"
NAMES = {"mpt": "mpt_causal_lm", "mosaic_gpt": "mosaic_gpt"}  # model_type to the name in a YAML
WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.|norm_attn_norm\.")
BUFFER = re.compile(r"\.(mask|attn_mask|attn_bias|inv_freq)$")
BLOCK = re.compile(r"transformer\.blocks\.(\d+)\.(.+)\.(weight|bias)")
MODULES = {
    "norm_1": "norm_1", "ln_1": "norm_1", "norm_2": "norm_2", "ln_2": "norm_2",
    "attn.Wqkv": "attn.qkv", "attn.Wq": "attn.q", "attn.Wk": "attn.k", "attn.Wv": "attn.v",
    "attn.out_proj": "attn.out", "attn.q_ln": "attn.q_norm", "attn.k_ln": "attn.k_norm",
    "causal_attn.mhsa.Wqkv": "attn.qkv", "causal_attn.mhsa.out_proj": "attn.out",
    "ffn.up_proj": "mlp.up", "ffn.gate_proj": "mlp.gate", "ffn.down_proj": "mlp.down",
    "mlp.mlp_up": "mlp.up", "mlp.mlp_down": "mlp.down",
}  # fmt: skip
TOP = {"transformer.wte": "wte", "transformer.wpe": "wpe", "transformer.norm_f": "norm_f", "transformer.ln_f": "norm_f",
       "lm_head": "head"}  # fmt: skip


def read_composer(path: Path, given: ModelConfig | Translation | None, work: Path) -> tuple[ModelConfig, TensorReader]:
    """The config and the parameters in a full-state file."""
    [found] = unpack([path], ["state.model.", CONFIG], work)
    pieces = {}
    for name, piece in found.tensors.items():
        theirs = WRAPPERS.sub("", name.removeprefix("state.model.")).removeprefix("model.")
        if not BUFFER.search(theirs):
            pieces[_ours(theirs)] = piece
    if "wte.weight" not in pieces:
        raise CheckpointError(f"{path} holds no model.transformer.wte.weight in state.model: it is no full-state file "
                              "of an MPT or mosaic_gpt, which is what is imported from Composer")  # fmt: skip
    config = checked_config(given or _config_inside(found.values, path))
    return config, MergedTensors(config, [pieces], SliceLayout(qkv="blocks"), str(path))


def _ours(theirs: str) -> str:
    """Our name of a tensor, or theirs where the model has no such part."""
    theirs = re.sub(r"mhsa\.in_proj_(weight|bias)$", r"mhsa.Wqkv.\1", theirs)  # torch's own attention
    if match := BLOCK.fullmatch(theirs):
        layer, module, leaf = match.groups()
        return f"blocks.{int(layer)}.{MODULES[module]}.{leaf}" if module in MODULES else theirs
    module, _, leaf = theirs.rpartition(".")
    return f"{TOP[module]}.{leaf}" if module in TOP else theirs


def _config_inside(values: Any, path: Path) -> Translation:
    for key in CONFIG.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} does not hold its model's config; give the YAML it was trained with as --config")
    kind = str(values.get("model_type"))
    if kind not in NAMES:
        raise CheckpointError(f"{path}: cannot import a model of type {kind!r}; from Composer, {' and '.join(NAMES)}")
    # what all Hugging Face configs have is not in Foundry's vocabulary; how weights began no longer matters
    model = {k: v for k, v in values.items() if FOUNDRY.knows(f"model.{k}") and not k.startswith(("init", "emb_init"))}
    model["name"] = NAMES[kind]
    given = flatten({"model": model})
    if not given.get("model.attn_config.attn_temperature_tuning.attn_scale"):
        given.pop("model.attn_config.attn_temperature_tuning.floor_scale", None)
    if given.get("model.fc_type.name") == "torch":
        given = {key: value for key, value in given.items() if not key.startswith("model.fc_type.")}
    return Translation(FOUNDRY, given, dict.fromkeys(given, str(path))).run()
