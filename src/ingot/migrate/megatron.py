"""Megatron-LM: the arguments of pretrain_gpt.py, from a command line, a shell script's arrays, or a YAML of arguments.

Defaults that few scripts spell out are written out: linear decay, beta2 0.999, dropout 0.1, the tanh GELU of its fused
kernel, and the vocabulary padded for the tensor-parallel size.
"""

import math
import re
from typing import Any

from ingot.errors import ConfigError
from ingot.migrate import megatron_common as common
from ingot.migrate.translation import Dialect, Translation

LAUNCHED = ("nnodes", "nproc_per_node")  # torchrun's


def _translate(t: Translation) -> None:
    for key, value in t.given.items():
        if "$" in str(value) and key not in (*t.dialect.reasons, *LAUNCHED):
            t.refuse(key, f"the script takes it from elsewhere; give {key}=... after the file")
    for key in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "seq_length", "lr"):
        if t.number(key) is None:
            t.refuse(key, "is missing; Megatron has no default for it")
    _model(t)
    _training(t)
    _schedule(t)


def _model(t: Translation) -> None:
    t.put("model.family", "gpt3", "num_layers")
    t.put("model.init", "normal", "init_method_std")
    t.put("model.residual_init", "scaled", "init_method_std")
    if t.get("group_query_attention"):
        t.put("model.n_kv_heads", t.size("num_query_groups", 1), "num_query_groups", "group_query_attention")
    kinds = ("position_embedding_type", "use_rotary_position_embeddings", "no_position_embedding")
    usual = "rope" if t.get(kinds[1]) else "none" if t.get(kinds[2]) else "learned_absolute"
    positions = t.choice(kinds[0], usual)
    t.put("model.positions", positions, *kinds)
    if positions == "rotary":
        t.put("model.rotary_pct", t.get("rotary_percent", 1.0), "rotary_percent")
        t.put("model.rotary_base", t.get("rotary_base", 10000), "rotary_base")
    bare, swiglu, erf = (t.get(k, False) for k in ("disable_bias_linear", "swiglu", "no_bias_gelu_fusion"))
    activation = "swiglu" if swiglu else "gelu" if erf or bare else "gelu_tanh"
    t.put("model.activation", activation, "swiglu", *[] if swiglu else ["no_bias_gelu_fusion"])
    t.put("model.no_bias", bare, "disable_bias_linear")
    if bare and t.choice("normalization") == "layernorm":
        t.put("model.norm_bias", True, "disable_bias_linear")
    window = re.findall(r"-?\d+", str(t.get("window_size", "")))  # keys seen to the left and to the right, itself apart
    if window and window[0] != "-1":
        t.put("model.sliding_window", int(window[0]) + 1, "window_size")
    if window[1:] not in ([], ["0"], ["-1"]):
        t.refuse("window_size", "a token cannot see what comes after it; end with 0")
    t.put("model.qk_ln", "heads" if t.get("qk_layernorm") else False, "qk_layernorm")
    width = t.size("hidden_size", 1)
    default = int((4 * width * 2 / 3) / 64) * 64 if swiglu else 4 * width
    t.put("model.ffn_hidden_size", t.size("ffn_hidden_size", default), "ffn_hidden_size")
    untied = "untie_embeddings_and_output_weights"
    t.put("model.tie_word_embeddings", not t.get(untied, False), untied)
    for native in ("model.emb_pdrop", "model.resid_pdrop"):
        t.put(native, t.get("hidden_dropout", 0.1), "hidden_dropout")
    files = ("tokenizer_model", "vocab_file", "merge_file")
    shards = t.size(t.said("tensor_model_parallel_size", "model_parallel_size"), 1)
    eod = common.put_vocabulary(t, files, "GPT2BPETokenizer", "vocab_size", shards)
    if str(t.get("tokenizer_type")).lower() == "nulltokenizer":
        eod = t.number("null_tokenizer_eod_id", t.size("vocab_size", 1) - 1)
    flags = {"reset_attention_mask": "model.document_mask", "reset_position_ids": "model.document_positions",
             "eod_mask_loss": "mask_eos_loss"}  # fmt: skip
    common.put_documents(t, flags, eod)


