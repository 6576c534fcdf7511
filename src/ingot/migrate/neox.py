"""GPT-NeoX: any number of YAML or JSON files whose union is the run, in NeoX's and DeepSpeed's keys.

The global batch and the padded vocabulary are not in the files; they follow from the number of processes and from the
tokenizer, by NeoX's own rules. Pythia's files set neither `bias_gelu_fusion: false` nor a first learning rate of 0, so
the tanh GELU and the warmup's first step matter.
"""

import math
import re
from typing import Any

from ingot.migrate import megatron_common as common
from ingot.migrate.trackers import put_neox_trackers
from ingot.migrate.translation import Dialect, Translation


def _translate(t: Translation) -> None:
    for key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"):
        if t.number(key) is None:
            t.refuse(key, "is missing; NeoX has no default for it")
    _model(t)
    _training(t)
    _data(t)
    _optimizer(t)
    put_neox_trackers(t)


def _model(t: Translation) -> None:
    t.put("model.family", "neox", "num_layers")
    kinds = set(re.findall(r"[a-z_]+", str(t.get("attention_config", "")))) - {"global", "flash", "all"}
    t.skip("the attention kernel is chosen here", "attention_config")
    if kinds:
        t.refuse("attention_config", f"{', '.join(sorted(kinds))} is not supported; use global or flash")
    if t.choice("pos_emb") == "rotary":
        t.put("model.rotary_pct", t.get("rotary_pct", 1.0), "rotary_pct")
        t.put("model.rotary_base", t.get("rotary_emb_base", 10000), "rotary_emb_base")
    if (window := t.size("sliding_window_width")) is not None:  # itself apart
        t.put("model.sliding_window", window + 1, "sliding_window_width")
    layernorm = t.choice("norm") == "layernorm"
    epsilon, default = ("layernorm_epsilon", 1e-5) if layernorm else ("rms_norm_epsilon", 1e-8)
    t.put("model.norm_eps", t.get(epsilon, default), epsilon)
    biases = ("use_bias_in_attn_linear", "use_bias_in_mlp")
    without = [key for key in biases if t.get(key) is False]
    t.put("model.no_bias", bool(without), *biases)
    if len(without) == 1:
        t.refuse(without[0], f"linear layers have biases everywhere or nowhere here; set {' and '.join(biases)} alike")
    if layernorm:
        t.put("model.norm_bias", t.get("use_bias_in_norms", True), "use_bias_in_norms")
    t.put("model.tie_word_embeddings", not t.get("no_weight_tying", False), "no_weight_tying")
    dropout = t.get("hidden_dropout")
    dropout = t.by_release("hidden_dropout") if dropout is None else dropout
    for native in ("model.emb_pdrop", "model.resid_pdrop"):
        t.put(native, dropout, "hidden_dropout")
    gelu = "gelu_tanh" if t.get("bias_gelu_fusion", False) else "gelu"
    activation = gelu if t.choice("activation") == "gelu" else "swiglu"
    t.put("model.activation", activation, "activation", *["bias_gelu_fusion"] * (activation != "swiglu"))
    multiple = t.size("mlp_multiple_of", 1)
    ffn = t.size("intermediate_size") or int(t.number("expansion_factor", 4) * t.size("hidden_size", 1))
    if activation == "swiglu":  # the gated pair together is two thirds of the given width
        ffn = int(ffn * 2 / 3) // 2
    widths = ("intermediate_size", "expansion_factor", "mlp_multiple_of")
    t.put("model.ffn_hidden_size", -(-ffn // multiple) * multiple, *widths)
    init, output = t.choice("init_method"), str(t.get("output_layer_init_method", "scaled_normal"))
    if t.choice("output_layer_init_method") != "wang" and ("normal" in output) != (init == "normal"):
        t.refuse("output_layer_init_method", f"{output} does not go with init_method {init}; wang_init goes with both")
    files = ("vocab_file", "merge_file")
    given = common.GivenSize("padded_vocab_size", None, False)
    eod = common.put_vocabulary(t, files, given, t.size("model_parallel_size", 1))
    common.put_documents(t, {"eod_mask_loss": "mask_eos_loss"}, eod)


def _training(t: Translation) -> None:
    tensor, pipeline = t.size("model_parallel_size", 1), max(1, t.number("pipe_parallel_size", 0))
    common.put_parallel(t, {"model_parallel_size": "tensor", "pipe_parallel_size": "pipeline"})
    world = t.size("global_num_gpus") or t.size("world_size") or 0
    if not world and t.number("num_gpus") and t.number("num_nodes", -1) > 0:
        world = t.number("num_gpus") * t.number("num_nodes")
    micro = t.first_given("train_micro_batch_size_per_gpu", "batch_size")
    common.put_batch(
        t, "train_batch_size", micro, t.first_given("gradient_accumulation_steps", "gas"), world, tensor * pipeline
    )
    interval = t.first_given("checkpoint_factor", "save_interval")
    common.put_checkpoints(t, interval)
    if t.number("save_interval", t.number(interval)) != t.number(interval):
        t.refuse("save_interval", "is the older name of checkpoint_factor and contradicts it; remove one of them")
    kinds = ("precision", "fp16.enabled", "bf16.enabled", "fp16.type")
    bf16 = t.get("bf16.enabled", False) or t.get("fp16.type") == "bfloat16"
    default = "bfloat16" if bf16 else "fp16" if t.get("fp16.enabled", False) else "fp32"
    t.put("precision", t.choice("precision", default), *kinds)
    clip = t.number("gradient_clipping", t.number("clip_grad", 1.0))
    t.put("gradient_clipping", clip or None, "gradient_clipping", "clip_grad")
    if t.number("clip_grad", clip) != clip:
        t.refuse("clip_grad", f"contradicts gradient_clipping {clip}; remove one of them")


def _data(t: Translation) -> None:
    parts: dict[str, list[tuple[Any, str]]] = {}
    for part in ("train", "valid"):
        paths, weights = (common.listed(t.get(f"{part}_data_{what}")) for what in ("paths", "weights"))
        if weights and len(weights) != len(paths):
            t.refuse(f"{part}_data_weights", f"has {len(weights)} weights for {len(paths)} datasets")
            weights = []
        parts[f"{part}_data_paths"] = list(zip(weights or [1.0] * len(paths), paths, strict=True))
        t.skip("weights of the mixture", f"{part}_data_weights")
    common.put_data(t, [(None, t.get("data_path"))] if t.get("data_path") else [], parts)
    common.put_eval(t, t.number("eval_interval", 1000))


def _optimizer(t: Translation) -> None:
    kind, rate = t.first_given("optimizer.type", "optimizer_type"), t.first_given("optimizer.params.lr", "lr")
    name = t.choice(kind)
    if (lr := t.number(rate, 0)) <= 0:
        t.refuse(rate, "is missing; set it")
        lr = 1.0
    if t.number("lr", lr) != lr:
        t.refuse("lr", f"contradicts optimizer.params.lr {lr}; remove one of them")
    t.put("optimizer.name", name, kind)
    t.put("optimizer.lr", lr, rate)
    betas = "optimizer.params.betas"
    t.put("optimizer.betas", t.get(betas, [0.9, 0.99 if name == "lion" else 0.999]), betas)
    decay = t.number("weight_decay")
    decay = t.by_release("weight_decay") if decay is None else decay
    # their Lion decays by lr x weight_decay; ours by (lr / peak) x weight_decay
    t.put("optimizer.weight_decay", decay * lr if name == "lion" else decay, "weight_decay")
    iterations, epochs = t.size("train_iters"), t.size("train_epochs")
    if (iterations is None) == (epochs is None):
        t.refuse("train_iters", "say how long to train with train_iters, or else with train_epochs")
        return
    length = common.count(iterations) if iterations else common.count(epochs, "ep")
    if (stop := t.size("exit_interval")) is not None and (iterations is None or stop < iterations):
        t.warnings.append(f"exit_interval: stops after {stop} iterations; raise max_duration to continue")
        length = common.count(stop)
    t.put("max_duration", length, "train_iters", "train_epochs", "exit_interval")
    total, unit = (iterations, "ba") if iterations else (1.0, "dur")
    if epochs and t.get("exit_interval"):
        t.refuse("exit_interval", "the schedule then has no end here; use train_iters")
    end = t.size("lr_decay_iters") or total * t.number("lr_decay_fraction", 1.0)
    warmup = t.number("warmup", 0.01) * end
    t.put("scheduler.t_warmup", common.count(warmup, unit), "warmup")
    if warmup:
        t.put("scheduler.warmup_floor", 1, "warmup")
    t.put("scheduler.t_max", common.count(end, unit), "lr_decay_iters", "lr_decay_fraction")
    floor, style = t.number("min_lr", 0.0) / lr, t.choice("lr_decay_style")
    t.put("scheduler.alpha_f", floor if style == "cosine_with_warmup" else 0.0, "min_lr")
    if style.startswith("cosine") and end < total:
        t.refuse(t.first_given("lr_decay_iters", "lr_decay_fraction"), "NeoX's cosine rises again after it; remove it")
    if style.startswith("exponential"):  # halves from the end of the warmup to lr_decay_iters, and goes on from there
        t.put("scheduler.t_max", common.count(total, unit), "lr_decay_style")
        t.put("scheduler.alpha_f", math.exp(-0.693 * (total - warmup) / (end - warmup)), "lr_decay_style")
    if style.startswith(("linear", "exponential")):  # cut off at min_lr
        t.put("scheduler.floor", floor, "min_lr")


NEOX = Dialect("neox", "GPT-NeoX", _translate)
