"""Sampling draws from exactly the tokens that it should."""

import subprocess
import sys
from collections import Counter

import pytest
import torch

from ingot.config.model import ModelConfig
from ingot.errors import IngotError
from ingot.model.generate import generate, sample
from ingot.model.init import build_model
from ingot.model.kernels.conditions import TRITON

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.15, 0.1]))


def drawn(**options: float) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    return Counter(sample(LOGITS, generator=generator, **settings) for _ in range(2000))  # type: ignore[arg-type]


def test_without_limits_every_token_comes_as_often_as_its_probability() -> None:
    counts = drawn()
    for token, probability in enumerate([0.05, 0.4, 0.3, 0.15, 0.1]):
        assert counts[token] / 2000 == pytest.approx(probability, abs=0.035)


def test_temperature_zero_takes_the_most_likely() -> None:
    assert drawn(temperature=0.0).keys() == {1}


def test_low_temperature_sharpens() -> None:
    assert drawn(temperature=0.25)[1] / 2000 == pytest.approx(
        0.4**4 / (0.4**4 + 0.3**4 + 0.15**4 + 0.1**4 + 0.05**4), abs=0.04
    )


def test_top_k_keeps_the_k_most_likely() -> None:
    counts = drawn(top_k=2)
    assert counts.keys() == {1, 2}
    assert counts[1] / 2000 == pytest.approx(0.4 / 0.7, abs=0.04)


@pytest.mark.parametrize(("top_p", "tokens"), [(0.35, {1}), (0.45, {1, 2}), (0.8, {1, 2, 3}), (0.9, {1, 2, 3, 4})])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p: float, tokens: set[int]) -> None:
    assert drawn(top_p=top_p).keys() == tokens


@pytest.mark.parametrize("positions", ["learned", "alibi", "rotary", "none"])
def test_greedy_generation_is_what_the_whole_model_says_token_by_token(positions: str) -> None:
    config = ModelConfig.model_validate(
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 50, "max_seq_len": 40, "positions": positions}
    )
    model = build_model(config, 3, torch.device("cpu"))
    tokens = [7, 3, 9]
    for token in generate(model, tokens, 12, temperature=0):
        with torch.no_grad():
            assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens = [*tokens, token]
    assert len(tokens) == 15


def test_generation_stops_at_the_end_token_and_at_the_last_position() -> None:
    config = ModelConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=9, max_seq_len=10)
    model = build_model(config, 3, torch.device("cpu"))
    free = list(generate(model, [1, 2], 50, seed=4))
    assert len(free) == 8  # ten learned positions, two of them the prompt's
    stop = free[3]
    assert list(generate(model, [1, 2], 50, seed=4, stop=stop)) == free[: free.index(stop)]


def test_prompts_that_cannot_be_continued_are_refused() -> None:
    config = ModelConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=9, max_seq_len=10)
    model = build_model(config, 3, torch.device("cpu"))
    with pytest.raises(IngotError, match="the prompt is empty"):
        next(generate(model, [], 5))
    with pytest.raises(IngotError, match="positions end at 10"):
        next(generate(model, [1] * 10, 5))


@pytest.mark.skipif(TRITON, reason="where there is Triton, the kernel of the loss brings the compiler along")
def test_generating_does_not_wait_for_the_compiler_to_be_imported() -> None:
    program = """
import sys, torch
from ingot.config.model import ModelConfig
from ingot.model.generate import generate
from ingot.model.init import build_model
model = build_model(ModelConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=32), 0, torch.device("cpu"))
assert len(list(generate(model, [1, 2], 3))) == 3
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
