"""LLM Foundry YAML: current files, older ones with `data_local` at the top, and the `mosaic_gpt` files before them.

Composer's time strings, global batch and schedules are ours too, so most keys keep their names. What differs: MPT's
nested model sections, the streaming data set's keys, and every default that its YAMLs leave unsaid.
"""

import math
from typing import Any

from ingot.migrate.megatron_common import put_parallel
from ingot.migrate.translation import Dialect, Translation


def _in(sections: str, keys: str) -> str:
    return " ".join(f"{section}.{key}" for section in sections.split() for key in keys.split())


DATASETS = "train_loader.dataset eval_loader.dataset"
READING = """
    download_retry download_timeout validate_hash keep_zip predownload partition_algo num_canonical_nodes
    shuffle_algo shuffle_block_size sampling_granularity allow_unsafe_types prefetch tokenizer_name eos_token_id
    bos_token_id override_eos_token_id_mismatch_error override_bos_token_id_mismatch_error stream_name stream_config
    group_method"""
INITS = ("model.init_config.name", "model.param_init_fn")
STDS = ("model.init_config.init_std", "model.init_std")
KV = "model.attn_config.kv_n_heads"
OWN_READER = "tokens are prepared before training; reading ahead, retries and order are the loader's own"

SAME = """
    model.d_model model.n_heads model.n_layers model.vocab_size model.max_seq_len model.no_bias model.resid_pdrop
    model.emb_pdrop model.tie_word_embeddings model.norm_eps model.expansion_ratio model.attn_pdrop
    model.softmax_scale model.alibi_bias_max model.mlp_ratio=model.expansion_ratio model.attn_qk_ln=model.qk_ln
    model.attn_clip_qkv=model.clip_qkv model.attn_config.attn_pdrop=model.attn_pdrop
    model.attn_config.qk_ln=model.qk_ln model.attn_config.clip_qkv=model.clip_qkv
    model.attn_config.softmax_scale=model.softmax_scale model.attn_config.alibi_bias_max=model.alibi_bias_max
    model.attn_config.rope_theta=model.rotary_base model.ffn_config.ffn_hidden_size=model.ffn_hidden_size
    max_seq_len seed eval_subset_num_batches device_eval_batch_size save_num_checkpoints_to_keep save_weights_only
    optimizer.lr optimizer.betas optimizer.eps scheduler.t_warmup
    fsdp_config.activation_checkpointing=activation_checkpointing loggers.tensorboard loggers.tensorboard.log_dir
    run_name=name"""
