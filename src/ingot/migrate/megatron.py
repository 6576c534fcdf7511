"""Megatron-LM: the arguments of pretrain_gpt.py, from a command line, a shell script's arrays, or a YAML of arguments.

Defaults that few scripts spell out are written out: linear decay, beta2 0.999, dropout 0.1, the tanh GELU of its fused
kernel, and the vocabulary padded for the tensor-parallel size.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError
from ingot.migrate import megatron_common as common
from ingot.migrate.trackers import put_megatron_trackers
from ingot.migrate.translation import Dialect, Translation, show

LAUNCHED = ("nnodes", "nproc_per_node")  # torchrun's
PADDED = ("padded_vocab_size", "pad_vocab_size_to")
FORK = "v3.0"  # Megatron-LM's release whose defaults Megatron-DeepSpeed has


def _translate(t: Translation) -> None:
    for key, value in t.given.items():
        if "$" in str(value) and key not in (*t.dialect.without_effect, *LAUNCHED, "deepspeed_config"):
            why = t.unsettled.get(key, "the script takes it from elsewhere;")
            t.refuse(key, f"{why} give {key}=... after the file")
    if t.get("deepspeed") and t.peer_version is None:
        t.peer_version = FORK
        t.warnings.append(
            f"deepspeed: the defaults are those of Megatron-LM {FORK}, from which Megatron-DeepSpeed comes"
        )
    t.choice("MODE")
    for key in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "seq_length", "lr"):
        if t.number(key) is None:
            t.refuse(key, "is missing; Megatron has no default for it")
    _model(t)
    _training(t)
    _schedule(t)
    put_megatron_trackers(t)


def _model(t: Translation) -> None:
    t.put("model.family", "gpt3", "num_layers")
    t.put("model.init", "normal", "init_method_std")
    t.put("model.residual_init", "scaled", "init_method_std")
    if t.get("group_query_attention"):
        t.put("model.n_kv_heads", t.size("num_query_groups", 1), "num_query_groups", "group_query_attention")
    kinds = ("position_embedding_type", "use_rotary_position_embeddings", "no_position_embedding")
    usual = "rope" if t.get(kinds[1]) else "none" if t.get(kinds[2]) else "learned_absolute"
    if t.get("openai_gelu") and t.get("swiglu"):
        t.refuse("openai_gelu", "contradicts swiglu; remove one of them")
    positions = t.choice(kinds[0], usual)
    t.put("model.positions", positions, *kinds)
    if positions == "rotary":
        t.put("model.rotary_pct", t.get("rotary_percent", 1.0), "rotary_percent")
        base = t.first_given("rotary_base", "rotary_position_embeddings_theta")
        t.put("model.rotary_base", t.get(base, 10000), base)
    bare, swiglu, erf = (t.get(k, False) for k in ("disable_bias_linear", "swiglu", "no_bias_gelu_fusion"))
    exact = (erf or bare) and not t.get("openai_gelu")
    activation = "swiglu" if swiglu else "gelu" if exact else "gelu_tanh"
    t.put("model.activation", activation, "swiglu", *[] if swiglu else ["no_bias_gelu_fusion", "openai_gelu"])
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
    files = ("tokenizer_model", "vocab_file", "merge_file", "tokenizer_name_or_path")
    shards = t.size(t.first_given("tensor_model_parallel_size", "model_parallel_size"), 1)
    eod = common.put_vocabulary(t, files, _vocabulary(t), shards)
    if _is_null(t) and t.get("vocab_size") is not None:
        eod = t.number("null_tokenizer_eod_id", t.size("vocab_size") - 1 + _extra_row(t))
    flags = {"reset_attention_mask": "model.document_mask", "reset_position_ids": "model.document_positions",
             "eod_mask_loss": "mask_eos_loss"}  # fmt: skip
    common.put_documents(t, flags, eod)


def _is_null(t: Translation) -> bool:
    return str(t.get("tokenizer_type")).lower() == "nulltokenizer"


def _extra_row(t: Translation) -> int:
    """Whether NullTokenizer has a token for the end of documents in addition to vocab_size."""
    return int(t.dialect.default_of("tokenizer_type", t.release))


def _vocabulary(t: Translation) -> common.GivenSize:
    """Only NullTokenizer reads vocab_size. For a tokenizer that is not known here, it is taken from the user."""
    if _is_null(t) and not any(t.get(key) for key in PADDED):
        extra = t.by_release("tokenizer_type", "The number of tokens that NullTokenizer adds to vocab_size")
        size = t.size("vocab_size")
        return common.GivenSize("vocab_size", size + extra if size is not None else None, True, PADDED)
    from_user = t.lines.get("vocab_size") == "command line"
    return common.GivenSize("vocab_size", t.size("vocab_size") if from_user else None, False, PADDED)


def _training(t: Translation) -> None:
    axes = {"model_parallel_size": "tensor", "tensor_model_parallel_size": "tensor",
            "pipeline_model_parallel_size": "pipeline", "context_parallel_size": "context"}  # fmt: skip
    common.put_parallel(t, axes)
    model = math.prod(t.size(key, 1) for key in axes)
    nodes, local = (t.get(key, 1) for key in LAUNCHED)
    certain = "nproc_per_node" in t.given and all(type(count) is int and count > 0 for count in (nodes, local))
    world = nodes * local if certain else 0
    common.put_batch(t, "global_batch_size", t.first_given("micro_batch_size", "batch_size"), None, world, model)
    t.skip("where a run runs is chosen when it is launched", *LAUNCHED)
    sets = {f"{part}_data_path": _weighted(t, f"{part}_data_path") for part in ("train", "valid")}
    common.put_data(t, _weighted(t, "data_path"), sets)
    interval = t.number("eval_interval")
    if interval is None and "eval" in t.values.get("data", {}):
        interval = t.by_release("eval_interval")
    common.put_eval(t, interval)
    if t.get("full_validation"):
        t.put("eval_subset_num_batches", -1, "full_validation")
    common.put_checkpoints(t, t.first_given("save_interval", "persistent_save_interval"))
    t.put("precision", "bf16" if t.get("bf16") else "fp16" if t.get("fp16") else "fp32", "bf16", "fp16")
    if t.get("bf16") and t.get("fp16"):
        t.refuse("fp16", "contradicts bf16; remove one of them")
    if t.get("fp16") and t.get("loss_scale"):
        t.refuse("loss_scale", "a fixed loss scale is not supported; remove it")
    t.skip("the loss is not scaled", "loss_scale")
    if (minutes := t.size("exit_duration_in_mins")) is not None:
        t.put("max_wall_time", f"{minutes}min", "exit_duration_in_mins")
    flags = (
        "recompute_granularity",
        "checkpoint_activations",
        "recompute_activations",
        "activations_checkpoint_method",
    )
    usual = "full" if t.get(flags[1]) or t.get(flags[3]) else "selective" if t.get(flags[2]) else "none"
    t.put("activation_checkpointing", t.choice(flags[0], usual), *flags)
    if t.get("deterministic_mode"):
        t.put("deterministic", True, "deterministic_mode")
    t.put("gradient_clipping", t.number("clip_grad", 1.0) or None, "clip_grad")
    if t.get("deepspeed"):
        _check_deepspeed(t)
    t.put("optimizer.betas", [t.number("adam_beta1", 0.9), t.number("adam_beta2", 0.999)], "adam_beta1", "adam_beta2")


def _weighted(t: Translation, key: str) -> common.DataSets:
    """`0.3 A 0.7 B`, or `A B`, which are weighted by their sizes."""
    words = common.listed(t.get(key))
    if len(words) > 1 and len(words) % 2 == 0 and all(isinstance(scalar(str(w)), int | float) for w in words[::2]):
        return [(float(weight), str(path)) for weight, path in zip(words[::2], words[1::2], strict=True)]
    return [(None, str(path)) for path in words]


def _check_deepspeed(t: Translation) -> None:
    """DeepSpeed clips gradients at a threshold of its own file."""
    path, here = Path(str(t.get("deepspeed_config", ""))), t.number("clip_grad", 1.0)
    try:
        clip = json.loads(path.read_text(encoding="utf-8")).get("gradient_clipping", 0.0)
    except (OSError, ValueError, AttributeError):
        t.warnings.append("deepspeed_config is not read here; DeepSpeed clips gradients at its gradient_clipping, or "
                          f"not at all without one, ingot at {show(here)}: set clip_grad to match")  # fmt: skip
        return
    if clip != here:
        t.refuse("clip_grad", f"DeepSpeed clips at the gradient_clipping of {path}, {clip}; set it to the same")


def _steps(t: Translation) -> tuple[str, str]:
    """The unit of the schedule, as of durations and as in the names of arguments."""
    given = [what for what in ("samples", "iters", "tokens") if t.size(f"train_{what}") is not None]
    if not given or given[:2] == ["samples", "iters"]:
        t.refuse("train_iters", "say how long to train with train_iters, or else with train_samples")
    what = next(iter(given), "iters")
    return {"samples": "sp", "iters": "ba", "tokens": "tok"}[what], what


def _schedule(t: Translation) -> None:
    unit, what = _steps(t)
    total, lr = t.size(f"train_{what}"), t.number("lr") or 1.0
    if total is None:
        return
    batch = t.values.get("global_train_batch_size", 1)
    per_batch = {"ba": 1, "sp": batch, "tok": batch * t.size("seq_length", 1)}
    iterations = -(-total // per_batch["tok"]) if unit == "tok" else total // per_batch[unit]
    if (tokens := t.size("train_tokens")) is not None:  # whichever is reached first
        iterations = min(iterations, -(-tokens // per_batch["tok"]))
    if (stop := t.size("exit_interval")) is not None and stop < iterations:
        t.warnings.append(
            f"exit_interval: stops after {stop} of {iterations} iterations; raise max_duration to continue"
        )
        iterations = stop
    t.put("max_duration", common.count(iterations), f"train_{what}", "train_tokens", "exit_interval")
    others = tuple({"samples", "iters"} - {what})
    for key in [k for k in t.given if k.startswith("lr_") and k.endswith(others)]:
        if t.get(key):
            t.refuse(key, f"does not go with train_{what}; use {key.rpartition('_')[0]}_{what}")
    end = t.number(f"lr_decay_{what}", total)
    share = t.number("lr_warmup_fraction", t.number("warmup"))
    key = f"lr_warmup_{what}"
    if share is None and t.get(key) is None and t.get("lr_warmup_tokens") is None:
        share = t.by_release("warmup")
    warmup = t.number(key, 0) if share is None else share * end
    t.put("scheduler.t_warmup", common.count(warmup, unit), key, "lr_warmup_fraction", "warmup")
    t.put("scheduler.t_max", common.count(end, unit), f"lr_decay_{what}")
    if t.number(key) and share is not None:
        t.refuse(key, "contradicts lr_warmup_fraction; remove one of them")
    for name, native in (("lr_warmup_tokens", "t_warmup"), ("lr_decay_tokens", "t_max")):
        if unit != "tok" and (tokens := t.size(name)) is not None:  # counts more than samples or iterations do
            t.put(f"scheduler.{native}", common.count(tokens, "tok"), name)
            amount = tokens / per_batch["tok"] * per_batch[unit]
            warmup, end = (amount, end) if native == "t_warmup" else (warmup, amount)
    if warmup >= end and warmup:
        longest = t.first_given(key, "lr_warmup_fraction", "lr_warmup_tokens")
        t.refuse(longest, f"the warmup, {warmup:g}, must be shorter than the decay, {end:g}")
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
        t.refuse(f"lr_decay_{what}", "inverse-square-root drops to min_lr there, which is not supported; remove it")
    t.put("scheduler.floor", floor, "min_lr")


MEGATRON = Dialect("megatron", "Megatron", _translate)


def read_words(words: list[tuple[str, str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Keys, values and origins from the words of an argument list and their origins. Of a repeated option, the last
    counts."""
    given, origins = {}, {}
    key, values, lists = "", list[Any](), MEGATRON.table["lists"]
    for word, origin in [*words, ("--", "")]:
        if not word.startswith("--"):
            if not key:
                raise ConfigError(f"{origin}: '{word}' belongs to no option; Megatron's options begin with --")
            if key.endswith("data_path") and len(word.split()) > 1:
                raise ConfigError(f"{origin}: '{word}' is one path to the program; remove its quotes")
            values.append(scalar(word))
            if len(values) > 1 and key not in lists:
                raise ConfigError(f"{origin}: --{key.replace('_', '-')} takes one value, not {values}")
            continue
        if key:
            given[key] = values if key in lists else values[0] if values else True
        name, mark, value = word[2:].partition("=")
        key, values = name.replace("-", "_"), [scalar(value)] if mark else []
        origins[key] = origin
    del origins[""]
    return given, origins


def scalar(word: str) -> Any:
    """A number, or text: `007` may be the name of a folder."""
    for kind in (int, float) if not re.match(r"[-+]?0\d", word) else ():
        try:
            return kind(word)
        except ValueError:
            continue
    return word
