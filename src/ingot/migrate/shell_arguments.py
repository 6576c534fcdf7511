"""Megatron's arguments, read from words."""

from typing import Any

from ingot.errors import ConfigError

LISTS = (
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "rampup_batch_size", "recompute_modules",
    "cp_comm_type", "iterations_to_skip", "profile_ranks", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "window_size",
)  # fmt: skip
# without a value, so that what follows one is an argument of its own
FLAGS = """
    bf16 fp16 swiglu disable_bias_linear group_query_attention untie_embeddings_and_output_weights qk_layernorm
    use_rotary_position_embeddings no_position_embedding no_bias_gelu_fusion no_bias_swiglu_fusion
    no_bias_dropout_fusion no_masked_softmax_fusion no_rope_fusion no_gradient_accumulation_fusion
    no_persist_layer_norm apply_layernorm_1p apply_query_key_layer_scaling attention_softmax_in_fp32 use_flash_attn
    use_mcore_models cross_entropy_loss_fusion manual_gc te_rng_tracker calculate_per_token_loss
    use_cpu_initialization fp32_residual_connection sequence_parallel use_distributed_optimizer overlap_grad_reduce
    overlap_param_gather no_overlap_p2p_communication grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32
    tp_comm_overlap recompute_activations checkpoint_activations distribute_saved_activations
    no_create_attention_mask_in_dataloader no_mmap_bin_files async_save no_save_optim no_save_rng no_load_optim
    no_load_rng use_checkpoint_args exit_on_missing_checkpoint auto_detect_ckpt_format override_opt_param_scheduler
    use_checkpoint_opt_param_scheduler log_throughput log_params_norm log_num_zeros_in_grad
    log_timers_to_tensorboard log_memory_to_tensorboard log_validation_ppl_to_tensorboard
    log_world_size_to_tensorboard profile use_pytorch_profiler reset_position_ids reset_attention_mask eod_mask_loss
    deterministic_mode finetune exit_signal_handler rotary_interleaved use_rope_scaling squared_relu quick_geglu
    add_qkv_bias multi_latent_attention mock_data skip_train full_validation
"""


def read_words(words: list[tuple[str, str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Words of an argument list, each with its place, as keys and values with theirs; the last of a flag counts."""
    given, places = {}, {}
    key, values = "", list[Any]()
    for word, place in [*words, ("--", "")]:
        if not word.startswith("--"):
            if not key:
                raise ConfigError(f"{place}: '{word}' belongs to no argument; Megatron's begin with --")
            if key.endswith("data_path") and len(word.split()) > 1:
                raise ConfigError(f"{place}: '{word}' is one path to the program; leave out its quotes")
            values.append(scalar(word))
            if len(values) > 1 and key not in LISTS:
                raise ConfigError(f"{place}: --{key.replace('_', '-')} takes one value, not {values}")
            continue
        if key:
            given[key] = values if key in LISTS else values[0] if values else True
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
