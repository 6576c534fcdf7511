"""A GPU or a shape that kernels do not support: the reference path with its reason, or a refusal. Never wrong numbers.

No card of these kinds is here, so what torch says of a card is replaced; the decisions and the reference path are real.
"""

import pytest
import torch

from ingot.config.load import load_config
from ingot.config.model import ModelConfig
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.model.init import build_model
from ingot.model.kernels import attach, conditions, use_fp8
from ingot.model.kernels.bf16_weights import Bf16Linear
from ingot.model.kernels.conditions import why_no_triton
from ingot.model.kernels.fp8.linear import Fp8Linear
from ingot.model.kernels.fused_attention import choose_attention
from ingot.parallel.executors.device import check_precision, choose_compile, describe_capability
from ingot.parallel.layout import Layout

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_answers():
    why_no_triton.cache_clear()
    before = torch.are_deterministic_algorithms_enabled()  # by a run in the same process
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)
    why_no_triton.cache_clear()


def a_card(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(conditions, "TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_on_a_card_too_old_for_triton_attention_and_compile_say_why_they_take_plain_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a_card(monkeypatch, "Tesla V100", (7, 0))
    why = "Triton's kernels need compute capability 8.0 (Ampere) or later, Tesla V100 has 7.0"
    config = load_config(RunConfig, ["mpt-125m", "model.positions=alibi", "data=x"])
    assert choose_attention(config.model, GPU, "fp16") == (
        "sdpa", f"ALiBi: torch's kernels with a mask, not our kernel: {why}"
    )  # fmt: skip
    assert choose_compile(config, GPU, Layout()) == (False, f"off ({why})")
    assert describe_capability(GPU) == "cuda 7.0"


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp16", "fp32"])
def test_bf16_on_a_card_without_it_is_refused_with_what_works(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(RunConfig, ["mpt-125m", f"precision={precision}", "data=x"])
    check_precision(config, CPU)
    a_card(monkeypatch, "NVIDIA A100", (8, 0))
    check_precision(config, GPU)
    a_card(monkeypatch, "Tesla T4", (7, 5))
    if precision.startswith("fp") and precision != "fp8":
        check_precision(config, GPU)
        return
    with pytest.raises(ConfigError, match=f"precision={precision} needs .* Tesla T4 has 7.5; use precision=fp16 or"):
        check_precision(config, GPU)


def small_model(**more: object):
    config = ModelConfig(d_model=48, n_heads=4, n_layers=2, vocab_size=101, max_seq_len=19, **more)  # type: ignore[arg-type]
    return build_model(config, 1, CPU)


def loss(model, precision: torch.dtype = torch.bfloat16) -> float:
    tokens = torch.randint(0, 101, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", precision):
        return float(model.loss(tokens[:, :-1], tokens[:, 1:]).detach()) / 57


def test_a_kernel_that_a_driver_cannot_load_leaves_the_reference_and_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here the trial fails because there is no GPU behind the device; what fails on an old driver is the same call."""
    a_card(monkeypatch, "NVIDIA H200", (9, 0))
    model, plain = small_model(positions="alibi"), small_model(positions="alibi")
    notes = attach(model, device=GPU, precision="bf16")
    attach(plain, device=CPU, precision="bf16")
    assert any(note.startswith("plain torch instead of our kernels: Triton reports ") for note in notes), notes
    assert any(note.startswith("attention: sdpa (ALiBi: ") and "Triton reports" in note for note in notes), notes
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert loss(model) == loss(plain)


def test_8_bits_on_a_card_without_them_are_bf16_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    a_card(monkeypatch, "NVIDIA A100", (8, 0))
    model = small_model()
    notes = attach(model, device=GPU, precision="fp8")
    assert "bf16 instead of fp8: NVIDIA A100 has no 8-bit matrix products (Ada, Hopper and later have)" in notes
    assert not any(isinstance(layer, Fp8Linear) for layer in model.modules())


def test_layers_whose_shape_has_no_8_bit_product_stay_in_bf16_and_odd_lengths_are_padded() -> None:
    """48 features are a multiple of 16, 51 of a hidden layer are not; 57 tokens are not either."""
    model, exact = small_model(ffn_hidden_size=51), small_model(ffn_hidden_size=51)
    assert use_fp8(model.blocks) == 4  # two of attention in each block
    attach(model, device=CPU, precision="bf16")
    mlp, attention = model.blocks["0"].mlp, model.blocks["0"].attn
    assert type(mlp.up) is type(mlp.down) is Bf16Linear and type(attention.qkv) is type(attention.out) is Fp8Linear
    assert loss(model) == pytest.approx(loss(exact), rel=5e-3)


@pytest.mark.parametrize(
    ("width", "kernel"), [(8, "triton"), (33, "triton"), (128, "triton"), (129, "sdpa"), (256, "sdpa")]
)
def test_heads_wider_than_a_kernel_takes_go_to_torch(width: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.model.kernels.fused_attention.why_no_triton", lambda device: None)
    config = ModelConfig(d_model=2 * width, n_heads=2, n_layers=1, vocab_size=50, max_seq_len=8, positions="alibi")
    found, why = choose_attention(config, GPU, "bf16")
    assert found == kernel and ("takes heads of up to 128" in why) == (kernel == "sdpa")
