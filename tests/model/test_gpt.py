"""Claims about the model itself, for every family; that it equals the published ones is test_hf_parity's claim."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.config.model import ModelConfig
from ingot.model.attention import KVCache, rotary_tables, rotate
from ingot.model.generate import generate
from ingot.model.gpt import GPT, IGNORE
from ingot.model.init import build_model
from ingot.model.shapes import is_matrix

SMALL = {"d_model": 48, "n_heads": 6, "n_layers": 3, "vocab_size": 130, "max_seq_len": 40}
FAMILIES: dict[str, dict[str, Any]] = {
    "mpt": {"family": "mpt"},
    "mpt-alibi": {"family": "mpt", "positions": "alibi", "no_bias": True},
    "mpt-alibi-multi-query": {"family": "mpt", "positions": "alibi", "n_kv_heads": 1, "qk_ln": True, "clip_qkv": 1.0},
    "mosaic_gpt": {"family": "mosaic_gpt", "norm": "low_precision_layernorm"},
    "gpt3": {"family": "gpt3"},
    "neox": {"family": "neox"},
    "llama-grouped": {"family": "llama", "n_kv_heads": 2},
    "no-positions": {"family": "gpt3", "positions": "none"},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def make(seed: int = 0, loud: bool = True, **values: Any) -> GPT:
    """A small model; `loud` gives it weights that matter and norms and biases off one and zero, so that errors show."""
    model = build_model(ModelConfig.model_validate({**SMALL, **values}), seed, torch.device("cpu")).eval()
    if loud:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else 0.15 * noise)
    return model


def batch(rows: int = 2, length: int = 40) -> Tensor:
    return torch.randint(0, 130, (rows, length), generator=torch.Generator().manual_seed(2))


def gradients(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# --- attention sees the past, all of it, and nothing else ----------------------------------------------------------


@every_family
@torch.no_grad()
def test_a_key_value_cache_computes_the_logits_of_the_whole_sequence(family: str) -> None:
    model, tokens = make(**FAMILIES[family]), batch()
    config = model.config
    cache = KVCache(config, 2, 40, tokens.device, torch.float32)
    pieces = tokens.split([9, 1, 1, 7, 1, 21], dim=1)  # a prompt, single tokens, and chunks after a filled cache
    logits = torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)
    assert cache.length == 40
    torch.testing.assert_close(logits, model(tokens), atol=2e-5, rtol=1e-4)


@every_family
@torch.no_grad()
def test_a_later_token_changes_nothing_before_it(family: str) -> None:
    model, tokens = make(**FAMILIES[family]), batch()
    changed = tokens.clone()
    changed[:, 25] = (changed[:, 25] + 1) % 130
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :25], before[:, :25], atol=1e-6, rtol=1e-6)
    assert ((after - before).abs().amax(dim=(0, 2))[25:] > 1e-4).all()  # and every token from there on sees it


@every_family
@torch.no_grad()
def test_rows_of_a_batch_do_not_mix(family: str) -> None:
    model, tokens = make(**FAMILIES[family]), batch(rows=3)
    torch.testing.assert_close(model(tokens)[1:2], model(tokens[1:2]), atol=2e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "no-positions"])
def test_the_order_of_the_past_matters(family: str) -> None:
    model, tokens = make(**{**FAMILIES[family], "n_layers": 1}), batch()
    swapped = tokens.clone()
    swapped[:, [3, 20]] = tokens[:, [20, 3]]
    assert (model(swapped) - model(tokens))[:, -1].abs().max() > 1e-4


@torch.no_grad()
def test_without_positions_one_layer_sees_the_past_as_a_set() -> None:
    model, tokens = make(**{**FAMILIES["no-positions"], "n_layers": 1}), batch()
    swapped = tokens.clone()
    swapped[:, [3, 20]] = tokens[:, [20, 3]]
    torch.testing.assert_close(model(swapped)[:, -1], model(tokens)[:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rotary_pct", [0.25, 1.0])
def test_rotary_scores_depend_on_the_distance_alone(rotary_pct: float) -> None:
    config = ModelConfig.model_validate({**SMALL, "family": "llama", "rotary_pct": rotary_pct})
    q, k = torch.randn((2, 1, 1, 1, 8), generator=torch.Generator().manual_seed(0))

    def score(query_at: int, key_at: int) -> Tensor:
        turned = [rotate(x, rotary_tables(config, torch.tensor([at]))) for x, at in ((q, query_at), (k, key_at))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(22, 17), score(5, 0), atol=1e-5, rtol=1e-4)
    assert abs(score(6, 0) - score(5, 0)) > 1e-2


# --- the parts that a config switches --------------------------------------------------------------------------------


def test_padded_vocabulary_is_never_predicted() -> None:
    padded = make(family="gpt3", vocab_multiple=64, tie_word_embeddings=False)
    assert padded.wte.weight.shape == padded.head.weight.shape == (192, 48)
    with torch.no_grad():
        padded.head.weight[130:] = 100.0
        padded.wte.weight[130:] = 100.0
    assert padded(batch()).shape == (2, 40, 130)
    assert max(generate(padded, [1, 2, 3], 20, temperature=0)) < 130
    found = gradients(padded, batch())
    assert (found["head.weight"][130:] == 0).all()
    assert (found["wte.weight"][130:] == 0).all()


@torch.no_grad()
def test_padding_leaves_the_loss_alone() -> None:
    plain, padded = make(family="gpt3", vocab_multiple=1), make(family="gpt3", vocab_multiple=64)
    for (name, a), (_, b) in zip(plain.named_parameters(), padded.named_parameters(), strict=True):
        b[: a.shape[0]] = a
        assert a.shape == b.shape or name == "wte.weight"
    tokens = batch()
    torch.testing.assert_close(padded.loss(tokens, tokens), plain.loss(tokens, tokens))


def test_the_loss_is_the_sum_over_labels_that_count() -> None:
    model, tokens = make(family="neox"), batch()
    labels = tokens.roll(-1, dims=1)
    labels[0, 5:] = IGNORE
    picked = model(tokens).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]  # [B, T]
    torch.testing.assert_close(model.loss(tokens, labels), -picked[labels != IGNORE].sum())


@torch.no_grad()
def test_low_precision_layernorm_computes_in_the_autocast_type() -> None:
    low, plain = make(norm="low_precision_layernorm"), make(norm="layernorm")
    tokens = batch()
    assert torch.equal(low(tokens), plain(tokens))  # without autocast they are the same
    x = torch.randn(2, 5, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coarse, fine = low.norm_f(x), plain.norm_f(x)
    assert (coarse.dtype, fine.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(coarse.float(), fine, atol=0.05, rtol=0.02)
    weight, bias = low.norm_f.weight.bfloat16(), low.norm_f.bias.bfloat16()
    assert torch.equal(coarse, torch.nn.functional.layer_norm(x.bfloat16(), (48,), weight, bias, 1e-5))


@torch.no_grad()
def test_qk_ln_makes_scores_independent_of_the_size_of_queries_and_keys() -> None:
    tokens = batch()
    for qk_ln in (True, False):
        model = make(family="mpt", positions="alibi", no_bias=True, qk_ln=qk_ln, norm_eps=1e-12)
        before = model(tokens)
        for block in model.blocks.values():
            rows = block.attn.qkv.weight.view(6, 3, 8, 48)
            rows[:, :2] *= 3  # queries and keys, not values
        difference = (model(tokens) - before).abs().max()
        assert difference < 1e-4 if qk_ln else difference > 1e-2


@torch.no_grad()
def test_qk_ln_normalizes_over_the_whole_width() -> None:
    model = make(family="llama", n_kv_heads=2, qk_ln=True)
    assert model.blocks["0"].attn.q_norm.weight.shape == (48,)
    assert model.blocks["0"].attn.k_norm.weight.shape == (16,)


@torch.no_grad()
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_qk_ln_of_heads_is_megatrons(norm: str) -> None:
    model, tokens = make(family="gpt3", positions="rotary", n_kv_heads=2, qk_ln="heads", norm=norm), batch()
    attention, x = model.blocks["0"].attn, torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(3))
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (8,)
    given: dict[str, Tensor] = {}
    tables = rotary_tables(model.config, torch.arange(40))
    attention(x, tables, lambda q, k, v, dropout: given.update(q=q, k=k) or q)
    mixed = attention.qkv(x).view(2, 40, 2, 5, 8)  # for each group its three queries, its key, its value
    for name, own, part in (("q", attention.q_norm, mixed[..., :3, :]), ("k", attention.k_norm, mixed[..., 3:4, :])):
        centered = part - part.mean(-1, keepdim=True) if norm == "layernorm" else part
        normal = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * own.weight
        normal = normal + own.bias if norm == "layernorm" else normal
        expected = rotate(normal.flatten(2, 3).transpose(1, 2), tables)
        assert torch.allclose(given[name], expected, atol=1e-5)
    assert model(tokens).isfinite().all()


def test_norms_may_keep_their_biases_where_linear_layers_have_none() -> None:
    names = [name for name in make(no_bias=True, norm_bias=True).state_dict() if name.endswith("bias")]
    assert names and all("norm" in name for name in names)
    assert not any("norm" in n for n in make(norm_bias=False).state_dict() if n.endswith("bias"))
    with pytest.raises(ValueError, match="rmsnorm has no bias"):
        ModelConfig(norm="rmsnorm", norm_bias=True)


# --- documents ------------------------------------------------------------------------------------------------------

EOS = 7


def packed(rows: int = 2) -> tuple[Tensor, list[list[slice]]]:
    """Rows of several documents, each of which ends with EOS but the last; one has a single token."""
    tokens = batch(rows)
    tokens[tokens == EOS] = EOS + 1
    ends = [[9, 10, 30], [17, 39]][:rows]
    for row, places in enumerate(ends):
        tokens[row, places] = EOS
    edges = [[0, *(place + 1 for place in places), 40] for places in ends]
    return tokens, [[slice(a, b) for a, b in pairwise(row) if b > a] for row in edges]


@every_family
def test_documents_in_one_sequence_are_as_if_each_stood_alone(family: str) -> None:
    apart = {"eos_token_id": EOS, "document_mask": True, "document_positions": True}
    model, alone = make(**FAMILIES[family], **apart), make(**FAMILIES[family])
    tokens, documents = packed()
    logits = model(tokens)
    for row, slices in enumerate(documents):
        for part in slices:
            assert torch.allclose(logits[row, part], alone(tokens[row : row + 1, part])[0], atol=2e-5)
    labels = torch.roll(tokens, -1, 1)
    for recompute in (None, "full"):
        model.activation_checkpointing = recompute
        model.zero_grad()
        model.train().loss(tokens, labels).backward()
        alone.zero_grad()
        for row, slices in enumerate(documents):
            for part in slices:
                alone.train().loss(tokens[row : row + 1, part], labels[row : row + 1, part]).backward()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(mine.grad, other.grad, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_masks_and_positions_of_documents_are_two_things() -> None:
    tokens, documents = packed()
    third, changed = documents[0][2], tokens.clone()
    changed[0, :9] = tokens[0, :9].flip(0)  # the first document, but for its end
    for mask in (True, False):
        model = make(family="gpt3", eos_token_id=EOS, document_mask=mask)
        assert torch.equal(model(tokens)[0, third], model(changed)[0, third]) is mask
    moved = make(family="gpt3", eos_token_id=EOS, document_positions=True)
    with torch.no_grad():
        moved.wpe.weight[30:] = float("nan")  # no document is that long
    assert moved(tokens).isfinite().all()
    with pytest.raises(ValueError, match="the token that ends a document"):
        ModelConfig(document_mask=True)


@torch.no_grad()
def test_clip_qkv_bounds_the_output_of_attention() -> None:
    tokens = batch()
    model = make(family="mpt", positions="alibi", no_bias=True, clip_qkv=0.25)
    given: list[Tensor] = []
    model.blocks["0"].attn.out.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    model(tokens)
    assert given[0].abs().max() <= 0.25 + 1e-6  # a mean of clipped values
    wide, none = make(clip_qkv=1e6), make(clip_qkv=None)
    assert torch.equal(wide(tokens), none(tokens))


@torch.no_grad()
def test_softmax_scale_replaces_the_default() -> None:
    tokens = batch()
    assert torch.equal(make(softmax_scale=1 / math.sqrt(8))(tokens), make()(tokens))
    assert (make(softmax_scale=0.5)(tokens) - make()(tokens)).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values(kv_heads: int) -> None:
    grouped = make(family="llama", n_kv_heads=kv_heads)
    full = make(family="llama")
    for name, parameter in full.named_parameters():
        source = grouped.get_parameter(name)
        if name.endswith("qkv.weight"):
            rows = source.view(kv_heads, 6 // kv_heads + 2, 8, 48)  # [G, queries + key + value, D, d]
            q, kv = rows[:, :-2].reshape(6, 1, 8, 48), rows[:, -2:].repeat_interleave(6 // kv_heads, dim=0)
            source = torch.cat([q, kv], dim=1).reshape(-1, 48)
        parameter.copy_(source)
    torch.testing.assert_close(grouped(batch()), full(batch()), atol=1e-5, rtol=1e-5)


# --- initial weights -------------------------------------------------------------------------------------------------

D, LAYERS, FFN = 256, 8, 1024


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"init": "kaiming_normal", "residual_init": "scaled"}, {
            "wte.weight": math.sqrt(2 / D), "attn.qkv.weight": math.sqrt(2 / D), "mlp.up.weight": math.sqrt(2 / D),
            "attn.out.weight": math.sqrt(2 / D) / 4, "mlp.down.weight": math.sqrt(2 / FFN) / 4}),
        ({"init": "normal", "init_std": 0.05, "residual_init": "scaled"}, {
            "wte.weight": 0.05, "wpe.weight": 0.05, "attn.qkv.weight": 0.05, "mlp.up.weight": 0.05,
            "attn.out.weight": 0.0125, "mlp.down.weight": 0.0125}),
        ({"init": "normal", "residual_init": "same"}, {"attn.out.weight": 0.02, "mlp.down.weight": 0.02}),
        ({"init": "small", "residual_init": "wang", "tie_word_embeddings": False}, {
            "wte.weight": math.sqrt(2 / (5 * D)), "head.weight": math.sqrt(2 / (5 * D)),
            "mlp.up.weight": math.sqrt(2 / (5 * D)),
            "attn.out.weight": 2 / (LAYERS * math.sqrt(D)), "mlp.down.weight": 2 / (LAYERS * math.sqrt(D))}),
    ],
)  # fmt: skip
def test_initial_weights_have_the_spread_of_their_scheme(values: dict[str, Any], expected: dict[str, float]) -> None:
    model = make(loud=False, d_model=D, n_heads=4, n_layers=LAYERS, vocab_size=400, max_seq_len=128, **values)
    parameters = dict(model.named_parameters())
    for name, std in expected.items():
        weight = parameters[name] if name in parameters else parameters[f"blocks.5.{name}"]
        assert weight.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(weight.mean().item()) < 0.03 * std, name
    assert all((p == 0).all() for name, p in parameters.items() if name.endswith(".bias"))
    assert all((p == 1).all() for name, p in parameters.items() if "norm" in name and name.endswith(".weight"))


def test_a_weight_does_not_depend_on_the_others() -> None:
    """Fewer layers, another vocabulary, an extra table: what two models share starts out the same."""
    one = dict(make(loud=False, family="gpt3", init="normal", residual_init="same").named_parameters())
    other = dict(
        make(
            loud=False, family="neox", init="normal", residual_init="same", n_layers=1, vocab_size=90
        ).named_parameters()
    )
    shared = {name for name in one.keys() & other.keys() if one[name].shape == other[name].shape}
    assert {"blocks.0.attn.qkv.weight", "blocks.0.mlp.down.weight"} <= shared
    assert all(torch.equal(one[name], other[name]) for name in shared)


def test_each_seed_and_each_parameter_draws_its_own_weights() -> None:
    one, again, other = (make(seed=seed, loud=False, init="normal", residual_init="same") for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert all(
        not torch.equal(a, b)
        for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True)
        if is_matrix(name, a)
    )
    assert not torch.equal(one.blocks["0"].attn.qkv.weight, one.blocks["1"].attn.qkv.weight)


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["emb_pdrop", "resid_pdrop", "attn_pdrop"])
def test_dropout_acts_in_training_only(kind: str) -> None:
    model, tokens = make(**{kind: 0.5}), batch()
    with torch.no_grad():
        assert torch.equal(model(tokens), make()(tokens))
        model.train()
        torch.manual_seed(0)
        first, second = model(tokens), model(tokens)
        assert (first - second).abs().max() > 1e-3
        torch.manual_seed(0)
        assert torch.equal(model(tokens), first)


@every_family
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputed_blocks_give_the_same_gradients(family: str, dropout: float) -> None:
    model, tokens = make(**FAMILIES[family], resid_pdrop=dropout, attn_pdrop=dropout).train(), batch()
    torch.manual_seed(0)
    kept = gradients(model, tokens)
    model.activation_checkpointing = "full"
    torch.manual_seed(0)
    recomputed = gradients(model, tokens)
    assert kept.keys() == recomputed.keys() == dict(model.named_parameters()).keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_blocks_are_recomputed_when_asked() -> None:
    model, tokens = make().train(), batch()
    model.activation_checkpointing = "full"
    calls: list[torch.nn.Module] = []
    model.blocks["0"].attn.register_forward_pre_hook(lambda module, _: calls.append(module))
    gradients(model, tokens)
    assert len(calls) == 2


# --- counting --------------------------------------------------------------------------------------------------------


@every_family
def test_counting_parameters_builds_no_model_and_is_exact(family: str) -> None:
    model = make(**FAMILIES[family])
    assert model.config.parameters == sum(p.numel() for p in model.parameters())


def test_flops_follow_the_published_formula() -> None:
    """6 N + 12 L d S; the embedding counts when it is also the head, and half the attention when causal."""
    tied, untied = (ModelConfig.model_validate({**SMALL, "tie_word_embeddings": t}) for t in (True, False))
    n = tied.parameters
    assert tied.flops_per_token(40) == untied.flops_per_token(40) == 6 * n + 12 * 3 * 48 * 40
    assert tied.flops_per_token(40, causal=True) == 6 * n + 6 * 3 * 48 * 40
