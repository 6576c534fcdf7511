"""GPT-NeoX: any number of YAML or JSON files whose union is the run, in NeoX's and DeepSpeed's keys.

The global batch and the padded vocabulary are not in the files; they follow from the number of processes and from the
tokenizer, by NeoX's own rules. Pythia's files set neither `bias_gelu_fusion: false` nor a first learning rate of 0, so
the tanh GELU and the warmup's first step matter.
"""

import math
import re
from typing import Any

from ingot.migrate import megatron_common as common
from ingot.migrate.translation import Dialect, Translation

SAME = """
    num_layers=model.n_layers hidden_size=model.d_model num_attention_heads=model.n_heads
    num_kv_heads=model.n_kv_heads seq_length=max_seq_len max_position_embeddings=model.max_seq_len
    gpt_j_residual=model.parallel_residual attention_dropout=model.attn_pdrop init_method_std=model.init_std seed
    checkpoint_activations=activation_checkpointing tensorboard_dir=loggers.tensorboard.log_dir
    keep_last_n_checkpoints=save_num_checkpoints_to_keep optimizer.params.eps=optimizer.eps"""
DEFAULTS = {
    "gpt_j_residual": False, "attention_dropout": 0.0, "init_method_std": 0.02, "seed": 1234,
    "optimizer.params.eps": 1e-8,
}  # fmt: skip
CHOICES = {
    "pos_emb": "model.positions learned rotary alibi none",
    "norm": "model.norm layernorm rmsnorm te_layernorm=layernorm te_rmsnorm=rmsnorm",
    "init_method": "model.init normal small_init=small",
    "output_layer_init_method": "model.residual_init scaled_normal=scaled wang_init=wang normal=same small_init=same",
    "lr_decay_style": "scheduler.name linear=linear_decay_with_warmup cosine=cosine_with_warmup "
    "constant=constant_with_warmup exponential=exponential_decay_with_warmup",
}
NOT_NEEDED = {
    "where a run runs is said when it is launched": """
        launcher hostfile include exclude num_nodes num_gpus master_port master_addr force_multi no_ssh_check
        comment account deepspeed_mpi deepspeed_slurm user_script distributed_backend local_rank rank lazy_mpu_init
        use_shared_fs deepspeed autotuning autotuning_run elasticity is_pipe_parallel""",
    "how a model is spread is chosen by parallel.*; fp32 master weights, gradients reduced in fp32": """
        zero_optimization zero_stage zero_reduce_scatter zero_contiguous_gradients zero_reduce_bucket_size
        zero_allgather_bucket_size zero_allow_untested_optimizer pipe_partition_method sequence_parallel
        output_layer_parallelism fp32_allreduce prescale_gradients gradient_predivide_factor sparse_gradients
        communication_data_type data_types""",
    "blocks are recomputed whole, and only on the device": """
        checkpoint_num_layers deepspeed_activation_checkpointing contiguous_checkpointing checkpoint_in_cpu
        synchronize_each_layer profile_backward partition_activations activation_checkpointing""",
    "kernels are chosen here; the function is the same": """
        layernorm_fusion rmsnorm_fusion scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion
        bias_dropout_fusion rope_fusion use_flashattn_swiglu fused_kernels_build_path apply_query_key_layer_scaling
        attention_softmax_in_fp32 use_cpu_initialization rotary_save_freqs_buffer onnx_safe te_columnparallel
        te_rowparallel te_layernorm_mlp te_mha mmap_warmup num_workers data_impl allow_chopped""",
    "the loss scale is dynamic here, with a start of its own; it decides only which steps overflow": """
        fp16.initial_scale_power fp16.hysteresis fp16.min_loss_scale fp16.consecutive_hysteresis hysteresis
        min_scale dynamic_loss_scale fp16.fp16 fp16.auto_cast""",
    "always logged here; the console is this program's own": """
        steps_per_print wall_clock_breakdown dump_state log_dir log_grad_pct_zeros log_param_norm log_grad_norm
        log_optimizer_states log_gradient_noise_scale gradient_noise_scale_n_batches
        gradient_noise_scale_cpu_offload memory_profiling memory_profiling_path profile profile_step_start
        profile_step_stop flops_profiler comms_logger peak_theoretical_tflops git_hash config_files char_level_ppl
        tensorboard csv_monitor""",
    "not run here: metrics go to the console, metrics.jsonl and TensorBoard": """
        use_wandb wandb wandb_group wandb_run_name wandb_team wandb_project wandb_host wandb_init_all_ranks
        use_comet comet_workspace comet_project comet_experiment_name comet_tags comet_others comet_experiment""",
    "checkpoints hold everything, and the same command continues a run": """
        no_save_optim no_save_rng no_load_optim no_load_rng checkpoint_validation_with_forward_pass s3_path
        s3_chunk_size override_lr_scheduler use_checkpoint_lr_scheduler adlr_autoresume adlr_autoresume_interval
        iteration checkpoint""",
    "not saved here: checkpoints come every checkpoint_factor": "extra_save_iters",
    "training and validation are what `ingot train` does": """
        do_train do_valid do_test text_gen_type precompute_model_name temperature top_p top_k return_logits
        maximum_tokens prompt_end sample_input_file sample_output_file num_samples recompute eval_results_prefix
        eval_tasks test_data_paths test_data_weights serve_model_weights weight_server_port online_dataserver_ips
        online_dataserver_ports""",
    "used by other model parts or data only": """
        rpe_num_buckets rpe_max_distance gmlp_attn_dim short_seq_prob scalenorm_epsilon mamba_selective_scan_fusion
        mamba_causal_conv_fusion mamba_inner_func_fusion mamba_selective_fp32_params mamba_use_bias_in_conv
        mamba_use_bias_in_linears te_fp8_format te_fp8_wgrad te_fp8_amax_history_len te_fp8_amax_compute_algo
        te_fp8_margin dpo_fp32 dpo_reference_free dpo_beta kto_fp32 kto_desirable_weight kto_undesirable_weight
        kto_beta fp32_reinforce kl_impl kl_div_beta reinforce_leave_one_out param_sharing_style
        weighted_sampler_alpha moe_expert_interval moe_top_k moe_router_type moe_lbl_in_fp32 moe_jitter_eps
        base_shapes_file mup_init_scale mup_attn_temp mup_output_temp mup_embedding_mult mup_rp_embedding_mult
        mup_width_scale save_base_shapes coord_check deepscale_config""",
}

