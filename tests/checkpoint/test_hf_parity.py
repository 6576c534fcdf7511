"""Our GPT against transformers' own classes: the same weights give the same logits, gradients and text, both ways.

Every weight is drawn so large that a head in the wrong place or a lost bias moves the logits by far more than the
tolerance; `test_no_parameter_is_too_quiet_to_be_noticed` holds us to that.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from state_reader import StateReader
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
)
from transformers.models.mpt.configuration_mpt import MptAttentionConfig

from ingot.checkpoint.hf.config import hf_class
from ingot.checkpoint.hf.folder import export_hf, read_hf
from ingot.config.model import ModelConfig
from ingot.model.generate import generate
from ingot.model.gpt import GPT

VOCAB, LAYERS, CONTEXT = 130, 3, 64


def mpt(heads: int, **attention: object) -> PreTrainedModel:
    config = MptConfig(vocab_size=VOCAB, d_model=48, n_heads=heads, n_layers=LAYERS, max_seq_len=CONTEXT)
    config.attn_config = MptAttentionConfig(**attention)
    return MptForCausalLM(config)


def gpt2(activation: str, **more: object) -> PreTrainedModel:
    shape = {"vocab_size": VOCAB, "n_embd": 48, "n_head": 4, "n_layer": LAYERS, "n_positions": CONTEXT}
    return GPT2LMHeadModel(
        GPT2Config(**shape, activation_function=activation, bos_token_id=None, eos_token_id=None, **more)
    )


def neox(parallel: bool, rotary_pct: float, theta: float = 10000.0, **more: object) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotary_pct}
    config = GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=64, num_attention_heads=4, num_hidden_layers=LAYERS, intermediate_size=96,
        max_position_embeddings=CONTEXT, use_parallel_residual=parallel, rope_parameters=rope, **more,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


def llama(kv_heads: int, tied: bool, **more: object) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, num_attention_heads=6, num_key_value_heads=kv_heads,
        num_hidden_layers=LAYERS, intermediate_size=80, max_position_embeddings=CONTEXT, tie_word_embeddings=tied,
        **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


THEIRS: dict[str, Callable[[], PreTrainedModel]] = {
    "mpt-6-heads": lambda: mpt(6),
    "mpt-8-heads": lambda: mpt(8),
    "mpt-clip-scale": lambda: mpt(8, clip_qkv=0.5, softmax_scale=0.7),
    "gpt2-gelu": lambda: gpt2("gelu"),
    "gpt2-gelu_new": lambda: gpt2("gelu_new"),
    "gpt2-untied": lambda: gpt2("gelu_new", tie_word_embeddings=False, n_inner=100),
    "neox-parallel-quarter": lambda: neox(True, 0.25),
    "neox-parallel-full": lambda: neox(True, 1.0, theta=500.0),
    "neox-sequential-quarter": lambda: neox(False, 0.25, hidden_act="gelu_fast"),
    "neox-sequential-full": lambda: neox(False, 1.0),
    "llama-grouped": lambda: llama(2, tied=False),
    "llama-grouped-tied": lambda: llama(3, tied=True),
    "llama-multi-query": lambda: llama(1, tied=False, head_dim=12, rms_norm_eps=1e-3),
}

SMALL = {"d_model": 48, "n_heads": 6, "n_layers": LAYERS, "vocab_size": VOCAB, "max_seq_len": CONTEXT}
MPT = {**SMALL, "family": "mpt", "positions": "alibi", "no_bias": True}
OURS: dict[str, dict[str, object]] = {
    "mpt": MPT,
    "mpt-low-precision-norm": {**MPT, "n_heads": 8, "norm": "low_precision_layernorm", "norm_eps": 1e-2},
    "mpt-clip-scale": {**MPT, "clip_qkv": 0.5, "softmax_scale": 0.7},
    "mpt-untied": {**MPT, "tie_word_embeddings": False, "vocab_multiple": 64},
    "mosaic_gpt": {**SMALL, "family": "mosaic_gpt", "norm_eps": 1e-2},
    "gpt3": {**SMALL, "family": "gpt3", "ffn_hidden_size": 100},
    "gpt3-untied": {**SMALL, "family": "gpt3", "tie_word_embeddings": False},
    "neox": {**SMALL, "family": "neox"},
    "neox-odd": {**SMALL, "family": "neox", "parallel_residual": False, "rotary_pct": 1.0, "rotary_base": 500.0,
                 "tie_word_embeddings": True, "activation": "gelu_tanh", "norm_eps": 1e-2, "vocab_multiple": 128},
    "llama": {**SMALL, "family": "llama", "n_kv_heads": 2, "ffn_hidden_size": 80},
    "llama-tied-wide-heads": {**SMALL, "family": "llama", "head_dim": 12, "n_kv_heads": 1, "rotary_base": 500.0,
                              "tie_word_embeddings": True, "norm_eps": 1e-2, "vocab_multiple": 64},
}  # fmt: skip


def make_loud(model: nn.Module) -> None:
    """Weights that matter: activations of order one, norms and biases far from one and zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else 0.15 * noise)


