"""Claims about sliding windows, and about the span by which our kernel knows windows and documents."""

import pytest
import torch

from ingot.checkpoint.hf.config import hf_class
from ingot.config.model import ModelConfig
from ingot.errors import CheckpointError
from ingot.model.attention import KVCache, SdpaAttention, causal_bias
from ingot.model.init import build_model
from ingot.model.kernels.fused_attention import choose_attention, visible_span

CPU = torch.device("cpu")


def config(positions: str, window: int | None, layers: int = 1) -> ModelConfig:
    return ModelConfig(
        d_model=32, n_heads=4, n_layers=layers, vocab_size=50, max_seq_len=40, positions=positions,
        sliding_window=window, n_kv_heads=2,
    )  # fmt: skip


@pytest.mark.parametrize("positions", ["learned", "alibi", "rotary", "none"])
@torch.no_grad()
def test_a_token_sees_its_window_and_nothing_before(positions: str) -> None:
    """In one layer, a change is felt by the tokens of the window after it, by no other."""
    model = build_model(config(positions, 7), 1, CPU).eval()
    tokens = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 10] = (tokens[0, 10] + 1) % 50
    felt = (model(tokens) != model(changed)).any(-1)[0]
    assert felt.nonzero().flatten().tolist() == list(range(10, 17))


@pytest.mark.parametrize("positions", ["learned", "alibi", "rotary"])
@torch.no_grad()
def test_a_window_as_long_as_the_sequence_changes_nothing(positions: str) -> None:
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = [build_model(config(positions, window), 1, CPU).eval()(tokens) for window in (None, 40, 1000)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("positions", ["learned", "alibi", "rotary"])
@torch.no_grad()
def test_a_window_and_a_key_value_cache_give_the_logits_of_the_whole_sequence(positions: str) -> None:
    model = build_model(config(positions, 6, layers=3), 1, CPU).eval()
    tokens = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(2))
    cache = KVCache(model.config, 2, 30, CPU, torch.float32)
    parts = [model(part, cache=cache) for part in tokens.split([11, 1, 1, 9, 8], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_a_span_says_what_the_mask_says(window: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    documents = (torch.rand(3, 40, generator=generator) < 0.1).cumsum(1)
    for numbered in (documents, None) if window is not None else (documents,):
        span = visible_span(40, window, numbered, CPU)
        assert span is not None
        at = torch.arange(40)
        seen = causal_bias(None, 40, 40, CPU, window)[:, 0] == 0  # [1, T, S]
        if numbered is not None:
            seen = seen & (numbered[:, :, None] == numbered[:, None, :])
        first, last = span[0], span[1]  # [B or 1, T]
        assert torch.equal(seen, (at[:, None] >= at) & (at >= first[:, :, None]))
        assert torch.equal(seen, (at[:, None] >= at) & (at[:, None] <= last[:, None, :]))
    assert visible_span(40, None, None, CPU) is None


def test_the_kernel_is_chosen_with_its_reason() -> None:
    gpu = torch.device("cuda")
    assert choose_attention(config("learned", None), gpu, "bf16")[0] == "sdpa"
    assert choose_attention(config("alibi", 7), CPU, "bf16") == (
        "sdpa",
        "ALiBi, a sliding window: torch's kernels with a mask; our kernel needs a GPU",
    )


@pytest.mark.parametrize("positions", ["learned", "alibi", "rotary"])
def test_no_hugging_face_class_takes_a_window_silently(positions: str) -> None:
    with pytest.raises(CheckpointError, match=r"sliding_window=7: .* attends to all previous tokens"):
        hf_class(ModelConfig(positions=positions, sliding_window=7))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("new", "total"), [(7, 19), (1, 9), (16, 32), (5, 5)])
def test_the_last_tokens_attend_without_a_stored_mask_as_by_the_formula(new: int, total: int, groups: int) -> None:
    """As context parallelism and a key-value cache need it, forward and backward, compiled or not."""
    torch._dynamo.reset()
    one = config("learned", None).model_copy(update={"n_kv_heads": groups})
    attend = SdpaAttention(one).prepare(new, total, CPU)
    assert not isinstance(attend.bias, torch.Tensor)
    generator = torch.Generator().manual_seed(4)
    shapes = ((2, 4, new, 8), (2, groups, total, 8), (2, groups, total, 8))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes)
    repeated = (t.repeat_interleave(4 // groups, 1) for t in (k, v))
    keys, values = repeated
    scores = q @ keys.mT / 8**0.5 + causal_bias(None, new, total, CPU).double()
    expected = scores.softmax(-1) @ values
    wanted = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    for run in (attend, torch.compile(attend.__call__, backend="aot_eager", fullgraph=True, dynamic=False)):
        found = run(q, k, v, None)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), (q, k, v)), wanted)