REFUSED = {
    "mixtures of experts are not supported; use moe_num_experts 1": "moe_num_experts=1",
    "RWKV is not supported; use attention_config global or flash": "dim_att head_size ffn_dim",
    "the model here has no such part; leave it out": """
        opt_pos_emb_offset num_unique_layers gpt_j_tied soft_prompt_tuning sparsity_config sparse_attention
        te_fp8_mha""",
    "maximal update parametrisation is not supported; set the learning rate and init_method_std themselves": "use_mup",
    "the norms of queries and keys have weights of their own here, and NeoX's share one; leave it out": """
        use_qk_layernorm""",
    "T5 is not supported, only GPT; leave it out": "model_arch=gpt2",
    "the loss is the cross-entropy alone, in fp32; leave it out": "z_loss fp16_lm_cross_entropy",
    "only pretraining is done here": """
        train_impl=normal dataset_impl=gpt2 train_label_data_paths train_reward_data_paths pos_train_data_paths
        neg_train_data_paths pos_train_label_data_paths neg_train_label_data_paths valid_label_data_paths
        valid_reward_data_paths pos_valid_data_paths neg_valid_data_paths pos_valid_label_data_paths
        neg_valid_label_data_paths test_label_data_paths test_reward_data_paths pos_test_data_paths
        neg_test_data_paths pos_test_label_data_paths neg_test_label_data_paths""",
    "documents are packed one after the other; use pack_impl packed": "pack_impl=packed",
    "weights of data sets are given, or follow from their size; use train_data_weights": "weight_by_num_documents",
    "optimizer states are fp32 here; leave it out": "use_bnb_optimizer",
    "the sequence length and the batch do not change during a run; leave it out": """
        curriculum_learning.enabled curriculum_learning curriculum_seqlen data_efficiency compression_training""",
    "the schedule is lr_decay_style's, and DeepSpeed is not used; leave it out": "scheduler deepspeed_extra_args",
    "use fp16 or bf16": "amp deepscale",
    "a loss scale that stands still is not supported; use loss_scale 0": "fp16.loss_scale loss_scale",
    "only the usual window is accepted, for ours is fixed; leave it out": """
        fp16.loss_scale_window=1000|1000.0 loss_scale_window=1000|1000.0""",
    "a run ends after train_iters or train_epochs; use those": "exit_interval",
    "checkpoints come at equal intervals; use linear": "checkpoint_scale=linear",
}

