"""What a Hugging Face folder holds: the files we write, the spellings we read, and everything that we refuse."""

import inspect
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from state_reader import StateReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MptConfig,
    PretrainedConfig,
)

from ingot.checkpoint.hf.config import from_hf_config, hf_class, to_hf_config
from ingot.checkpoint.hf.folder import export_hf, read_hf
from ingot.cli.export import export as export_command
from ingot.config.model import ModelConfig
from ingot.errors import CheckpointError, DiskError
from ingot.model.gpt import GPT
from ingot.model.init import build_model

SMALL = {"d_model": 16, "n_heads": 4, "n_layers": 2, "vocab_size": 50, "max_seq_len": 32}
MPT = {**SMALL, "family": "mpt", "positions": "alibi", "no_bias": True}
GPT3 = {**SMALL, "family": "gpt3", "vocab_multiple": 1}
NEOX = {**SMALL, "family": "neox", "rotary_pct": 0.5}
LLAMA = {**SMALL, "family": "llama", "n_kv_heads": 2}
MODELS = {"mpt": MPT, "gpt2": GPT3, "gpt_neox": NEOX, "llama": LLAMA}


def model_of(**values: Any) -> GPT:
    return build_model(ModelConfig.model_validate(values), seed=3, device=torch.device("cpu"))


