"""LLM Foundry YAML: current files, older ones with `data_local` at the top, and the `mosaic_gpt` files before them.

Composer's time strings, global batch and schedules are ours too, so most keys keep their names. What differs: MPT's
nested model sections, the streaming dataset's keys, and the defaults that its YAMLs leave out.
"""

import math
import re
import sys
from typing import Any

from ingot.config.dotted_keys import flatten
from ingot.errors import ConfigError
from ingot.migrate.megatron_common import put_parallel
from ingot.migrate.trackers import native_override_of, put_foundry_trackers
from ingot.migrate.translation import REFUSED, Dialect, Translation, order_of

INITS = ("model.init_config.name", "model.param_init_fn")
STDS = ("model.init_config.init_std", "model.init_std")
KV = "model.attn_config.kv_n_heads"
HF_NAME, PRETRAINED, HF_OVERRIDES = (
    f"model.{key}" for key in ("pretrained_model_name_or_path", "pretrained", "config_overrides")
)
HF_KEYS = (HF_NAME, PRETRAINED, HF_OVERRIDES)
MPT_ROWS = 2048  # MPTConfig's max_seq_len


def _translate(t: Translation) -> None:
    if t.choice("model.name") == "hf":
        _hf_model(t)
    else:
        _model(t)
    _training(t)
    _batch(t)
    _where(t)
    _loader(t, "data.train", "train_loader")
    if any(key.startswith("eval_loader.") for key in t.given):
        _loader(t, "data.eval", "eval_loader")
    elif isinstance(loaders := t.get("eval_loader"), list):
        _eval_loaders(t, loaders)
    _tasks(t)
    put_foundry_trackers(t)


def _model(t: Translation) -> None:
    family = t.choice("model.name")
    t.put("model.family", family, "model.name")
    norm, init = "low_precision_layernorm", "kaiming_normal_"
    given = t.get("model.low_precision_layernorm")
    if family == "mosaic_gpt":
        # The code before v0.0.4 starts from normal(init_std) and has plain layer norms. Its files name init_std and no
        # param_init_fn; model.device became init_device before the defaults changed.
        named = any(key in t.given for key in INITS)
        old = "model.device" in t.given or (not named and any(key in t.given for key in STDS))
        if t.peer_version is not None:
            old, named = order_of(t.peer_version) < order_of("v0.0.4"), False
        if old:
            norm, init = "layernorm", "baseline_"
        settled = given is not None or "algorithms.low_precision_layernorm" in t.given or "model.norm_type" in t.given
        if named and not old and not settled:
            t.refuse("model.low_precision_layernorm", "is missing, and releases of mosaic_gpt differ: set it to false "
                     "for those before v0.0.4, to true for later ones, or choose with --peer-version")  # fmt: skip
    if given is not None:
        norm = "low_precision_layernorm" if given else "layernorm"
    norm = t.choice("model.norm_type", norm)
    if "algorithms.low_precision_layernorm" in t.given:
        norm = "low_precision_layernorm"
    t.put("model.norm", norm, "model.norm_type", "model.low_precision_layernorm", "algorithms.low_precision_layernorm")
    alibi, rope = t.get("model.attn_config.alibi", t.get("model.alibi")), t.get("model.attn_config.rope")
    learned = "learned" if t.get("model.learned_pos_emb", True) else "none"
    t.put("model.positions", "alibi" if alibi else "rotary" if rope else learned, "model.learned_pos_emb",
          "model.attn_config.alibi", "model.alibi", "model.attn_config.rope")  # fmt: skip
    if family == "mpt" and not alibi and not rope and learned == "learned" and t.get("model.max_seq_len") is None:
        t.put("model.max_seq_len", MPT_ROWS, "model.max_seq_len")
        if t.get("max_seq_len") != MPT_ROWS:
            t.warnings.append(f"model.max_seq_len is not given, and LLM Foundry then has {MPT_ROWS} position rows, not "
                              f"max_seq_len {t.get('max_seq_len')}; set model.max_seq_len to change that")  # fmt: skip
    for key in HF_KEYS:
        if t.get(key) is not None:
            t.refuse(key, "applies to hf_causal_lm only; remove it")
    width, heads = t.size("model.d_model", 2048), t.size("model.n_heads", 16)
    if t.number("model.head_dim", width / heads) * heads != width:
        t.refuse("model.head_dim", f"MPT computes with d_model / n_heads, {width / heads:g}; remove it")
    groups = t.size(KV, heads)
    if (kind := t.choice("model.attn_config.attn_type")) != "all":
        t.put("model.n_kv_heads", 1 if kind == "one" else groups, "model.attn_config.attn_type", KV)
    keys = [f"model.ffn_config.{key}" for key in ("ffn_act_fn.name", "ffn_type", "ffn_act_fn.approximate")]
    act, kind = str(t.get(keys[0], "gelu")), t.choice(keys[1])
    gelu = "gelu_tanh" if t.get(keys[2], "none") == "tanh" else "gelu"
    activation = {("gelu", "mptmlp"): gelu, ("silu", "mptglu"): "swiglu"}.get((act, kind))
    t.put("model.activation", activation, *keys)
    if activation is None:
        t.refuse(t.first_given(*keys), f"{kind} with {act}: possible are mptmlp with gelu and mptglu with silu")
    window = "model.attn_config.sliding_window_size"
    if t.number(window, -1) != -1:  # itself apart
        t.put("model.sliding_window", t.size(window) + 1, window)
    apart = t.first_given("model.attn_config.attn_uses_sequence_id", "model.attn_uses_sequence_id")
    if t.get(apart):
        eos = "train_loader.dataset.eos_token_id"
        t.put("model.document_mask", True, apart)
        t.put("model.eos_token_id", t.get(eos), eos)
        if t.get(eos) is None:
            t.refuse(apart, f"the token that ends a document is needed to separate documents; set {eos}")
    _init(t, init)