COMPUTED = """
    precision fp16.enabled fp16.type bf16.enabled intermediate_size mlp_multiple_of expansion_factor
    layernorm_epsilon rms_norm_epsilon no_weight_tying attention_config make_vocab_size_divisible_by activation
    bias_gelu_fusion rotary_pct rotary_emb_base use_bias_in_norms use_bias_in_attn_linear use_bias_in_mlp
    hidden_dropout optimizer.type optimizer.params.lr optimizer.params.betas optimizer_type lr weight_decay
    lr_decay_iters lr_decay_fraction min_lr warmup train_iters train_epochs train_batch_size
    train_micro_batch_size_per_gpu batch_size gradient_accumulation_steps gas gradient_clipping clip_grad
    pipe_parallel_size model_parallel_size world_size global_num_gpus data_path train_data_paths valid_data_paths
    train_data_weights valid_data_weights split vocab_file merge_file tokenizer_type padded_vocab_size save load
    finetune checkpoint_factor eval_interval eval_iters log_interval eod_mask_loss sliding_window_width"""


def _translate(t: Translation) -> None:
    for key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"):
        if t.number(key) is None:
            t.refuse(key, "is missing; NeoX has no default for it")
    _model(t)
    _training(t)
    _data(t)
    _optimizer(t)


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
    for native in ("model.emb_pdrop", "model.resid_pdrop"):
        t.put(native, t.get("hidden_dropout", 0.0), "hidden_dropout")
    gelu = "gelu_tanh" if t.get("bias_gelu_fusion", False) else "gelu"
    activation = t.choice("activation", None, f"gelu={gelu} swiglu")
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
    eod = common.put_vocabulary(t, files, "GPT2BPETokenizer", "padded_vocab_size", t.size("model_parallel_size", 1))
    common.put_documents(t, {"eod_mask_loss": "mask_eos_loss"}, eod)


def _training(t: Translation) -> None:
    tensor, pipeline = t.size("model_parallel_size", 1), max(1, t.number("pipe_parallel_size", 0))
    common.put_parallel(t, {"model_parallel_size": "tensor", "pipe_parallel_size": "pipeline"})
    world = t.size("global_num_gpus") or t.size("world_size") or 0
    if not world and t.number("num_gpus") and t.number("num_nodes", -1) > 0:
        world = t.number("num_gpus") * t.number("num_nodes")
    micro = t.said("train_micro_batch_size_per_gpu", "batch_size")
    common.put_batch(
        t, "train_batch_size", micro, t.said("gradient_accumulation_steps", "gas"), world, tensor * pipeline
    )
    common.put_checkpoints(t, "checkpoint_factor")
    kinds = ("precision", "fp16.enabled", "bf16.enabled", "fp16.type")
    bf16 = t.get("bf16.enabled", False) or t.get("fp16.type") == "bfloat16"
    default = "bfloat16" if bf16 else "fp16" if t.get("fp16.enabled", False) else "fp32"
    t.put("precision", t.choice("precision", default, "fp16 bfloat16=bf16 fp32"), *kinds)
    clip = t.number("gradient_clipping", t.number("clip_grad", 1.0))
    t.put("gradient_clipping", clip or None, "gradient_clipping", "clip_grad")
    if t.number("clip_grad", clip) != clip:
        t.refuse("clip_grad", f"contradicts gradient_clipping {clip}; leave out one of them")