DEFAULTS = {"seed": 17, "optimizer.eps": 1e-8}
CHOICES = {
    "precision": "precision amp_bf16=bf16 bf16 amp_fp16=fp16 fp16 fp32",
    "optimizer.name": "optimizer.name decoupled_adamw decoupled_lionw=lion",
    "fsdp_config.state_dict_type": "state_dict_type sharded full local=sharded",
    "scheduler.name": "scheduler.name cosine_with_warmup constant_with_warmup linear_decay_with_warmup "
    "inv_sqrt_with_warmup",
}
NOT_NEEDED = {
    "a variable, for ${...}": "variables data_local data_remote tokenizer_name global_seed num_canonical_nodes",
    "prepared data carries its tokenizer": "tokenizer model.tokenizer_name",
    "execution, which is chosen here": """
        max_split_size_mb expandable_segments cuda_load_lazy dist_timeout spin_dataloaders tp_config.strategy
        model: init_device device attn_impl use_cache use_pad_tok_in_ffn verbose activation_checkpointing_target
        master_weights_dtype init_config.verbose
        model.attn_config: attn_impl fused_qkv rope_impl rope_dail_config.pos_idx_in_fp32""",
    "the loss is the same cross-entropy, and is computed once": "model.loss_fn model.use_train_metrics",
    "used by other initialisations only": "model.init_config.init_gain model.init_gain",
    "there is no ratio that schedules are scaled by": "scheduler.scale_warmup",
    "losses are weighted by their tokens": "accumulate_train_batch_on_tokens",
    "batches are full, and token data is all there is": """
        train_loader,eval_loader: label drop_last num_workers pin_memory prefetch_factor persistent_workers timeout""",
    OWN_READER: _in(DATASETS, READING),
    "weights and optimizer are spread by FSDP2; fp32 master weights, gradients reduced in fp32": """
        fsdp_config: mixed_precision activation_checkpointing_reentrant activation_cpu_offload cpu_offload
        backward_prefetch forward_prefetch backward_prefetch_limit forward_prefetch_limit limit_all_gathers
        sync_module_states use_orig_params keep_low_precision_grads load_planner save_planner ignored_modules
        process_group auto_wrap te_checkpoint_wrapper te_shard_fp8_weight verbose min_params device_mesh
        reshard_after_forward""",
    "every checkpoint loads on any number of devices": "fsdp_config: sharded_ckpt_prefix_dir load_monolith_rank0_only",
    "checkpoints have names of their own, and are never overwritten": """
        save_filename save_latest_filename save_overwrite load_strict_model_weights""",
    "the same command continues the run": "autoresume",
    "always logged here": """
        callbacks: speed_monitor lr_monitor memory_monitor runtime_estimator optimizer_monitor
        system_metrics_monitor env_logging nan_monitor memory_snapshot oom_observer scheduled_gc fdiff_metrics
        eval_output_logging loss_perp_v_len run_timeout""",
    "`ingot export` and `ingot generate` work on any checkpoint": """
        only_hf_checkpoint only_composer_checkpoint
        callbacks: hf_checkpointer mono_checkpoint_saver generate_callback""",
    "not run here: metrics go to the console, metrics.jsonl and TensorBoard": """
        loggers: wandb mlflow comet_ml neptune mosaicml inmemory in_memory_logger slack file_logger""",
    "not run here: in-context tasks are no part of a training run": """
        icl_tasks icl_tasks_str icl_subset_num_batches icl_seq_len eval_gauntlet eval_gauntlet_str""",
    "evaluation runs at every eval_interval and at the end": "eval_first",
    "no part of the run": "progress_bar log_to_console python_log_level log_config metadata flatten_metadata profiler",
}
REFUSED = {
    "the model here has no such part; leave it out": """
        model: pretrained_model_name_or_path pretrained config_overrides attention_bias logit_scale
        final_logit_softcapping embedding_fraction=1|1.0 block_overrides prefix_lm fc_type=torch
        model.attn_config: qk_gn attn_logit_softcapping nope attn_temperature_tuning kv_dim prefix_lm
        rope_dail_config.type=original rope_dail_config.xpos_scale_base=512 rope_hf_config.type=no_scaling
        rope_hf_config.factor=1|1.0""",
    "mixtures of experts are not supported; use ffn_type mptmlp": """
        model.ffn_config: moe_num_experts moe_top_k moe_world_size moe_loss_weight moe_jitter_eps mlp_impl
        memory_optimized_mlp uniform_expert_assignment moe_normalize_expert_weights mlp_type""",
    "weights start from a normal distribution, with fan_in and relu, embeddings like the others; leave it out": """
        model,model.init_config: fan_mode=fan_in init_nonlinearity=relu emb_init_std emb_init_uniform_lim""",
    "all weights are trained with one set of values; leave it out": "optimizer.disable_grad optimizer.param_groups",
    "the schedule goes from 1 to alpha_f over t_max; leave it out": "scheduler.alpha_i=1|1.0 scheduler.alpha=1|1.0",
    "not available here; leave it out": """
        algorithms.alibi algorithms.gated_linear_units train_subset_num_batches=-1 save_ignore_keys load_ignore_keys
        callbacks: early_stopper layer_freezing global_lr_scaling curriculum_learning dataset_swap load_checkpoint
        kill_loss_spike async_eval mbmoe_tok_per_expert""",
    "code of others is not run; describe the run natively": "code_paths",
    "samples are drawn at random over all streams, once an epoch; leave it out": """
        train_loader.dataset,eval_loader.dataset: batching_method=random sampling_method=balanced epoch_size replication
        mlm_probability""",
}
COMPUTED = """
    model.name model.norm_type model.low_precision_layernorm model.learned_pos_emb model.head_dim model.alibi
    model.attn_config.alibi model.attn_config.rope model.attn_config.attn_type model.attn_config.kv_n_heads
    model.ffn_config.ffn_type model.ffn_config.ffn_act_fn.name model.ffn_config.ffn_act_fn.approximate
    model.init_config.name model.init_config.init_div_is_residual model.init_config.init_std model.param_init_fn
    model.init_div_is_residual model.init_std max_duration eval_interval save_interval console_log_interval
    save_folder load_path load_weights_only global_train_batch_size device_train_batch_size
    device_train_microbatch_size device_train_grad_accum n_gpus optimizer.weight_decay scheduler.t_max
    scheduler.alpha_f scheduler.t_scale scheduler.alpha_f_decay scheduler.t_cooldown scheduler.alpha_f_cooldown
    model.attn_config.sliding_window_size model.attn_config.attn_uses_sequence_id model.attn_uses_sequence_id
    algorithms.gradient_clipping.clipping_type algorithms.low_precision_layernorm
    algorithms.gradient_clipping.clipping_threshold grad_clip_norm fsdp_config.sharding_strategy
    fsdp_config.data_parallel_shard_degree fsdp_config.data_parallel_replicate_degree compile_config eval_loader
    tp_config.tensor_parallel_degree train_loader.name eval_loader.name
""" + _in(DATASETS, "local remote split shuffle shuffle_seed cache_limit token_encoding_type max_seq_len streams")