def _hf_model(t: Translation) -> None:
    """A fresh model in the shape of one on the Hugging Face hub, by its published config and `config_overrides`."""
    name = str(t.get(HF_NAME, ""))
    if t.get(PRETRAINED, True) is not False:
        t.refuse(PRETRAINED, "starts from published weights; set it to false for a fresh model of that shape, or use "
                 "`ingot import` and load_path")  # fmt: skip
    t.skip("weights are initialized here", PRETRAINED)
    kinds = t.dialect.table["hf_models"]
    kind = next((kind for kind in kinds.values() if name in kind["names"]), None)
    if kind is None:
        t.refuse(
            HF_NAME,
            f"its shape cannot be built here; possible: {', '.join(n for k in kinds.values() for n in k['names'])}",
        )
        return
    shape = kind["native"] | kind["names"][name]
    for key in [key for key in t.given if key.startswith(f"{HF_OVERRIDES}.")]:
        native = kind["overrides"].get(key.removeprefix(f"{HF_OVERRIDES}."))
        if native is None:
            t.refuse(key, f"not supported; possible are {', '.join(kind['overrides'])}")
        elif native == "activation":
            shape[native] = t.choice(HF_OVERRIDES + ".activation_function")
        elif t.get(key) is not None:
            shape[native] = t.get(key)
        t.put(f"model.{native}", shape.get(native), key)
    for key, value in shape.items():
        t.put(f"model.{key}", value, HF_NAME)
    tokenizer = str(t.get("tokenizer.name", name))
    sizes = {name: kind["native"]["vocab_size"], **t.dialect.table["tokenizer_sizes"]}
    if f"{HF_OVERRIDES}.vocab_size" not in t.given:
        if tokenizer not in sizes:
            t.refuse("tokenizer.name", "its size is not known here, and the embedding grows to it; set "
                     f"{HF_OVERRIDES}.vocab_size to the rows of the embedding")  # fmt: skip
        t.put("model.vocab_size", max(shape["vocab_size"], sizes.get(tokenizer, 0)), HF_NAME)