def theirs(case: str) -> PreTrainedModel:
    model = THEIRS[case]().eval()
    make_loud(model)
    return model


def ours(case: str) -> GPT:
    model = GPT(ModelConfig.model_validate(OURS[case])).eval()
    make_loud(model)
    return model


def imported(folder: Path) -> GPT:
    config, tensors = read_hf(folder)
    model = GPT(config).eval()
    model.load_state_dict({name: tensors.get(name) for name in tensors.names()})
    return model


def exported(model: GPT, folder: Path) -> PreTrainedModel:
    name = export_hf(StateReader(model), model.config, folder, tokenizer=None)
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded).__name__ == name == hf_class(model.config)
    return loaded.eval()


def batch() -> Tensor:
    return torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_same_logits(a: GPT, b: PreTrainedModel) -> None:
    difference = (a(batch()) - b(batch()).logits).abs()
    assert difference.max() <= 1e-4
    assert difference.mean() <= 1e-5


@pytest.mark.parametrize("case", THEIRS)
def test_an_imported_model_gives_the_logits_of_its_class(case: str, tmp_path: Path) -> None:
    model = theirs(case)
    model.save_pretrained(tmp_path)
    assert_same_logits(imported(tmp_path), model)


@pytest.mark.parametrize("case", OURS)
def test_an_exported_model_gives_our_logits(case: str, tmp_path: Path) -> None:
    model = ours(case)
    assert_same_logits(model, exported(model, tmp_path / "out"))


@pytest.mark.parametrize("case", OURS)
def test_an_exported_model_comes_back_with_the_same_math(case: str, tmp_path: Path) -> None:
    model = ours(case)
    exported(model, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(imported(tmp_path / "out")(batch()), model(batch()))


@pytest.mark.parametrize("case", THEIRS)
def test_gradients_equal_those_of_the_class(case: str, tmp_path: Path) -> None:
    model, tokens = theirs(case), batch()
    model.save_pretrained(tmp_path / "hf")
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    mine = imported(tmp_path / "hf")
    my_loss = mine.loss(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    my_loss.backward()
    assert my_loss.item() == pytest.approx(loss.item(), abs=1e-5)

    # A gradient is laid out as its parameter is, so the export of our gradients is theirs.
    gradients = StateReader({name: p.grad for name, p in mine.named_parameters() if p.grad is not None})
    export_hf(gradients, mine.config, tmp_path / "gradients", tokenizer=None)
    stored = load_file(tmp_path / "gradients" / "model.safetensors")
    expected = {name.replace("lm_head", "embed_out") if case.startswith("neox") else name: p.grad
                for name, p in model.named_parameters()}  # fmt: skip
    assert stored.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        assert (stored[name] - gradient).abs().max() <= 1e-3 * gradient.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["mpt-6-heads", "gpt2-untied", "neox-parallel-quarter", "llama-grouped-tied"])
def test_a_round_trip_keeps_every_bit(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs(case).to(dtype).save_pretrained(tmp_path / "hf")
    config, tensors = read_hf(tmp_path / "hf")
    export_hf(tensors, config, tmp_path / "again", tokenizer=None)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == dtype
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize("case", ["mpt", "mosaic_gpt", "neox", "llama"])
def test_an_exported_model_writes_the_same_text(case: str, tmp_path: Path) -> None:
    model = ours(case)
    prompt = batch()[:1, :10]
    loaded = exported(model, tmp_path / "out")
    text = loaded.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
    assert text[0, 10:].tolist() == list(generate(model, prompt[0].tolist(), 20, temperature=0))


@torch.no_grad()
@pytest.mark.parametrize("case", OURS)
def test_no_parameter_is_too_quiet_to_be_noticed(case: str) -> None:
    model = ours(case)
    logits = model(batch())
    for name, parameter in model.named_parameters():
        before = parameter.clone()
        parameter.mul_(0.9)
        assert (model(batch()) - logits).abs().max() > 1e-2, name
        parameter.copy_(before)
