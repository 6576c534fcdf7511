"""Megatron-LM: the arguments of pretrain_gpt.py, from a command line, a shell script's arrays, or a YAML of arguments.

Defaults that few scripts spell out are written out: linear decay, beta2 0.999, dropout 0.1, the tanh GELU of its fused
kernel, and the vocabulary padded for the tensor-parallel size.
"""

import math
import re

from ingot.migrate import megatron_common as common
from ingot.migrate.shell_arguments import scalar
from ingot.migrate.translation import Dialect, Translation

SAME = """
    num_layers=model.n_layers hidden_size=model.d_model num_attention_heads=model.n_heads kv_channels=model.head_dim
    max_position_embeddings=model.max_seq_len norm_epsilon=model.norm_eps layernorm_epsilon=model.norm_eps
    init_method_std=model.init_std attention_dropout=model.attn_pdrop seq_length=max_seq_len seed
    weight_decay=optimizer.weight_decay adam_eps=optimizer.eps tensorboard_dir=loggers.tensorboard.log_dir
    lr=optimizer.lr"""
DEFAULTS = {"norm_epsilon": 1e-5, "init_method_std": 0.02, "attention_dropout": 0.1, "seed": 1234, "weight_decay": 0.01,
            "adam_eps": 1e-8}  # fmt: skip