def _init(t: Translation, default: str) -> None:
    key = t.first_given(*INITS)
    init = t.choice(key, default)
    t.put("model.init", "small" if init == "neox" else init, key)
    std = t.get(STDS[0], t.get(STDS[1], 0.02 if t.get("model.name") == "mosaic_gpt" else None))
    if init == "normal" and std is not None:
        t.put("model.init_std", std, *STDS)
    elif init == "normal":
        t.refuse(STDS[0], "is missing; baseline_ needs it")
    divs = ("model.init_config.init_div_is_residual", "model.init_div_is_residual")
    divisor = t.get(divs[0], t.get(divs[1], True))
    scale = math.sqrt(2 * t.size("model.n_layers", 24))
    usual = divisor is True or (isinstance(divisor, int | float) and math.isclose(divisor, scale))
    if not usual and (divisor is not False or init == "neox"):
        t.refuse(
            t.first_given(*divs), f"must be true: residual projections start smaller by sqrt(2 n_layers), {scale:g}"
        )
    t.put("model.residual_init", "wang" if init == "neox" else "scaled" if usual else "same", *divs)


def _training(t: Translation) -> None:
    lion = t.choice("optimizer.name") == "lion"
    t.put("optimizer.lr", t.number("optimizer.lr", 1e-4 if lion else 1e-3), "optimizer.lr")
    t.put("optimizer.betas", t.get("optimizer.betas", [0.9, 0.99 if lion else 0.95]), "optimizer.betas")
    decay = t.number("optimizer.weight_decay", 0.0 if lion else 1e-5)
    t.put("optimizer.weight_decay", decay, "optimizer.weight_decay")
    if decay:
        t.put("optimizer.decay", "all", "optimizer.weight_decay")  # biases and norms too
    schedule = t.choice("scheduler.name")
    if schedule == "inv_sqrt_with_warmup":
        t.put("scheduler.t_scale", t.get("scheduler.t_scale", "1ba"), "scheduler.t_scale")
        t.put("scheduler.alpha_f", t.get("scheduler.alpha_f_decay", 0.0), "scheduler.alpha_f_decay")
        t.put("scheduler.t_max", _time(t.get("scheduler.t_max", "1dur")), "scheduler.t_max")
        t.put("scheduler.t_cooldown", _time(t.get("scheduler.t_cooldown", "0ba")), "scheduler.t_cooldown")
        t.put("scheduler.alpha_cooldown", t.get("scheduler.alpha_f_cooldown", 0.0), "scheduler.alpha_f_cooldown")
    elif schedule != "constant_with_warmup":
        t.put("scheduler.alpha_f", t.get("scheduler.alpha_f", 0.0), "scheduler.alpha_f")
        t.put("scheduler.t_max", _time(t.get("scheduler.t_max", "1dur")), "scheduler.t_max")
    clip, kind = (f"algorithms.gradient_clipping.clipping_{key}" for key in ("threshold", "type"))
    t.choice(kind)
    limit = t.number(clip, t.number("grad_clip_norm", -1))
    t.put("gradient_clipping", limit if limit > 0 else None, clip, kind, "grad_clip_norm")
    intervals = {"max_duration": None, "eval_interval": 1, "save_interval": "1000ba", "console_log_interval": "1ba"}
    for key, default in intervals.items():
        if (value := t.get(key, default)) is None:
            t.refuse(key, "is missing; set it, for example to 4800ba")
        t.put(key.replace("console_log", "log"), _time(value), key)


def _batch(t: Translation) -> None:
    keys = ("global_train_batch_size", "device_train_batch_size", "n_gpus")
    total, part, gpus = (t.size(key) for key in keys)
    if total is None and not (part and gpus):
        t.refuse("global_train_batch_size", "is missing; set it, for here it does not follow from the devices")
    elif part and gpus and total not in (None, part * gpus):
        t.refuse("device_train_batch_size", f"{part} x {gpus} n_gpus is not global_train_batch_size {total}; keep one")
    else:
        t.put("global_train_batch_size", total or part * gpus, *keys)
    micro, steps = t.get("device_train_microbatch_size", "auto"), t.size("device_train_grad_accum")
    if micro == "auto" and part and steps:
        micro = part // steps
    micro = micro if isinstance(micro, int) else "auto"
    t.put("device_train_microbatch_size", micro, "device_train_microbatch_size", "device_train_grad_accum")