def _translate(t: Translation) -> None:
    _model(t)
    _training(t)
    _batch(t)
    _where(t)
    _loader(t, "data.train", "train_loader")
    if any(key.startswith("eval_loader.") for key in t.given):
        _loader(t, "data.eval", "eval_loader")
    elif t.get("eval_loader"):
        t.refuse("eval_loader", "names several data sets, and a run evaluates on one; keep one")


def _model(t: Translation) -> None:
    family = t.choice("model.name", None, "mpt_causal_lm=mpt mosaic_gpt")
    t.put("model.family", family, "model.name")
    norm, init = "low_precision_layernorm", "kaiming_normal_"
    said = t.get("model.low_precision_layernorm")
    if family == "mosaic_gpt":
        # The code before v0.0.4 starts from normal(init_std) and has plain layer norms. Its files name init_std and no
        # param_init_fn; model.device became init_device before the defaults changed.
        named = any(key in t.given for key in INITS)
        old = "model.device" in t.given or (not named and any(key in t.given for key in STDS))
        if old:
            norm, init = "layernorm", "baseline_"
        settled = said is not None or "algorithms.low_precision_layernorm" in t.given or "model.norm_type" in t.given
        if named and not old and not settled:
            t.refuse("model.low_precision_layernorm", "is missing, and releases of mosaic_gpt differ: set it to false "
                     "for those before v0.0.4, to true for later ones")  # fmt: skip
    if said is not None:
        norm = "low_precision_layernorm" if said else "layernorm"
    norm = t.choice("model.norm_type", norm, "layernorm low_precision_layernorm rmsnorm triton_rmsnorm=rmsnorm")
    if "algorithms.low_precision_layernorm" in t.given:
        norm = "low_precision_layernorm"
    t.put("model.norm", norm, "model.norm_type", "model.low_precision_layernorm", "algorithms.low_precision_layernorm")
    alibi, rope = t.get("model.attn_config.alibi", t.get("model.alibi")), t.get("model.attn_config.rope")
    learned = "learned" if t.get("model.learned_pos_emb", True) else "none"
    t.put("model.positions", "alibi" if alibi else "rotary" if rope else learned, "model.learned_pos_emb",
          "model.attn_config.alibi", "model.alibi", "model.attn_config.rope")  # fmt: skip
    width, heads = t.size("model.d_model", 2048), t.size("model.n_heads", 16)
    if t.number("model.head_dim", width / heads) * heads != width:
        t.refuse("model.head_dim", f"MPT computes with d_model / n_heads, {width / heads:g}; leave it out")
    kinds, groups = "multihead_attention=all multiquery_attention=one grouped_query_attention=some", t.size(KV, heads)
    if (kind := t.choice("model.attn_config.attn_type", None, kinds)) != "all":
        t.put("model.n_kv_heads", 1 if kind == "one" else groups, "model.attn_config.attn_type", KV)
    keys = [f"model.ffn_config.{key}" for key in ("ffn_act_fn.name", "ffn_type", "ffn_act_fn.approximate")]
    act, kind = str(t.get(keys[0], "gelu")), t.choice(keys[1], None, "mptmlp mptglu")
    gelu = "gelu_tanh" if t.get(keys[2], "none") == "tanh" else "gelu"
    activation = {("gelu", "mptmlp"): gelu, ("silu", "mptglu"): "swiglu"}.get((act, kind))
    t.put("model.activation", activation, *keys)
    if activation is None:
        t.refuse(t.said(*keys), f"{kind} with {act}: possible are mptmlp with gelu and mptglu with silu")
    window = "model.attn_config.sliding_window_size"
    if t.number(window, -1) != -1:  # itself apart
        t.put("model.sliding_window", t.size(window) + 1, window)
    apart = t.said("model.attn_config.attn_uses_sequence_id", "model.attn_uses_sequence_id")
    if t.get(apart):
        eos = "train_loader.dataset.eos_token_id"
        t.put("model.document_mask", True, apart)
        t.put("model.eos_token_id", t.get(eos), eos)
        if t.get(eos) is None:
            t.refuse(apart, f"documents are told apart by the token that ends them; set {eos}")
    _init(t, init)