CHOICES = {
    "normalization": "model.norm LayerNorm=layernorm RMSNorm=rmsnorm",
    "optimizer": "optimizer.name adam=adamw",
    "lr_decay_style": "scheduler.name linear=linear_decay_with_warmup cosine=cosine_with_warmup "
    "constant=constant_with_warmup inverse-square-root=inv_sqrt_with_warmup WSD=wsd",
}
NOT_NEEDED = {
    "how a model is spread is chosen by parallel.*; fp32 master weights, gradients reduced in fp32": """
        sequence_parallel num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        pipeline_model_parallel_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split cp_comm_type
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather no_overlap_p2p_communication
        ddp_bucket_size ddp_average_in_collective grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32
        use_megatron_fsdp use_torch_fsdp2 data_parallel_sharding_strategy num_distributed_optimizer_instances
        tp_comm_overlap defer_embedding_wgrad_compute delay_wgrad_compute use_tp_pp_dp_mapping DDP_impl
        optimizer_cpu_offload expert_tensor_parallel_size""",
    "where a run runs is said when it is launched": """
        ENV_VARS TEST_TYPE METRICS BEFORE_SCRIPT AFTER_SCRIPT THRESHOLD distributed_backend
        distributed_timeout_minutes nccl_communicator_config_path node_rank master_addr
        master_port rdzv_id rdzv_backend rdzv_endpoint exit_signal_handler exit_duration_in_mins""",
    "the loss scale is dynamic here, with a start of its own; it decides only which steps overflow": """
        initial_loss_scale min_loss_scale hysteresis""",
    "kernels are chosen here; the function is the same": """
        attention_backend transformer_impl use_flash_attn use_mcore_models apply_layernorm_1p
        apply_query_key_layer_scaling attention_softmax_in_fp32
        no_gradient_accumulation_fusion no_masked_softmax_fusion no_bias_swiglu_fusion no_bias_dropout_fusion
        no_rope_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl cuda_graph_impl manual_gc
        manual_gc_interval te_rng_tracker no_persist_layer_norm calculate_per_token_loss use_cpu_initialization""",
    "the residual stream has the type of the matrix products here (docs/performance.md: The check of the loss)": """
        fp32_residual_connection""",
    "blocks are recomputed on the device, all of them alike": """
        recompute_method recompute_num_layers recompute_modules distribute_saved_activations
        cpu_offloading_num_layers fine_grained_activation_offloading""",
    "the data is read as it is, without an index to build": """
        data_cache_path num_workers no_create_attention_mask_in_dataloader no_mmap_bin_files dataloader_type
        num_dataset_builder_threads dataloader_fast_cache_load mid_level_dataset_surplus test_data_path data_impl""",
    "checkpoints hold everything, load on any layout, and the same command continues a run": """
        save_retain_interval ckpt_format async_save no_ckpt_fully_parallel_save ckpt_fully_parallel_load
        use_dist_ckpt dist_ckpt_format dist_ckpt_strictness dist_ckpt_optim_fully_reshardable no_save_optim
        no_save_rng no_load_optim no_load_rng use_checkpoint_args exit_on_missing_checkpoint auto_detect_ckpt_format
        non_persistent_save_interval non_persistent_ckpt_type ckpt_assume_constant_structure verify_integrity
        override_opt_param_scheduler use_checkpoint_opt_param_scheduler""",
    "always logged or checked here; the console is this program's own": """
        log_throughput log_params_norm log_num_zeros_in_grad timing_log_level timing_log_option log_energy
        tensorboard_log_interval log_timers_to_tensorboard log_memory_to_tensorboard
        log_validation_ppl_to_tensorboard log_world_size_to_tensorboard tensorboard_queue_size log_straggler profile
        profile_step_start profile_step_end profile_ranks use_pytorch_profiler record_memory_history rerun_mode
        check_for_spiky_loss log_progress no_check_for_nan_in_loss_and_grad inprocess_restart enable_ft_package""",
    "not run here: metrics go to the console, metrics.jsonl and TensorBoard": """
        wandb_project wandb_exp_name wandb_save_dir wandb_entity""",
    "used by other model parts only": """
        rope_scaling_factor muon_momentum fp8_amax_history_len fp8_amax_compute_algo fp8_margin fp8_recipe
        fp8_param_gather fp4_recipe first_last_layers_bf16 moe_router_topk moe_router_load_balancing_type
        moe_aux_loss_coeff moe_z_loss_coeff moe_grouped_gemm moe_token_dispatcher_type moe_ffn_hidden_size
        moe_shared_expert_intermediate_size moe_layer_freq moe_router_score_function moe_router_enable_expert_bias
        moe_permute_fusion moe_expert_capacity_factor""",
}
REFUSED = {
    "mixtures of experts are not supported; leave it out": "num_experts expert_model_parallel_size=1",
    "Mamba and hybrid models are not supported; leave it out": "hybrid_override_pattern is_hybrid_model",
    "T5 and BERT are not supported, only GPT (num_layers, seq_length); leave it out": """
        encoder_num_layers decoder_num_layers encoder_seq_length decoder_seq_length vocab_extra_ids mask_prob
        short_seq_prob bert_no_binary_head""",
    "the model here has no such part; leave it out": """
        rotary_interleaved rotary_seq_len_interpolation_factor=1 use_rope_scaling squared_relu quick_geglu
        add_qkv_bias softmax_type=vanilla multi_latent_attention mtp_num_layers init_method_xavier_uniform use_mup""",
    "the batch is the same at every step; use global_batch_size": """
        rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed""",
    "8-bit and 4-bit floats are not supported; use bf16": "fp8_format fp4_format",
    "optimizer states are fp32 here; leave it out": "use_precision_aware_optimizer",
    "one learning rate and weight decay hold for all weights and steps; leave it out": """
        decoupled_lr decoupled_min_lr start_weight_decay end_weight_decay weight_decay_incr_style=constant""",
    "a loss scale that stands still is not supported; leave it out": "loss_scale",
    "only the usual window is accepted, for ours is fixed; leave it out": "loss_scale_window=1000|1000.0",
    "the loss is computed in fp32; leave it out": "fp16_lm_cross_entropy",
    "write the paths and weights into data_path": "data_args_path per_split_data_args_path",
    "there is no made-up data; `ingot demo` needs no data": "mock_data",
    "a run evaluates on one data set; leave it out": "multiple_validation_sets",
    "use `ingot eval`": "skip_train",
    "a run ends after train_iters or train_samples; leave it out": "exit_interval iterations_to_skip ckpt_step",
}
COMPUTED = """
    ffn_hidden_size group_query_attention num_query_groups position_embedding_type use_rotary_position_embeddings
    no_position_embedding rotary_base rotary_percent swiglu disable_bias_linear no_bias_gelu_fusion
    untie_embeddings_and_output_weights make_vocab_size_divisible_by hidden_dropout micro_batch_size batch_size
    global_batch_size nproc_per_node nnodes train_iters train_samples min_lr lr_wsd_decay_style lr_wsd_decay_iters
    lr_wsd_decay_samples
    lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction lr_warmup_init warmup
    window_size qk_layernorm reset_position_ids reset_attention_mask eod_mask_loss null_tokenizer_eod_id clip_grad
    adam_beta1 adam_beta2 tensor_model_parallel_size model_parallel_size pipeline_model_parallel_size
    context_parallel_size bf16 fp16 recompute_granularity recompute_activations checkpoint_activations
    deterministic_mode data_path split train_data_path valid_data_path tokenizer_type tokenizer_model vocab_file
    merge_file vocab_size padded_vocab_size save load finetune save_interval eval_iters eval_interval
    full_validation log_interval"""

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
    positions = t.choice(kinds[0], usual, "learned_absolute=learned rope=rotary none")
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
    t.put("activation_checkpointing", t.choice(flags[0], usual, "none full selective"), *flags)
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
        shape = t.choice("lr_wsd_decay_style", None, "exponential linear cosine minus_sqrt=sqrt")
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


MEGATRON = Dialect("megatron", "Megatron", _translate, SAME, DEFAULTS, CHOICES, NOT_NEEDED, REFUSED, COMPUTED)