def _where(t: Translation) -> None:
    if (folder := t.get("save_folder")) is not None:
        t.put("save_folder", str(folder).replace("{run_name}", str(t.get("run_name", "run"))), "save_folder")
    if (path := t.get("load_path")) is not None:
        t.put("load_path", path, "load_path", "load_weights_only")
        if not t.get("load_weights_only"):
            t.refuse("load_path", "another run's optimizer state is not loaded, but its weights are with "
                     "load_weights_only=true; to continue a run of your own, repeat its command")  # fmt: skip
    if t.choice("fsdp_config.sharding_strategy") == "NO_SHARD":
        t.put("parallel.shard", 1, "fsdp_config.sharding_strategy")
    put_parallel(t, {"fsdp_config.data_parallel_shard_degree": "shard", "tp_config.tensor_parallel_degree": "tensor",
                     "fsdp_config.data_parallel_replicate_degree": "replicate"})  # fmt: skip
    if compiled := [key for key in t.given if key.startswith("compile_config") and t.given[key] is not None]:
        t.put("compile", True, *compiled)


def _loader(t: Translation, native: str, loader: str) -> None:
    t.choice(f"{loader}.name")
    section, streams = f"{loader}.dataset", f"{loader}.dataset.streams."
    length = t.get(f"{section}.max_seq_len")
    if length is not None and length != t.get("max_seq_len", length):
        t.refuse(f"{section}.max_seq_len", f"is not max_seq_len {t.get('max_seq_len')}; there is one sequence length")
    t.put(f"{native}.shuffle", t.get(f"{section}.shuffle", False), f"{section}.shuffle")
    if t.choice(grouping := f"{section}.group_method") == "truncate":
        if loader == "train_loader":
            t.refuse(grouping, "trains on one document per sample, cut off; prepared data is packed, so use concat")
        t.skip("prepared data is packed: see the warning", grouping)
        t.warnings.append(f"{grouping}: truncate evaluates on one document per sample, cut off and padded; here "
                          "samples are packed, so validation losses differ from LLM Foundry's")  # fmt: skip
    if (seed := t.get(f"{section}.shuffle_seed")) is not None:
        t.put(f"{native}.shuffle_seed", seed, f"{section}.shuffle_seed")
    names = dict.fromkeys(key.removeprefix(streams).split(".")[0] for key in t.given if key.startswith(streams))
    for source, target in [(streams + name, f"{native}.mix.{name}") for name in names] or [(section, native)]:
        if (local := t.get(f"{source}.local")) is None:
            t.refuse(f"{source}.local", "is missing; name the folder of the data, or the cache of what is remote")
        t.put(f"{target}.path", local, f"{source}.local")
        for key in ("remote", "split", "cache_limit", "token_encoding_type", *["proportion"] * bool(names)):
            foreign = f"{source}.{key}"
            if key in ("split", "token_encoding_type"):  # a stream without its own takes that of the dataset
                foreign = t.first_given(foreign, f"{section}.{key}")
            if (value := t.get(foreign)) is not None and not (key == "remote" and value == local):
                t.put(f"{target}.{'weight' if key == 'proportion' else key}", value, foreign)
        t.skip("the same as local", f"{source}.remote")
        for key in [key for key in t.given if key.startswith(f"{source}.")]:
            if reason := t.dialect.reasons.get(key.replace(source, section, 1)):
                t.skip(reason, key)
    for key in [key for key in t.given if key.startswith(f"{section}.") and key not in t.rows]:
        if names and key != f"{section}.max_seq_len":
            t.refuse(
                key,
                "each stream has its own local, remote, split, cache_limit and proportion; set it there",
            )