def _training(t: Translation) -> None:
    axes = {"model_parallel_size": "tensor", "tensor_model_parallel_size": "tensor",
            "pipeline_model_parallel_size": "pipeline", "context_parallel_size": "context"}  # fmt: skip
    common.put_parallel(t, axes)
    model = math.prod(t.size(key, 1) for key in axes)
    nodes, local = (t.get(key, 1) for key in LAUNCHED)
    certain = "nproc_per_node" in t.given and all(type(count) is int and count > 0 for count in (nodes, local))
    world = nodes * local if certain else 0
    common.put_batch(t, "global_batch_size", t.said("micro_batch_size", "batch_size"), None, world, model)
    t.skip("where a run runs is said when it is launched", *LAUNCHED)
    sets = {f"{part}_data_path": _weighted(t, f"{part}_data_path") for part in ("train", "valid")}
    common.put_data(t, _weighted(t, "data_path"), sets)
    common.put_eval(t, t.number("eval_interval"))
    if t.get("full_validation"):
        t.put("eval_subset_num_batches", -1, "full_validation")
    common.put_checkpoints(t, "save_interval")
    t.put("precision", "bf16" if t.get("bf16") else "fp16" if t.get("fp16") else "fp32", "bf16", "fp16")
    flags = ("recompute_granularity", "checkpoint_activations", "recompute_activations")
    usual = "full" if t.get(flags[1]) else "selective" if t.get(flags[2]) else "none"
    t.put("activation_checkpointing", t.choice(flags[0], usual), *flags)
    if t.get("deterministic_mode"):
        t.put("deterministic", True, "deterministic_mode")
    t.put("gradient_clipping", t.number("clip_grad", 1.0) or None, "clip_grad")
    t.put("optimizer.betas", [t.number("adam_beta1", 0.9), t.number("adam_beta2", 0.999)], "adam_beta1", "adam_beta2")


def _weighted(t: Translation, key: str) -> common.DataSets:
    """`0.3 A 0.7 B`, or `A B`, which are weighted by their sizes."""
    words = common.listed(t.get(key))
    if len(words) > 1 and len(words) % 2 == 0 and all(isinstance(scalar(str(w)), int | float) for w in words[::2]):
        return [(float(weight), str(path)) for weight, path in zip(words[::2], words[1::2], strict=True)]
    return [(None, str(path)) for path in words]


def _schedule(t: Translation) -> None:
    unit, what = ("sp", "samples") if t.size("train_samples") else ("ba", "iters")
    if (t.size("train_iters") is None) == (t.size("train_samples") is None):
        t.refuse("train_iters", "say how long to train with train_iters, or else with train_samples")
        return
    total, lr = t.size(f"train_{what}"), t.number("lr") or 1.0
    iterations = total if unit == "ba" else total // t.values.get("global_train_batch_size", 1)
    t.put("max_duration", common.count(iterations), f"train_{what}")
    for key in [k for k in t.given if k.startswith("lr_") and k.endswith("samples" if unit == "ba" else "iters")]:
        if t.get(key):
            t.refuse(key, f"does not go with train_{what}; use {key.rpartition('_')[0]}_{what}")
    end = t.number(f"lr_decay_{what}", total)
    share = t.number("lr_warmup_fraction", t.number("warmup"))
    warmup = t.number(f"lr_warmup_{what}", 0) if share is None else share * end
    t.put("scheduler.t_warmup", common.count(warmup, unit), f"lr_warmup_{what}", "lr_warmup_fraction", "warmup")
    t.put("scheduler.t_max", common.count(end, unit), f"lr_decay_{what}")
    if warmup and t.number("lr_warmup_init"):
        t.put("scheduler.warmup_start", t.number("lr_warmup_init") / lr, "lr_warmup_init")
    style, floor = t.choice("lr_decay_style"), t.number("min_lr", 0.0) / lr
    t.put("scheduler.alpha_f", 0.0 if style.startswith("inv_sqrt") else floor, "min_lr")
    if style == "wsd":
        shape = t.choice("lr_wsd_decay_style")
        t.put("scheduler.decay_shape", shape, "lr_wsd_decay_style")
        key = f"lr_wsd_decay_{what}"
        t.put("scheduler.t_decay", common.count(length := t.number(key), unit), key)
        if length is None or length > end - warmup:
            t.refuse(key, f"is missing, or longer than what the warmup leaves, {end - warmup:g}; set it")
    if style != "inv_sqrt_with_warmup":
        return
    t.put("scheduler.t_scale", common.count(warmup, unit), "lr_decay_style")
    if not warmup:
        t.refuse("lr_decay_style", "inverse-square-root without a warmup falls with the first samples; set one")
    if end < total:
        t.refuse(f"lr_decay_{what}", "inverse-square-root drops to min_lr there, which is not possible; leave it out")
    t.put("scheduler.floor", floor, "min_lr")


MEGATRON = Dialect("megatron", "Megatron", _translate)


def read_words(words: list[tuple[str, str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Words of an argument list, each with its place, as keys and values with theirs; the last of a flag counts."""
    given, places = {}, {}
    key, values, lists = "", list[Any](), MEGATRON.table["lists"]
    for word, place in [*words, ("--", "")]:
        if not word.startswith("--"):
            if not key:
                raise ConfigError(f"{place}: '{word}' belongs to no argument; Megatron's begin with --")
            if key.endswith("data_path") and len(word.split()) > 1:
                raise ConfigError(f"{place}: '{word}' is one path to the program; leave out its quotes")
            values.append(scalar(word))
            if len(values) > 1 and key not in lists:
                raise ConfigError(f"{place}: --{key.replace('_', '-')} takes one value, not {values}")
            continue
        if key:
            given[key] = values if key in lists else values[0] if values else True
        name, mark, value = word[2:].partition("=")
        key, values = name.replace("-", "_"), [scalar(value)] if mark else []
        places[key] = place
    del places[""]
    return given, places


def scalar(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
