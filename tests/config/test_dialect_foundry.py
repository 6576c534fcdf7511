"""LLM Foundry's and the examples repository's files mean here what they mean there. Numbers are the references'."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from decay import decayed

from ingot.config.durations import BatchClock
from ingot.config.evaluation import GauntletConfig
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.migrate import load_run_config, translate
from ingot.model.shapes import parameter_shapes
from ingot.parallel.layout import Layout, complete_layout
from ingot.training.schedule import lr_multiplier

FILES = Path(__file__).parent / "foundry"
TINY = ("model.d_model=32", "model.n_heads=4", "model.n_layers=2", "model.vocab_size=128", "variables.max_seq_len=16")
# file: parameters, peak lr, global batch, duration, tokens in billions, microbatch, recomputed (auto: it says nothing),
# initialization
EXPECTED = {
    "mpt-125m": (125_311_488, 6.0e-4, 256, "4800ba", 2.52, 16, False, "kaiming_normal"),
    "mpt-350m": (355_985_408, 3.0e-4, 256, "13400ba", 7.03, 8, False, "kaiming_normal"),
    "mpt-760m": (760_470_528, 2.5e-4, 256, "29000ba", 15.2, 4, False, "kaiming_normal"),
    "mpt-1b": (1_315_950_592, 2.0e-4, 512, "24800ba", 26.0, 4, False, "kaiming_normal"),
    "mpt-7b": (6_658_859_008, 1.2e-4, 1024, "63900ba", 134.0, 8, True, "kaiming_normal"),
    "mpt-30b": (29_975_214_080, 1.0e-4, 2048, "143100ba", 600.2, 8, True, "kaiming_normal"),
    "mpt-70b": (64_862_437_376, 8.0e-5, 2048, "333800ba", 1400, 4, True, "kaiming_normal"),
    "mosaic_gpt-125m-v0.0.2": (125_226_240, 6.0e-4, 256, "4800ba", 2.52, 16, False, "normal"),
    "mosaic_gpt-3b-v0.0.2": (2_651_553_280, 2.0e-4, 512, "51500ba", 54.0, 16, False, "normal"),
    "mosaic_gpt-1b-v0.0.4": (1_315_950_592, 2.0e-4, 512, "24800ba", 26.0, 4, False, "kaiming_normal"),
    "mpt-small-cpu": (823_200, 6.0e-4, 8, "10ba", 0.0000102, "auto", "auto", "kaiming_normal"),
    "mpt-7b-alibi-streams": (6_649_286_656, 1.0e-4, 2048, "1000000000000tok", None, "auto", "auto", "kaiming_normal"),
    "mpt-350m-inv-sqrt": (353_616_896, 3.0e-4, 256, "13400ba", 7.03, "auto", "auto", "small"),
    "mpt-1b-gqa-rope-glu": (1_288_800_256, 3.0e-4, 256, "2ep", None, "auto", "auto", "normal"),
}


def load(name: str, *overrides: str) -> RunConfig:
    return load_run_config([str(FILES / f"{name}.yaml"), *overrides])


def error_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config([str(FILES / "mpt-125m.yaml"), *arguments])
    return str(caught.value)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_means_what_it_means_there(name: str) -> None:
    config = load(name)
    parameters, lr, batch, duration, tokens, micro, recomputed, init = EXPECTED[name]
    assert config.model.parameters == parameters
    assert (config.optimizer.lr, config.global_train_batch_size, str(config.max_duration)) == (lr, batch, duration)
    assert (config.device_train_microbatch_size, config.activation_checkpointing) == (micro, recomputed)
    if tokens is not None:
        done = config.max_duration.value * config.global_train_batch_size * config.max_seq_len
        assert done / 1e9 == pytest.approx(tokens, rel=5e-3)
    assert (config.model.init, config.model.residual_init) == (init, "scaled")
    assert (config.seed, config.optimizer.weight_decay, config.optimizer.eps) == (17, 0.0, 1e-8)
    assert config.optimizer.betas == (0.9, 0.95)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.startswith("mpt-") and "-" not in name[4:]])
def test_the_pretraining_files_share_their_recipe(name: str) -> None:
    config = load(name)
    assert (config.optimizer.name, config.gradient_clipping, config.precision) == ("decoupled_adamw", 1.0, "bf16")
    model = config.model
    assert (model.vocab_size, model.vocab_rows, model.positions, model.norm) == (
        50368, 50368, "learned", "low_precision_layernorm")  # fmt: skip
    assert (model.no_bias, model.tie_word_embeddings, model.activation) == (False, True, "gelu")
    data = config.data
    assert (data.train.path, data.train.split, data.train.shuffle, data.train.shuffle_seed) == (
        "./my-copy-c4", "train", True, 17)  # fmt: skip
    assert data.eval is not None and (data.eval.split, data.eval.shuffle) == ("val", False)


def composer_cosine(step: int, warmup: int, total: int, alpha_f: float) -> float:
    if step < warmup:
        return step / warmup
    return alpha_f + (1 - alpha_f) * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup)))) / 2


@pytest.mark.parametrize(("name", "total"), [("mpt-125m", 4800), ("mpt-7b", 63900), ("mosaic_gpt-3b-v0.0.2", 51500)])
def test_the_learning_rate_is_composers_at_every_step(name: str, total: int) -> None:
    config = load(name)
    clock = BatchClock(config.global_train_batch_size, 2048, 10**9, config.max_duration)
    for step in [*range(120), total // 3, total // 2, total - 1, total]:
        assert lr_multiplier(config.scheduler, clock, step) == pytest.approx(composer_cosine(step, 100, total, 0.1))


def test_typed_learning_rates_of_mpt_125m() -> None:
    config = load("mpt-125m")
    clock = BatchClock(256, 2048, 10**9, config.max_duration)
    rates = {step: 6e-4 * lr_multiplier(config.scheduler, clock, step) for step in (0, 1, 50, 100, 2450, 4800)}
    assert rates == pytest.approx({0: 0, 1: 6e-6, 50: 3e-4, 100: 6e-4, 2450: 3.3e-4, 4800: 6e-5})


def test_inverse_square_root_cools_down_as_in_llm_foundry() -> None:
    config = load("mpt-350m-inv-sqrt")
    clock = BatchClock(256, 2048, 10**9, config.max_duration)

    def expected(t: int) -> float:
        if t < 500:
            return t / 500
        if t < 13400 - 1500:
            return 1 / math.sqrt((t - 500 + 1000) / 1000)
        start = 1 / math.sqrt((13400 - 1500 - 500 + 1000) / 1000)
        return start + (0.0 - start) * min(1.0, (t - (13400 - 1500)) / 1500)

    for step in range(13401):
        assert lr_multiplier(config.scheduler, clock, step) == pytest.approx(expected(step), abs=1e-12)


@pytest.mark.parametrize("device", ["device", "init_device"])
def test_mosaic_gpt_before_its_new_defaults_starts_from_a_normal_with_plain_norms(tmp_path: Path, device: str) -> None:
    path = tmp_path / "old.yaml"
    text = (FILES / "mosaic_gpt-3b-v0.0.2.yaml").read_text()
    path.write_text(text.replace("  device: meta", f"  {device}: meta"))

    def model(*more: str) -> tuple[str, float, str]:
        config = load_run_config([str(path), *more]).model
        return config.init, config.init_std, config.norm

    assert model() == ("normal", 0.02, "layernorm")
    assert model("algorithms.low_precision_layernorm={}")[2] == "low_precision_layernorm"
    assert model("model.low_precision_layernorm=true")[2] == "low_precision_layernorm"


def test_the_norm_of_mosaic_gpt_is_not_guessed_from_a_named_initialization() -> None:
    named = "model.param_init_fn=kaiming_normal_"
    with pytest.raises(ConfigError, match=r"low_precision_layernorm = .*set it to false for those before v0\.0\.4"):
        load("mosaic_gpt-1b-v0.0.4", named)
    assert load("mosaic_gpt-1b-v0.0.4", named, "model.low_precision_layernorm=false").model.norm == "layernorm"


def test_documents_are_kept_apart_by_their_last_token() -> None:
    model = load("mpt-350m-inv-sqrt").model
    assert (model.document_mask, model.document_positions, model.eos_token_id) == (True, False, 0)
    assert load("mpt-125m").model.document_mask is False


@pytest.mark.parametrize(("strategy", "layout"), [("FULL_SHARD", Layout(shard=8)), ("NO_SHARD", Layout(replicate=8))])
def test_a_file_takes_as_many_processes_as_there_are(strategy: str, layout: Layout) -> None:
    config = load("mpt-7b", f"fsdp_config.sharding_strategy={strategy}")
    assert complete_layout(config.parallel, 8, config.model, 2048, 1024)[0] == layout


def test_streams_become_a_mixture_in_their_proportions() -> None:
    config = load("mpt-7b-alibi-streams")
    mix = config.data.train.mix
    assert {name: source.weight for name, source in mix.items()} == {"mc4": 0.33, "stack": 0.67}
    assert (mix["stack"].remote, mix["stack"].path, mix["stack"].split) == (
        "s3://bucket/mix/stack",
        "/tmp/mix/stack",
        "train",
    )
    assert config.data.eval is not None and config.data.eval.path == "/tmp/mix/c4" and not config.data.eval.shuffle
    assert (config.parallel.shard, config.parallel.replicate) == (64, 4)
    assert config.save_folder == "s3://bucket/mpt-7b/checkpoints" and str(config.save_interval) == "1ep"
    model = config.model
    assert (model.positions, model.clip_qkv, model.no_bias, config.optimizer.name) == ("alibi", 8, True, "lion")


def test_a_modern_block_in_mpts_keys() -> None:
    config = load("mpt-1b-gqa-rope-glu")
    model = config.model
    assert (model.positions, model.rotary_base, model.n_kv_heads, model.norm, model.norm_eps) == (
        "rotary", 500000, 4, "rmsnorm", 1e-6)  # fmt: skip
    assert (model.activation, model.ffn_width, model.init, model.init_std) == ("swiglu", 5632, "normal", 0.02)
    assert (config.gradient_clipping, config.compile, config.parallel.tensor) == (None, True, 2)
    assert (config.scheduler.name, config.scheduler.alpha_f, str(config.eval_interval)) == (
        "linear_decay_with_warmup",
        0.0,
        "1ep",
    )


def test_the_command_of_the_guide_works() -> None:
    config = load(
        "mpt-7b", "variables.data_local=/data/c4", "save_folder=runs/x", "fsdp_config.state_dict_type=sharded"
    )
    assert (config.data.train.path, config.save_folder) == ("/data/c4", "runs/x")


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("kaiming_normal_", ("kaiming_normal", "scaled")),
        ("small_init_", ("small", "scaled")),
        ("neox_init_", ("small", "wang")),
    ],
)
def test_initializations_keep_their_scheme(init: str, expected: tuple[str, str]) -> None:
    model = load("mpt-125m", f"model.init_config.name={init}").model
    assert (model.init, model.residual_init) == expected


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.d_modle=3", "command line: unknown key model.d_modle of LLM Foundry; did you mean model.d_model?"),
        ("fsdp_config.shardin_strategy=FULL_SHARD", "did you mean fsdp_config.sharding_strategy?"),
        ("train_loader.dataset.shufle=true", "unknown key train_loader.dataset.shufle"),
        ("callbacks.my_callback.x=1", "unknown key callbacks.my_callback.x"),
        ("num_layers=3", "it is a key of GPT-NeoX and Megatron"),
        (
            "model.name=hf_causal_lm",
            "starts from published weights; set it to false",
        ),
        ("model.ffn_config.ffn_type=mb_dmoe", "not supported; possible here: mptmlp, mptglu"),
        ("model.ffn_config.moe_num_experts=8", "mixtures of experts are not supported"),
        ("model.ffn_config.ffn_type=mptglu", "mptglu with gelu"),
        ("model.attn_config.sliding_window_size=0", "at least 1"),
        ("model.attn_config.attn_uses_sequence_id=true", "set train_loader.dataset.eos_token_id"),
        ("model.name=hf_t5", "model.name = hf_t5: not supported"),
        ("model.attn_config.rope_hf_config.type=llama3", "rope_hf_config.type = llama3"),
        ("model.head_dim=100", "MPT computes with d_model / n_heads, 64"),
        ("precision=amp_fp8", "not supported; possible here: amp_bf16"),
        ("algorithms.gradient_clipping.clipping_type=adaptive", "not supported; possible here: norm"),
        ("callbacks.early_stopper.patience=3", "not available here"),
        ("optimizer.param_groups=[{lr: 1}]", "trained with the same settings"),
        ("code_paths=[x.py]", "foreign code is not run"),
        ("load_path=x.pt", "load_weights_only=true"),
        ("train_loader.dataset.max_seq_len=1024", "is not max_seq_len 2048"),
        ("train_loader.dataset.local=null", "name the folder of the data"),
        ("train_loader.name=finetuning", "not supported; possible here: text"),
        ("global_train_batch_size=null", "global_train_batch_size = null: is missing"),
        ("device_train_batch_size=3", ""),
        ("model.n_heads=many", "must be a number"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(override: str, words: str) -> None:
    arguments = [override, "n_gpus=8"] if override.startswith("device_train_batch") else [override]
    message = error_of(*arguments)
    assert (words or "3 x 8 n_gpus is not global_train_batch_size 256") in message and "Traceback" not in message


def test_errors_of_values_name_the_foreign_key_and_line() -> None:
    place = f"{FILES / 'mpt-125m.yaml'}:15 (model.d_model)"
    assert error_of("model.n_heads=7", "model.head_dim=null").startswith(
        "command line (model.n_heads): model.n_heads: 7 heads"
    )
    path = FILES / "mpt-125m.yaml"
    translation = translate([str(path)])
    assert translation.origins["model.d_model"] == place


def test_weight_decay_reaches_every_parameter_as_in_composer() -> None:
    config = load("mpt-125m", "optimizer.weight_decay=0.1", *TINY)
    assert decayed(config) == {name: pytest.approx(0.1 / 6e-4) for name in parameter_shapes(config.model)}
    assert set(decayed(load("mpt-125m", *TINY)).values()) == {0.0}


def test_every_key_of_a_file_is_accounted_for() -> None:
    for name in EXPECTED:
        translation = translate([str(FILES / f"{name}.yaml")])
        assert set(translation.given) <= set(translation.rows) and not translation.problems
    rows = translate([str(FILES / "mpt-small-cpu.yaml")]).rows
    assert rows["icl_tasks"].text.startswith("eval.tasks: ") and rows["autoresume"].fate == "not needed"


TASK = {"label": "copa", "dataset_uri": "copa.jsonl", "num_fewshot": [0], "icl_task_type": "multiple_choice"}
CODE = {"label": "code", "dataset_uri": "x.jsonl", "num_fewshot": [0], "icl_task_type": "code_evaluation"}
HUB = {"label": "hub", "dataset_uri": "hf://a/b", "num_fewshot": [0], "icl_task_type": "multiple_choice"}
CATEGORIES = {"categories": [{"name": "all", "benchmarks": [{"name": "copa", "num_fewshot": 0}]},
                             {"name": "more", "benchmarks": [{"name": "copa", "num_fewshot": 0}]}]}  # fmt: skip


def changed(folder: Path, changes: dict[str, Any]) -> str:
    """A copy of a file with other values."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load((FILES / "mpt-125m.yaml").read_text()) | changes))
    return str(file)