def _eval_loaders(t: Translation, loaders: list[Any]) -> None:
    """Several validation sets, by their labels."""
    others = {key: value for key, value in t.given.items() if key != "eval_loader"}
    for loader in loaders:
        label = loader.get("label") if isinstance(loader, dict) else None
        if not label:
            t.refuse("eval_loader", "each of several loaders needs a label")
            continue
        alone = Translation(t.dialect, others | flatten({"eval_loader": loader}), t.lines, t.elsewhere, t.peer_version)
        alone.run()
        for row in alone.rows.values():
            if row.key.startswith("eval_loader") and row.fate == REFUSED:
                t.refuse("eval_loader", f"{label}: {row.key.removeprefix('eval_loader.')}: {row.text}")
        if found := alone.values.get("data", {}).get("eval"):
            t.put(f"data.eval.{label}", found, "eval_loader")


def _tasks(t: Translation) -> None:
    """Downstream tasks: the names of their files, or what the config writes out."""
    for key, native in (("icl_tasks", "eval.tasks"), ("eval_gauntlet", "eval.gauntlet")):
        value = t.get(key)
        parts = [name for name in t.given if name == key or name.startswith(f"{key}.")]
        if not any(t.given[name] for name in parts):
            continue
        if value is None:  # a section, or a list of one, was written out as dotted keys
            value = _nested({name.removeprefix(f"{key}."): t.given[name] for name in parts})
        if key == "icl_tasks":
            value = _known_tasks(t, value if isinstance(value, list) else [value])
        if value and (key == "icl_tasks" or "eval" in t.values):
            t.put(native, value, *parts)
        else:
            t.skip("no task is left to score", *parts)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        inner = found
        for name in sections:
            inner = inner.setdefault(name, {})
        inner[leaf] = value
    return found


def _known_tasks(t: Translation, tasks: list[Any]) -> list[Any]:
    """The tasks that can be scored here; a warning names the others."""
    known = []
    for task in tasks:
        values = task if isinstance(task, dict) else {}
        reason = ""
        if values.get("icl_task_type") == "code_evaluation":
            reason = "code_evaluation runs generated programs, which ingot does not"
        elif str(values.get("dataset_uri", "")).startswith("hf://"):
            reason = "datasets of the hub are not read as tasks; save it as a .jsonl file and name that"
        if reason:
            t.warnings.append(f"icl_tasks: {values.get('label')} is left out: {reason}")
            continue
        known += [{key: value for key, value in values.items() if value not in ({}, None)} if values else task]
    return known


def _time(value: Any) -> str:
    """Composer reads a number without a unit as epochs."""
    return str(value) if not isinstance(value, int) else f"{value}ep" if value > 0 else "0ba"


FOUNDRY = Dialect("foundry", "LLM Foundry", _translate)


def native_override(override: str) -> list[str]:
    """An override in LLM Foundry's keys as overrides of a native recipe: what the tables say without arithmetic."""
    key, _, value = override.partition("=")
    if where := re.fullmatch(r"(?:variables\.)?data_(local|remote)", key):
        field = "path" if where[1] == "local" else "remote"
        return [f"data.{part}.{field}={value}" for part in ("train", "eval")] + [
            *("data.train.split=train", "data.eval.split=val", "data.eval.shuffle=false")
        ]
    if loader := re.fullmatch(
        r"(train|eval)_loader\.dataset\.(local|remote|split|shuffle|shuffle_seed|cache_limit)", key
    ):
        return [f"data.{loader[1]}.{'path' if loader[2] == 'local' else loader[2]}={value}"]
    if key in FOUNDRY.table["renamed"]:
        return [f"{FOUNDRY.table['renamed'][key]}={value}"]
    choice = FOUNDRY.table["choices"].get(key, {})
    if "native" in choice and value in choice["names"]:
        return [f"{choice['native']}={choice['names'][value]}"]
    if (tracker := native_override_of(key, value)) is not None:
        return tracker
    if key in FOUNDRY.reasons:
        print(f"{key}: not needed here, because {FOUNDRY.reasons[key]}", file=sys.stderr)
        return []
    raise ConfigError(f"command line: {override}: a key of LLM Foundry, and the recipe is a native one, where this has "
                      "no direct counterpart; see `ingot config keys data` for its keys")  # fmt: skip