def _data(t: Translation) -> None:
    parts: dict[str, list[tuple[Any, str]]] = {}
    for part in ("train", "valid"):
        paths, weights = (common.listed(t.get(f"{part}_data_{what}")) for what in ("paths", "weights"))
        if weights and len(weights) != len(paths):
            t.refuse(f"{part}_data_weights", f"has {len(weights)} weights for {len(paths)} data sets")
            weights = []
        parts[f"{part}_data_paths"] = list(zip(weights or [1.0] * len(paths), paths, strict=True))
        t.skip("weights of the mixture", f"{part}_data_weights")
    common.put_data(t, [(None, t.get("data_path"))] if t.get("data_path") else [], parts)
    common.put_eval(t, t.number("eval_interval", 1000))


def _optimizer(t: Translation) -> None:
    kind, rate = t.said("optimizer.type", "optimizer_type"), t.said("optimizer.params.lr", "lr")
    name = t.choice(kind, None, "adam=adamw cpu_adam=adamw cpu_torch_adam=adamw lion")
    if (lr := t.number(rate, 0)) <= 0:
        t.refuse(rate, "is missing; set it")
        lr = 1.0
    if t.number("lr", lr) != lr:
        t.refuse("lr", f"contradicts optimizer.params.lr {lr}; leave out one of them")
    t.put("optimizer.name", name, kind)
    t.put("optimizer.lr", lr, rate)
    betas = "optimizer.params.betas"
    t.put("optimizer.betas", t.get(betas, [0.9, 0.99 if name == "lion" else 0.999]), betas)
    decay = t.number("weight_decay", 0.1)
    # their Lion decays by lr x weight_decay; ours by (lr / peak) x weight_decay
    t.put("optimizer.weight_decay", decay * lr if name == "lion" else decay, "weight_decay")
    iterations, epochs = t.size("train_iters"), t.size("train_epochs")
    if (iterations is None) == (epochs is None):
        t.refuse("train_iters", "say how long to train with train_iters, or else with train_epochs")
        return
    length = common.count(iterations) if iterations else common.count(epochs, "ep")
    t.put("max_duration", length, "train_iters", "train_epochs")
    total, unit = (iterations, "ba") if iterations else (1.0, "dur")
    end = t.size("lr_decay_iters") or total * t.number("lr_decay_fraction", 1.0)
    warmup = t.number("warmup", 0.01) * end
    t.put("scheduler.t_warmup", common.count(warmup, unit), "warmup")
    if warmup:
        t.put("scheduler.warmup_floor", 1, "warmup")
    t.put("scheduler.t_max", common.count(end, unit), "lr_decay_iters", "lr_decay_fraction")
    floor, style = t.number("min_lr", 0.0) / lr, t.choice("lr_decay_style")
    t.put("scheduler.alpha_f", floor if style == "cosine_with_warmup" else 0.0, "min_lr")
    if style.startswith("cosine") and end < total:
        t.refuse(t.said("lr_decay_iters", "lr_decay_fraction"), "NeoX's cosine rises again after it; leave it out")
    if style.startswith("exponential"):  # halves from the end of the warmup to lr_decay_iters, and goes on from there
        t.put("scheduler.t_max", common.count(total, unit), "lr_decay_style")
        t.put("scheduler.alpha_f", math.exp(-0.693 * (total - warmup) / (end - warmup)), "lr_decay_style")
    if style.startswith(("linear", "exponential")):  # cut off at min_lr
        t.put("scheduler.floor", floor, "min_lr")


NEOX = Dialect("neox", "GPT-NeoX", _translate, SAME, DEFAULTS, CHOICES, NOT_NEEDED, REFUSED, COMPUTED)