@pytest.mark.parametrize("tasks", ["eval/yamls/tasks.yaml", [TASK], [TASK, {**TASK, "label": "two"}]])
def test_downstream_tasks_keep_their_files_or_what_is_written_out(tasks: Any, tmp_path: Path) -> None:
    own = changed(tmp_path, {"icl_tasks": tasks, "eval_gauntlet": {**CATEGORIES, "weighting": "EQUAL"},
                                   "eval_first": True, "icl_seq_len": 64, "icl_subset_num_batches": 3})  # fmt: skip
    config = load_run_config([own])
    names = [tasks] if isinstance(tasks, str) else [task["label"] for task in tasks]
    assert [task if isinstance(task, str) else task.label for task in config.eval.tasks] == names
    assert isinstance(config.eval.gauntlet, GauntletConfig) and len(config.eval.gauntlet.categories) == 2
    assert (config.eval_first, config.icl_seq_len, config.icl_subset_num_batches) == (True, 64, 3)


def test_tasks_that_cannot_be_scored_are_named_and_left_out(tmp_path: Path) -> None:
    own = changed(tmp_path, {"icl_tasks": [TASK, CODE, HUB]})
    translation = translate([own])
    assert [task["label"] for task in translation.values["eval"]["tasks"]] == ["copa"]
    for name in ("code", "hub"):
        assert any(f"icl_tasks: {name} is left out" in warning for warning in translation.warnings)


def test_several_eval_loaders_become_validation_sets_by_label(tmp_path: Path) -> None:
    one = {"name": "text", "dataset": {"local": "/one", "split": "val"}, "num_workers": 8}
    two = {"name": "text", "dataset": {"local": "/two", "remote": "s3://b/two", "split": "val", "shuffle": True}}
    own = changed(tmp_path, {"eval_loader": [{**one, "label": "one"}, {**two, "label": "two"}]})
    sources = load_run_config([own]).sources.eval_sources
    found = {label: (source.path, source.remote, source.shuffle) for label, source in sources.items()}
    assert found == {"one": ("/one", None, False), "two": ("/two", "s3://b/two", True)}
    own = changed(tmp_path, {"eval_loader": [{**one, "label": "one"}, two]})
    with pytest.raises(ConfigError, match="each of several loaders needs a label"):
        load_run_config([own])
    bad = {"name": "text", "dataset": {"local": "/one", "nonsense": 3}, "label": "bad"}
    own = changed(tmp_path, {"eval_loader": [{**one, "label": "one"}, bad]})
    with pytest.raises(ConfigError, match=r"bad: dataset\.nonsense: unknown key"):
        load_run_config([own])
