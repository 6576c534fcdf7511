"""GPT-NeoX files mean here what they mean there. Numbers are the references'."""

import json
import math
from pathlib import Path

import pytest
from decay import decayed

from ingot.config.durations import BatchClock
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.migrate import load_run_config, translate
from ingot.model.shapes import parameter_shapes
from ingot.training.schedule import lr_multiplier

FILES = Path(__file__).parent / "neox"
PILE = str(FILES / "pile.yml")
# file: parameters, layers, width, heads, peak lr, micro batch x accumulation, tensor parallel, padded vocabulary, init
PYTHIA = {
    "14M": (14_067_712, 6, 128, 4, 1e-3, 32, 1, 50304, ("small", "wang")),
    "31M": (30_494_720, 6, 256, 8, 1e-3, 32, 1, 50304, ("small", "wang")),
    "70M": (70_426_624, 6, 512, 8, 1e-3, 32, 1, 50304, ("small", "wang")),
    "160M": (162_322_944, 12, 768, 12, 6e-4, 32, 1, 50304, ("small", "wang")),
    "410M": (405_334_016, 24, 1024, 16, 3e-4, 32, 1, 50304, ("small", "wang")),
    "1B": (1_011_781_632, 16, 2048, 8, 2.5e-4, 16, 1, 50304, ("small", "wang")),
    "1-4B": (1_414_647_808, 24, 2048, 16, 2e-4, 16, 1, 50304, ("small", "wang")),
    "2-8B": (2_775_208_960, 32, 2560, 32, 1.6e-4, 16, 1, 50304, ("small", "wang")),
    "6-9B": (6_857_302_016, 32, 4096, 32, 1.2e-4, 16, 2, 50432, ("normal", "scaled")),
    "12B": (11_846_072_320, 36, 5120, 40, 1.2e-4, 16, 4, 50688, ("normal", "scaled")),
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def load(*arguments: str) -> RunConfig:
    return load_run_config(arguments, dialect="neox")


def pythia(name: str, *overrides: str) -> RunConfig:
    batch = [] if any(o.startswith("train_") for o in overrides) else ["train_batch_size=1024"]
    return load(str(FILES / f"{name}.yml"), PILE, *batch, *overrides)


def error_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        pythia("70M", *arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", PYTHIA)
def test_pythia_files_mean_what_they_mean_there(name: str) -> None:
    config = pythia(name, "train_batch_size=1024")
    parameters, layers, width, heads, lr, _, tensor, vocabulary, init = PYTHIA[name]
    model = config.model
    assert model.parameters == parameters
    assert (model.n_layers, model.d_model, model.n_heads, model.vocab_size) == (layers, width, heads, vocabulary)
    assert (model.init, model.residual_init, model.init_std) == (*init, 0.02)
    assert (model.positions, model.rotary_pct, model.rotary_base) == ("rotary", 0.25, 10000)
    assert (model.parallel_residual, model.tie_word_embeddings, model.activation) == (True, False, "gelu_tanh")
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.betas) == ("adamw", lr, (0.9, 0.95))
    assert (config.optimizer.weight_decay, config.optimizer.eps, config.gradient_clipping) == (0.1, 1e-8, 1.0)
    assert (config.global_train_batch_size, str(config.max_duration), config.seed) == (1024, "143000ba", 1234)
    assert config.global_train_batch_size * config.max_seq_len == 2_097_152
    assert config.precision == ("bf16" if name == "1B" else "fp16")
    assert (config.parallel.tensor, config.activation_checkpointing) == (tensor, True)
    assert (str(config.save_interval), str(config.eval_interval), config.save_folder) == (
        "1000ba",
        "40000ba",
        "checkpoints",
    )


@pytest.mark.parametrize("name", PYTHIA)
def test_without_a_global_batch_it_follows_from_the_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    per_process, tensor = PYTHIA[name][5:7]
    files = (str(FILES / f"{name}.yml"), PILE)
    with pytest.raises(ConfigError) as caught:
        load(*files)
    assert f"{name}.yml:" in str(caught.value) and "give train_batch_size=..." in str(caught.value)
    assert load(*files, "num_gpus=8", "num_nodes=4").global_train_batch_size == per_process * 32 // tensor
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert load(*files).global_train_batch_size == per_process * 64 // tensor
    assert "for 64 processes, from WORLD_SIZE" in "".join(translate(files).comments())


def neox_lr(it: int, warmup: float, end: int, lr: float, min_lr: float, style: str) -> float:
    if it <= warmup:
        return lr * max(1, it) / warmup
    if style == "cosine":
        return min_lr + (lr - min_lr) / 2 * (math.cos(math.pi * (it - warmup) / (end - warmup)) + 1)
    if style == "exponential":
        return max(min_lr, lr * math.exp(-0.693 * (it - warmup) / (end - warmup)))
    return max(min_lr, lr * (end - it) / (end - warmup))


@pytest.mark.parametrize(
    ("files", "style", "warmup", "end", "lr", "min_lr"),
    [(("1-4B.yml", "pile.yml", "train_batch_size=1024"), "cosine", 1430, 143000, 2e-4, 2e-5), (("12B.yml", "pile.yml", "train_batch_size=1024"), "cosine", 1430, 143000, 1.2e-4, 1.2e-5),
     (("20B.json",), "cosine", 1500, 150000, 9.7e-5, 9.7e-6), (("125M-gpt2.yml",), "linear", 3200, 320000, 6e-4, 0.0),
     (("125M-gpt2.yml", "min_lr=6.0e-5", "lr_decay_iters=300000"), "linear", 3000, 300000, 6e-4, 6e-5),
     (("exponential.yml",), "exponential", 800, 16000, 8e-4, 3.6e-4)],
)  # fmt: skip
def test_the_learning_rate_is_neoxs_at_every_step(
    files: tuple[str, ...], style: str, warmup: float, end: int, lr: float, min_lr: float
) -> None:
    config = load(*(name if "=" in name else str(FILES / name) for name in files))
    clock = BatchClock(config.global_train_batch_size, 2048, 10**9, config.max_duration)
    total = clock.total_batches
    for it in [*range(0, total + 1, max(1, total // 25_000)), int(warmup) + 1, end - 1, end]:
        mine = config.optimizer.lr * lr_multiplier(config.scheduler, clock, it)
        assert math.isclose(mine, neox_lr(it, warmup, end, lr, min_lr, style), rel_tol=1e-9, abs_tol=1e-15), it


def test_typed_learning_rates_of_pythia_1_4b() -> None:
    config = pythia("1-4B")
    clock = BatchClock(1024, 2048, 10**9, config.max_duration)
    rates = {it: 2e-4 * lr_multiplier(config.scheduler, clock, it) for it in (1, 143, 1430, 72215, 143000)}
    assert rates == pytest.approx({1: 2e-4 / 1430, 143: 2e-5, 1430: 2e-4, 72215: 1.1e-4, 143000: 2e-5})


def test_neox_20b_from_json_with_its_processes_declared() -> None:
    config = load(str(FILES / "20B.json"))
    assert config.model.parameters == 20_554_567_680
    assert config.global_train_batch_size == 4 * 32 * 96 // 8 == 1536
    assert (config.parallel.tensor, config.parallel.pipeline, config.model.vocab_size) == (2, 4, 50432)
    assert (config.optimizer.weight_decay, config.optimizer.lr, str(config.save_interval)) == (0.01, 9.7e-5, "500ba")
    # eval_iters counts global batches
    assert config.eval_subset_num_batches * (config.device_eval_batch_size or 0) == 10 * 1536


def test_gpt2_and_its_blend() -> None:
    config = load(str(FILES / "125M-gpt2.yml"))
    model = config.model
    assert model.parameters == 50304 * 768 + 2048 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    assert (model.positions, model.activation, model.parallel_residual, model.tie_word_embeddings) == (
        "learned",
        "gelu",
        False,
        True,
    )
    assert (model.emb_pdrop, model.resid_pdrop, model.attn_pdrop) == (0.1, 0.1, 0.1)
    assert {n: s.weight for n, s in config.data.train.mix.items()} == {"a_text_document": 0.3, "b_text_document": 0.7}
    assert (config.save_num_checkpoints_to_keep, config.precision, config.optimizer.betas) == (4, "bf16", (0.9, 0.999))


def test_a_llama_block_with_gated_widths_and_coupled_lion() -> None:
    config = load(str(FILES / "llama-1b.yml"))
    model = config.model
    assert (model.ffn_width, model.activation, model.norm, model.norm_eps) == (8192, "swiglu", "rmsnorm", 1e-5)
    assert (model.n_kv_heads, model.no_bias, model.rotary_pct, model.rotary_base) == (8, True, 1.0, 500000)
    # p *= 1 - lr(t) x 0.5 there; p *= 1 - lr(t) / peak x weight_decay here
    assert config.optimizer.weight_decay == pytest.approx(0.5 * 1e-4)
    assert (str(config.max_duration), str(config.scheduler.t_warmup), config.seed) == ("2ep", "0.05dur", 42)


def test_hyphens_are_underscores_in_files_and_overrides() -> None:
    assert pythia("70M", "num-layers=7").model.n_layers == 7
    assert pythia("70M", "num_layers=7").model.n_layers == 7
    assert pythia("70M", "optimizer.params.lr=0.5").optimizer.lr == 0.5


def test_a_key_in_two_files_is_refused_however_it_is_spelled(tmp_path: Path) -> None:
    second = tmp_path / "more.yml"
    second.write_text("# one more\nnum_layers: 8\n")
    with pytest.raises(ConfigError, match=r"more.yml:2: num_layers is already set at .*70M.yml:6"):
        pythia("70M", str(second))
    second.write_text("num_layers: 8\nnum-layers: 8\n")
    with pytest.raises(ConfigError, match=r"more.yml:2: num_layers is already set at .*more.yml:1"):
        load(str(second))


def test_invalid_json_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{\n  "num_layers": 4,\n  "hidden_size" 12\n}\n')
    with pytest.raises(ConfigError, match=r"run.json:3:17: not valid JSON: Expecting ':' delimiter"):
        load(str(path))


@pytest.mark.parametrize("before", ["", "\ufeff"])
def test_json_is_read_as_neoxs_yaml_reader_reads_it(tmp_path: Path, before: str) -> None:
    path = tmp_path / "20B.json"
    text = (FILES / "20B.json").read_text().rstrip().removesuffix("}")
    text = text.replace("true", "True").replace('"gpt-j-residual": True,', '"gpt-j-residual": True, # a comment')
    path.write_text(before + text.rstrip() + ",\n}\n", encoding="utf-8")
    assert load(str(path)) == load(str(FILES / "20B.json"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n"num_layers": 4,\n// no\n"hidden_size": 12\n}', "run.json:3: // does not start a comment"),
        ('{\n"num_layers": 4,\n"bias_gelu_fusion": true // no\n}', "run.json:3: // does not start a comment"),
        ('{\n"num_layers": 4,\n"num_layers": 5\n}', "run.json:3: "),
        ('{\n"num_layers": 4,\n', "run.json:3:1: not valid JSON"),
    ],
)
def test_json_that_neox_does_not_read_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert words in str(caught.value) and "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train_batch_size=1000"], "contradicts train_micro_batch_size_per_gpu 32"),
        (["train_batch_size=1024", "gradient_accumulation_steps=3"], "gradient_accumulation_steps 3"),
        (["train_batch_size=1024", "gas=3"], "gas 3"),
        (["train_batch_size=1024", "gradient_accumulation_steps=1", "global_num_gpus=8"], "global_num_gpus 8"),
        (["train_micro_batch_size_per_gpu=null"], "train_batch_size = (default): is missing"),
        (["num_layer=3"], "command line: unknown key num_layer of GPT-NeoX; did you mean num_layers?"),
        (["train_loader.name=text"], "it is a key of LLM Foundry"),
        (["moe_num_experts=8"], "moe_num_experts = 8: mixtures of experts are not supported"),
        (["attention_config=[[[rwkv], 6]]"], "rwkv is not supported; use global or flash"),
        (["attention_config=[[[mamba], 6]]"], "mamba is not supported"),
        (["attention_config=[[[local, global], 3]]"], "local is not supported"),
        (["activation=geglu"], "activation = geglu: not supported; possible here: gelu, swiglu"),
        (["pos_emb=rpe"], "not supported"),
        (["sliding_window_width=0"], "at least 1"),
        (["gpt_j_tied=true"], "not supported by the model here"),
        (["use_mup=true"], "set the learning rate"),
        (["z_loss=0.1"], "the loss is the cross-entropy alone"),
        (["use_qk_layernorm=true"], "NeoX's share one"),
        (["model_arch=t5"], "T5 is not supported"),
        (["lr_decay_iters=1000"], "NeoX's cosine rises again"),
        (["fp16.loss_scale_window=250"], "only the default window is accepted"),
        (["fp16.loss_scale=1024"], "use loss_scale 0"),
        (["optimizer.type=sm3"], "possible here: adam"),
        (["init_method=xavier_normal"], "init_method = xavier_normal: not supported"),
        (["output_layer_init_method=scaled_normal"], "does not go with init_method small"),
        (["curriculum_learning={enabled: true}"], "the sequence length and the batch do not change"),
        (["train_impl=dpo"], "only pretraining is done here"),
        (["train_epochs=1"], "train_iters, or else with train_epochs"),
        (["use_bias_in_mlp=false"], "linear layers have biases everywhere or nowhere"),
        (["lr=0.5"], "lr = 0.5: contradicts optimizer.params.lr 0.001; remove one of them"),
        (["clip_grad=0.5"], "contradicts gradient_clipping 1.0"),
        (["load=elsewhere"], "with finetune"),
        (["data_path=one"], "name the data once"),
        (["vocab_file=nowhere.json"], "set padded_vocab_size"),
        (["valid_data_weights=[1, 2]"], "has 2 weights for 1 datasets"),
        (["checkpoint_scale=log"], "use linear"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(overrides: list[str], words: str) -> None:
    message = error_of(*overrides)
    assert words in message and "Traceback" not in message


def test_one_dataset_is_split_by_neoxs_rule() -> None:
    data = load(str(FILES / "exponential.yml")).data
    assert data is not None and data.eval is not None and data.train.documents and data.eval.documents
    assert data.train.documents.model_dump() == {"split": "995,4,1", "part": "train", "rule": "neox"}
    assert data.eval.documents.model_dump() == {"split": "995,4,1", "part": "valid", "rule": "neox"}
    whole = load(str(FILES / "exponential.yml"), "split='1,0,0'").data
    assert whole is not None and whole.train.documents is None and whole.eval is None


def test_datasets_without_weights_weigh_the_same() -> None:
    data = load(str(FILES / "125M-gpt2.yml"), "train_data_weights=null").data
    assert data is not None and {source.weight for source in data.train.mix.values()} == {1.0}
    assert data.train.mix_order == "greedy"


def test_biases_of_norms_and_initialization_by_neoxs_names() -> None:
    config = load(str(FILES / "exponential.yml"))
    model = config.model
    assert (model.no_bias, model.norm_bias, model.init, model.residual_init) == (True, True, "normal", "same")
    assert model.parameters == 50304 * 512 + 8 * (12 * 512**2 + 2 * 2 * 512) + 2 * 512
    assert (config.mask_eos_loss, model.eos_token_id, config.global_train_batch_size) == (True, 0, 64)
    assert "use_bias_in_norms" in translate([str(FILES / "exponential.yml")]).rows


@pytest.mark.parametrize(
    "files", [("14M.yml", "pile.yml", "train_batch_size=1024"), ("125M-gpt2.yml",), ("exponential.yml",)]
)
def test_weight_decay_spares_norms_and_biases_as_in_neox(files: tuple[str, ...]) -> None:
    small = ("num_layers=2", "hidden_size=32", "num_attention_heads=2", "padded_vocab_size=128")
    config = load(*(name if "=" in name else str(FILES / name) for name in files), *small)
    shapes = parameter_shapes(config.model)
    spared = {name for name in shapes if "norm" in name or name.endswith("bias")}
    assert decayed(config) == {name: 0.0 if name in spared else config.optimizer.weight_decay for name in shapes}


def test_the_vocabulary_is_counted_in_the_tokenizer_file(tmp_path: Path) -> None:
    path = tmp_path / "my_tokenizer.json"
    tokens = {f"t{i}": i for i in range(1000)}
    path.write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": [{"content": "<eos>"}, {"content": "t3"}]}))
    config = pythia("70M", f"vocab_file={path}", "make_vocab_size_divisible_by=10")
    assert (config.model.vocab_size, config.model.vocab_rows, config.tokenizer) == (1010, 1010, str(path))


def test_every_key_of_a_file_is_accounted_for() -> None:
    for files in [(f"{name}.yml", "pile.yml", "train_batch_size=1024") for name in PYTHIA] + [
        ("20B.json",),
        ("125M-gpt2.yml",),
        ("llama-1b.yml",),
        ("exponential.yml",),
    ]:
        translation = translate([name if "=" in name else str(FILES / name) for name in files])
        assert translation.dialect.name == "neox" and not translation.problems
        assert set(translation.given) <= set(translation.rows)
    rows = translate([str(FILES / "70M.yml"), PILE]).rows
    assert rows["launcher"].text.startswith("where a run runs") and rows["extra_save_iters"].text.startswith(
        "not saved here"
    )