def export(model: GPT, out: Path, tokenizer: Path | None = None, **options: Any) -> Path:
    export_hf(StateReader(model), model.config, out, tokenizer=tokenizer, **options)
    return out


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys; a value of `...` removes the key."""
    values = read_json(path) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file({name: t.clone() for name, t in change(load_file(path)).items()}, path, metadata={"format": "pt"})


def assert_same_tensors(folder: Path, model: GPT) -> None:
    _, tensors = read_hf(folder)
    assert set(tensors.names()) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors.get(name), parameter), name


# --- what is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_a_sharded_export_loads_in_transformers_and_here(kind: str, tmp_path: Path) -> None:
    model = model_of(**MODELS[kind])
    folder = export(model, tmp_path / "out", max_shard_bytes=6000)
    index = read_json(folder / "model.safetensors.index.json")
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    assert set(index["weight_map"].values()) == set(files)
    shards = [load_file(folder / file) for file in files]
    sizes = [sum(t.nbytes for t in shard.values()) for shard in shards]
    assert all(len(shard) == 1 or size <= 6000 for shard, size in zip(shards, sizes, strict=True))
    for size, following in zip(
        sizes, shards[1:], strict=False
    ):  # a shard ends only where the next tensor would not fit
        assert size + max(t.nbytes for t in following.values()) > 6000
    assert index["metadata"]["total_size"] == sum(sizes)
    assert_same_tensors(folder, model)
    whole = AutoModelForCausalLM.from_pretrained(export(model, tmp_path / "whole"))
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), whole.parameters(), strict=True))


def test_a_file_of_an_export_has_at_most_5_gb_by_default() -> None:
    command, function = (inspect.signature(f).parameters for f in (export_command, export_hf))
    assert command["max_shard_gb"].default * 10**9 == function["max_shard_bytes"].default == 5 * 10**9


def test_an_export_holds_one_shard_in_memory(tmp_path: Path) -> None:
    model = model_of(**LLAMA)
    on_disk: list[int] = []

    class Watching(StateReader):
        def get(self, name: str) -> Tensor:
            on_disk.append(len(list(tmp_path.glob(".out.partial-*/shard-*"))))
            return super().get(name)

    export_hf(Watching(model), model.config, tmp_path / "out", tokenizer=None, max_shard_bytes=6000)
    shards = len(list((tmp_path / "out").glob("*.safetensors")))
    assert on_disk[0] == 0
    assert on_disk[-1] >= shards - 2  # all but the open shard, and the one that this tensor may still complete


@pytest.mark.parametrize("tied", [True, False])
def test_padding_of_the_vocabulary_is_cut(tied: bool, tmp_path: Path) -> None:
    model = model_of(**NEOX, vocab_multiple=64, tie_word_embeddings=tied)
    assert model.wte.weight.shape == (64, 16)
    folder = export(model, tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["gpt_neox.embed_in.weight"], model.wte.weight[:50])
    assert ("embed_out.weight" in stored) is not tied
    config, tensors = read_hf(folder)
    assert config.vocab_rows == 50
    if not tied:
        assert torch.equal(tensors.get("head.weight"), model.head.weight[:50])


@pytest.mark.parametrize(
    ("dtype", "stored"), [(None, "float32"), ("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_dtype_is_stored_and_announced(dtype: str | None, stored: str, tmp_path: Path) -> None:
    model = model_of(**MPT)
    folder = export(model, tmp_path / "out", dtype=dtype)
    expected = getattr(torch, stored)
    assert torch.equal(load_file(folder / "model.safetensors")["transformer.wte.weight"], model.wte.weight.to(expected))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == expected
    _, tensors = read_hf(folder)
    assert {tensors.get(name).dtype for name in tensors.names()} == {expected}


def test_a_value_that_fp16_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = model_of(**MPT)
    with torch.no_grad():
        model.norm_f.weight[3] = 1e5
    with pytest.raises(CheckpointError, match=r"norm_f\.weight holds values.*bf16"):
        export(model, tmp_path / "out", dtype="fp16")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="fp32, bf16, fp16"):
        export(model_of(**MPT), tmp_path / "out", dtype="int8")


def test_a_folder_with_files_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        export(model_of(**MPT), tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "notes.txt"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    model = model_of(**MPT)
    assert_same_tensors(export(model, tmp_path / "out"), model)


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    model = model_of(**MPT)

    class Failing(StateReader):
        def get(self, name: str) -> Tensor:
            if name == "norm_f.weight":
                raise CheckpointError("the checkpoint is damaged")
            return super().get(name)

    with pytest.raises(CheckpointError, match="damaged"):
        export_hf(Failing(model), model.config, tmp_path / "out", tokenizer=None, max_shard_bytes=5000)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot export to"):
        export(model_of(**MPT), tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm_f.weight"), "norm_f.weight is missing"),
        (lambda t: t.update({"head.weight": torch.zeros(50, 16)}), "head.weight is not part"),
        (lambda t: t.update({"norm_f.weight": torch.zeros(17)}), r"norm_f.weight has shape \[17\].*\[16\]"),
    ],
)
def test_weights_of_another_model_are_not_exported(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    reader = StateReader(model_of(**MPT))
    change(reader.tensors)
    with pytest.raises(CheckpointError, match=message):
        export_hf(reader, ModelConfig.model_validate(MPT), tmp_path / "out", tokenizer=None)
    assert list(tmp_path.iterdir()) == []


# --- which class expresses a model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (MPT, "MptForCausalLM"),
        ({**MPT, "norm": "low_precision_layernorm", "clip_qkv": 6.0, "softmax_scale": 0.1}, "MptForCausalLM"),
        (GPT3, "GPT2LMHeadModel"),
        ({**SMALL, "family": "mpt"}, "GPT2LMHeadModel"),
        ({**GPT3, "softmax_scale": 0.5}, "GPT2LMHeadModel"),  # which is 1/sqrt(head_dim)
        (NEOX, "GPTNeoXForCausalLM"),
        ({**NEOX, "parallel_residual": False, "activation": "gelu_tanh"}, "GPTNeoXForCausalLM"),
        (LLAMA, "LlamaForCausalLM"),
        ({**LLAMA, "head_dim": 8, "tie_word_embeddings": True, "n_kv_heads": 1}, "LlamaForCausalLM"),
    ],
)
def test_the_class_follows_from_the_parts(values: dict[str, Any], expected: str) -> None:
    assert hf_class(ModelConfig.model_validate(values)) == expected


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({**MPT, "no_bias": False}, "no_bias=False"),
        ({**MPT, "norm": "rmsnorm"}, "norm=rmsnorm"),
        ({**MPT, "activation": "gelu_tanh"}, "activation=gelu_tanh"),
        ({**MPT, "expansion_ratio": 3}, "expansion_ratio=3"),
        ({**MPT, "ffn_hidden_size": 40}, "ffn_hidden_size=40"),
        ({**MPT, "n_kv_heads": 2}, "n_kv_heads=2"),
        ({**MPT, "qk_ln": True}, "qk_ln=True"),
        ({**MPT, "alibi_bias_max": 16}, "alibi_bias_max=16"),
        ({**MPT, "parallel_residual": True}, "parallel_residual=True"),
        ({**MPT, "positions": "none"}, "positions=none"),
        ({**GPT3, "no_bias": True}, "no_bias=True"),
        ({**GPT3, "clip_qkv": 6.0}, "clip_qkv=6"),
        ({**GPT3, "softmax_scale": 0.1}, "softmax_scale=0.1"),
        ({**GPT3, "activation": "swiglu"}, "activation=swiglu"),
        ({**GPT3, "parallel_residual": True}, "parallel_residual=True"),
        ({**GPT3, "head_dim": 8}, "head_dim=8"),
        ({**NEOX, "n_kv_heads": 1}, "n_kv_heads=1"),
        ({**NEOX, "no_bias": True}, "no_bias=True"),
        ({**NEOX, "softmax_scale": 0.1}, "softmax_scale=0.1"),
        ({**LLAMA, "no_bias": False}, "no_bias=False"),
        ({**LLAMA, "activation": "gelu"}, "activation=gelu"),
        ({**LLAMA, "rotary_pct": 0.5}, "rotary_pct=0.5"),
        ({**LLAMA, "parallel_residual": True}, "parallel_residual=True"),
        ({**LLAMA, "qk_ln": True}, "qk_ln=True"),
        ({**GPT3, "qk_ln": "heads"}, "qk_ln=heads"),
        ({**GPT3, "norm_bias": False}, "norm_bias=False"),
        ({**MPT, "norm_bias": True}, "norm_bias=True"),
        ({**LLAMA, "n_heads": 6, "head_dim": 4}, "n_heads=6"),
    ],
)
def test_a_model_that_no_class_expresses_is_refused_by_its_field(
    values: dict[str, Any], field: str, tmp_path: Path
) -> None:
    model = model_of(**values)
    with pytest.raises(CheckpointError, match=f"with {field}"):
        export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- the tokenizer -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 280 tokens, of which the last byte pair learnt is 279 and <|endoftext|> is 0."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    bpe.train_from_iterator(["an ingot is a bar of metal, cast in a mould"] * 5, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    return folder


def test_the_tokenizer_travels_with_the_model(tokenizer: Path, tmp_path: Path) -> None:
    folder = export(model_of(**{**LLAMA, "vocab_size": 280}), tmp_path / "out", tokenizer)
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "an ingot, naïvely cast\n"
    assert loaded(text)["input_ids"] == Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token, loaded.eos_token_id, loaded.model_max_length) == ("<|endoftext|>", 0, 32)
    for file in ("config.json", "generation_config.json"):
        assert read_json(folder / file)["eos_token_id"] == 0
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 0


def test_a_tokenizer_config_is_copied_and_names_the_special_tokens(tokenizer: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tokenizer, source)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "a"}, "bos_token": "b"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "special_tokens_map.json").write_text('{"bos_token": "b"}')
    (source / "secrets.txt").write_text("not part of a tokenizer")
    folder = export(model_of(**{**MPT, "vocab_size": 280}), tmp_path / "out", source)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (folder / file).read_bytes() == (source / file).read_bytes()
    assert not (folder / "secrets.txt").exists()
    bpe = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    config = read_json(folder / "config.json")
    assert (config["bos_token_id"], config["eos_token_id"]) == (bpe.token_to_id("b"), bpe.token_to_id("a"))


def test_without_a_tokenizer_no_special_token_is_claimed(tmp_path: Path) -> None:
    folder = export(model_of(**GPT3), tmp_path / "out")
    assert not (folder / "tokenizer_config.json").exists()
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert config.eos_token_id is None  # GPT-2's default, 50256, would lie outside this vocabulary
    assert config.bos_token_id is None


def test_a_tokenizer_of_another_model_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="token id 279 and the model 279 tokens"):
        export(model_of(**{**MPT, "vocab_size": 279}), tmp_path / "out", tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("content", "message"), [(None, "holds no tokenizer.json"), ("{", "is not a tokenizer")])
def test_a_missing_or_broken_tokenizer_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if content is not None:
        (source / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        export(model_of(**MPT), tmp_path / "out", source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- the spellings of config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [MptConfig(), GPT2Config(), GPTNeoXConfig(), LlamaConfig()])
def test_absent_keys_mean_what_transformers_means(config: PretrainedConfig) -> None:
    full = json.loads(config.to_json_string(use_diff=False))
    from_none, from_all = (from_hf_config(v, "config.json") for v in ({"model_type": config.model_type}, full))
    assert to_hf_config(from_none) == to_hf_config(from_all)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("gpt_neox", {"rope_parameters": ..., "rotary_pct": 1.0, "rotary_emb_base": 7.0}, {"rotary_pct": 1.0, "rotary_base": 7.0}),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 7.0}, "rotary_pct": 0.5}, {"rotary_pct": 1.0, "rotary_base": 7.0}),
        ("gpt_neox", {"rope_parameters": ..., "rotary_pct": ..., "rotary_emb_base": ..., "hidden_size": 32}, {"rotary_pct": 0.25, "rotary_base": 10000.0}),
        ("gpt_neox", {"hidden_act": "gelu_fast"}, {"activation": "gelu_tanh"}),
        ("llama", {"rope_parameters": ..., "rope_theta": 7.0}, {"rotary_base": 7.0}),
        ("llama", {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}, "rope_theta": ...}, {"rotary_base": 7.0}),
        ("llama", {"rope_parameters": ..., "rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 1.0}}, {"rotary_base": 7.0}),
        ("llama", {"num_key_value_heads": ..., "head_dim": ...}, {"kv_heads": 4, "head_width": 4}),
        ("mpt", {"attn_config": {"clip_qkv": 6.0}}, {"clip_qkv": 6.0, "alibi_bias_max": 8.0, "positions": "alibi"}),
        ("mpt", {"attn_config": ..., "learned_pos_emb": True}, {"clip_qkv": None, "positions": "alibi"}),
        ("mpt", {"attn_config": {"alibi": True, "alibi_bias_max": 16}}, {"alibi_bias_max": 16.0}),
        ("mpt", {"d_model": ..., "hidden_size": 32}, {"d_model": 32}),
        ("gpt2", {"n_inner": None, "activation_function": ...}, {"ffn_width": 64, "activation": "gelu_tanh"}),
        ("gpt2", {"n_embd": ..., "hidden_size": 32, "n_inner": 64}, {"d_model": 32, "ffn_width": 64}),
    ],
)  # fmt: skip
def test_old_and_new_spellings_are_read(kind: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    values = to_hf_config(ModelConfig.model_validate(MODELS[kind])) | changes
    config = from_hf_config({key: value for key, value in values.items() if value is not ...}, "config.json")
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize("kind", MODELS)
def test_files_without_prefix_and_with_old_buffers_are_read(kind: str, tmp_path: Path) -> None:
    model = model_of(**MODELS[kind])
    folder = export(model, tmp_path / "out")
    prefix = {"mpt": "transformer.", "gpt2": "transformer.", "gpt_neox": "gpt_neox.", "llama": "model."}[kind]
    buffers = ["h.0.attn.bias", "h.0.attn.masked_bias", "layers.1.attention.bias", "layers.1.attention.masked_bias",
               "layers.1.attention.rotary_emb.inv_freq", "rotary_emb.inv_freq"]  # fmt: skip

    def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        assert any(name.startswith(prefix) for name in tensors)
        bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return bare | {name: torch.zeros(1, 1, 4, 4) for name in buffers}

    edit_weights(folder, as_published)
    assert_same_tensors(folder, model)


def test_both_names_of_the_neox_head_are_read(tmp_path: Path) -> None:
    model = model_of(**NEOX)
    folder = export(model, tmp_path / "out")
    edit_weights(folder, lambda t: {name.replace("embed_out", "lm_head"): tensor for name, tensor in t.items()})
    assert_same_tensors(folder, model)


def test_a_stored_copy_of_a_tied_head_is_accepted_only_if_equal(tmp_path: Path) -> None:
    model = model_of(**MPT)
    folder = export(model, tmp_path / "out")
    edit_weights(folder, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"]})
    assert_same_tensors(folder, model)
    edit_weights(folder, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"] + 1})
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        read_hf(folder)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mpt", {"model_type": "bloom"}, "'bloom'.*mpt, gpt2, gpt_neox, llama"),
        ("mpt", {"model_type": ...}, "model_type is None"),
        ("mpt", {"model_type": ["mpt"]}, "model_type is"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi=False"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln=True"),
        ("mpt", {"attn_config": {"attn_type": "grouped_query_attention"}}, "attn_type="),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm=True"),
        ("mpt", {"attn_config": "torch"}, "attn_config should be a mapping"),
        ("mpt", {"no_bias": False}, "no_bias=False"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type='rmsnorm'"),
        ("mpt", {"logit_scale": 0.5}, "logit_scale=0.5"),
        ("mpt", {"expansion_ratio": 8}, "expansion_ratio=8"),
        ("mpt", {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_type='mptglu'"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2", {"n_positions": 33}, r"wpe.weight has shape \[32, 16\].*\[33, 16\]"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias=False"),
        ("gpt_neox", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ("gpt_neox", {"num_attention_heads": 5}, "n_heads: 5 heads do not divide"),
        ("gpt_neox", {"hidden_act": ["gelu"]}, "hidden_act="),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "rope scaling 'llama3'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "each kind of layer"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
        ("llama", {"vocab_size": "many"}, "vocab_size: "),
        ("llama", {"num_hidden_layers": 3}, r"lacks the tensor model.layers.2\.input_layernorm"),
        ("llama", {"num_hidden_layers": 10**12}, "lacks the tensor model.layers.999999999999"),
        ("llama", {"num_hidden_layers": 1}, r"no place for the tensor model\.layers\.1\."),
        ("llama", {"vocab_size": 49}, r"embed_tokens.weight has shape \[50, 16\].*\[49, 16\]"),
        ("llama", {"intermediate_size": 10**30}, "impossible model"),
        ("llama", {"tie_word_embeddings": True}, "differs from the embedding"),
    ],
)  # fmt: skip
def test_a_config_that_we_cannot_follow_is_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = export(model_of(**MODELS[kind]), tmp_path / "out")
    read_hf(folder)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        read_hf(folder)
    assert "\n" not in str(error.value)


def lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def nest_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def binary_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def lose_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def garble_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"x" * 32
    path.write_bytes(content)


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")


def drop_tensor(folder: Path) -> None:
    edit_weights(
        folder, lambda t: {name: x for name, x in t.items() if not name.endswith("layers.1.mlp.up_proj.weight")}
    )


def add_tensor(folder: Path) -> None:
    edit_weights(folder, lambda t: t | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(16)})


def twice(folder: Path) -> None:
    edit_weights(folder, lambda t: t | {"norm.weight": t["model.norm.weight"]})


def transpose(folder: Path) -> None:
    edit_weights(folder, lambda t: t | {"lm_head.weight": t["lm_head.weight"].T.contiguous()})


def quantize(folder: Path) -> None:
    edit_weights(folder, lambda t: t | {"lm_head.weight": t["lm_head.weight"].to(torch.int8)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_config, "config.json is missing"),
        (break_config, "cannot read .*config.json"),
        (list_config, "should hold a JSON object"),
        (nest_config, "cannot read .*config.json"),
        (binary_config, "cannot read .*config.json"),
        (lose_weights, "holds neither model.safetensors nor"),
        (pickle_weights, "only pickled weights"),
        (truncate_weights, "damaged or cut short"),
        (empty_weights, "damaged or cut short"),
        (garble_header, "damaged or cut short"),
        (huge_header, "damaged or cut short"),
        (drop_tensor, r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (add_tensor, r"no place for the tensor model\.layers\.1\.self_attn\.q_proj\.bias"),
        (twice, "norm.weight twice"),
        (transpose, r"lm_head.weight has shape \[16, 50\].*\[50, 16\]"),
        (quantize, "stored as I8"),
    ],
)
def test_a_damaged_folder_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = export(model_of(**LLAMA), tmp_path / "out")
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        read_hf(folder)
    assert "\n" not in str(error.value)


def lose_shard(folder: Path) -> None:
    next(folder.glob("model-00002-of-*")).unlink()


def truncate_shard(folder: Path) -> None:
    path = next(folder.glob("model-00002-of-*"))
    path.write_bytes(path.read_bytes()[:-100])


def climb_out(folder: Path) -> None:
    shard = next(folder.glob("model-00002-of-*"))
    shard.rename(folder.parent / "stray.safetensors")
    rename_in_index(folder, shard.name, "../stray.safetensors")


def absolute_shard(folder: Path) -> None:
    shard = next(folder.glob("model-00002-of-*"))
    rename_in_index(folder, shard.name, str(shard))


def pickled_shard(folder: Path) -> None:
    shard = next(folder.glob("model-00002-of-*"))
    shard.rename(folder / "pytorch_model.bin")
    rename_in_index(folder, shard.name, "pytorch_model.bin")


def number_as_shard(folder: Path) -> None:
    rename_in_index(folder, next(folder.glob("model-00002-of-*")).name, 7)


def rename_in_index(folder: Path, old: str, new: object) -> None:
    path = folder / "model.safetensors.index.json"
    weight_map = read_json(path)["weight_map"]
    edit_json(path, weight_map={name: new if file == old else file for name, file in weight_map.items()})


def empty_index(folder: Path) -> None:
    edit_json(folder / "model.safetensors.index.json", weight_map={})


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def repeat_shard(folder: Path) -> None:
    shutil.copy(next(folder.glob("model-00002-of-*")), folder / "copy.safetensors")
    path = folder / "model.safetensors.index.json"
    edit_json(path, weight_map=read_json(path)["weight_map"] | {"more": "copy.safetensors"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_shard, "model-00002-of-.* is missing although"),
        (truncate_shard, "model-00002-of-.* is damaged or cut short"),
        (climb_out, r"'\.\./stray\.safetensors', which is not a safetensors file of this folder"),
        (absolute_shard, "which is not a safetensors file of this folder"),
        (pickled_shard, "which is not a safetensors file of this folder"),
        (number_as_shard, "'7', which is not a safetensors file"),
        (empty_index, "has no weight_map"),
        (break_index, "cannot read .*index.json"),
        (repeat_shard, "twice"),
    ],
)
def test_a_damaged_sharded_folder_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = export(model_of(**LLAMA), tmp_path / "out", max_shard_bytes=6000)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        read_hf(folder)
    assert "\n" not in str(error.value)