def _init(t: Translation, default: str) -> None:
    key = t.said(*INITS)
    init = t.choice(key, default, "kaiming_normal_=kaiming_normal baseline_=normal small_init_=small neox_init_=neox")
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
        t.refuse(t.said(*divs), f"must be true: residual projections start smaller by sqrt(2 n_layers), {scale:g}")
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
    t.choice(kind, None, "norm")
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
            t.refuse("load_path", "another run's optimizer state is not taken over, its weights are with "
                     "load_weights_only=true; to continue a run of your own, repeat its command")  # fmt: skip
    if t.choice("fsdp_config.sharding_strategy", None, "FULL_SHARD SHARD_GRAD_OP HYBRID_SHARD NO_SHARD") == "NO_SHARD":
        t.put("parallel.shard", 1, "fsdp_config.sharding_strategy")
    put_parallel(t, {"fsdp_config.data_parallel_shard_degree": "shard", "tp_config.tensor_parallel_degree": "tensor",
                     "fsdp_config.data_parallel_replicate_degree": "replicate"})  # fmt: skip
    if compiled := [key for key in t.given if key.startswith("compile_config") and t.given[key] is not None]:
        t.put("compile", True, *compiled)


def _loader(t: Translation, native: str, loader: str) -> None:
    t.choice(f"{loader}.name", None, "text c4")
    section, streams = f"{loader}.dataset", f"{loader}.dataset.streams."
    length = t.get(f"{section}.max_seq_len")
    if length is not None and length != t.get("max_seq_len", length):
        t.refuse(f"{section}.max_seq_len", f"is not max_seq_len {t.get('max_seq_len')}; there is one sequence length")
    t.put(f"{native}.shuffle", t.get(f"{section}.shuffle", False), f"{section}.shuffle")
    if (seed := t.get(f"{section}.shuffle_seed")) is not None:
        t.put(f"{native}.shuffle_seed", seed, f"{section}.shuffle_seed")
    names = dict.fromkeys(key.removeprefix(streams).split(".")[0] for key in t.given if key.startswith(streams))
    for source, place in [(streams + name, f"{native}.mix.{name}") for name in names] or [(section, native)]:
        if (local := t.get(f"{source}.local")) is None:
            t.refuse(f"{source}.local", "is missing; name the folder of the data, or the cache of what is remote")
        t.put(f"{place}.path", local, f"{source}.local")
        for key in ("remote", "split", "cache_limit", "token_encoding_type", *["proportion"] * bool(names)):
            foreign = f"{source}.{key}"
            if key in ("split", "token_encoding_type"):  # a stream without its own takes that of the data set
                foreign = t.said(foreign, f"{section}.{key}")
            if (value := t.get(foreign)) is not None and not (key == "remote" and value == local):
                t.put(f"{place}.{'weight' if key == 'proportion' else key}", value, foreign)
        t.skip("the same as local", f"{source}.remote")
        t.skip(OWN_READER, *_in(source, READING).split())
    for key in [key for key in t.given if key.startswith(f"{section}.") and key not in t.rows]:
        if names and key != f"{section}.max_seq_len":
            t.refuse(key, "streams have local, remote, split, cache_limit and proportion of their own; set it there")


def _time(value: Any) -> str:
    """Composer counts a bare number in epochs."""
    return str(value) if not isinstance(value, int) else f"{value}ep" if value > 0 else "0ba"


FOUNDRY = Dialect("foundry", "LLM Foundry", _translate, SAME, DEFAULTS, CHOICES, NOT_NEEDED, REFUSED, COMPUTED)
