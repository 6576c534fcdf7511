"""Dropout masks: the rate, no correlation between any two, and a part of a mask is the same part of the whole."""

import pytest
import torch
from torch import Tensor

from ingot.model.dropout import attention_keys, dropout, fold_in, kept, model_keys, sequence_keys, threshold

CPU = torch.device("cpu")
MASK_64, MASK_32 = 2**64 - 1, 2**32 - 1


def mask(keys: Tensor, width: int, p: float = 0.1) -> Tensor:
    """1 where an element is dropped."""
    return (dropout(torch.ones(*keys.shape, width), keys, p) == 0).double()


def test_the_hash_is_the_published_arithmetic_on_unsigned_integers() -> None:
    """In exact integers; torch's wrap around, which C++ leaves open for signed ones."""

    def splitmix(key: int, index: int) -> int:
        x = (key + (index + 1) * 0x9E3779B97F4A7C15) & MASK_64
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK_64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK_64
        return x ^ x >> 31

    def hashed(key: int, column: int) -> int:
        x = (column * 0x9E3779B9 + key) & MASK_32
        x = ((x ^ x >> 16) * 0x21F0AAAD) & MASK_32
        x = ((x ^ x >> 15 ^ key >> 32) * 0x735A2D97) & MASK_32
        return x if x < 2**31 else x - 2**32

    keys = fold_in(sequence_keys(7, 3, 0, 5, CPU), torch.arange(-1, 40))
    columns = torch.arange(70, dtype=torch.int32)
    stay = kept(keys, columns, 0.3)
    for row, key in enumerate(sequence_keys(7, 3, 0, 5, CPU).tolist()):
        for index in range(-1, 40):
            folded = splitmix(key & MASK_64, index)
            assert folded == int(keys[row, index + 1]) & MASK_64
            assert stay[row, index + 1].tolist() == [hashed(folded, column) >= threshold(0.3) for column in range(70)]
    x = hashed(int(keys[0, 0]) & MASK_64, 9)
    for above, expected in ((0, True), (1, False)):  # the threshold itself belongs to what stays
        p = (x + above) / 2**32 + 0.5
        assert threshold(p) == x + above and bool(kept(keys[0, 0], columns, p)[9]) == expected


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_rate_is_exact_in_every_row_and_column_and_the_rest_is_scaled(p: float) -> None:
    rows, width = 4096, 2048
    keys = fold_in(sequence_keys(1, 0, 0, 1, CPU)[0], torch.arange(rows))
    dropped = mask(keys, width, p)
    sigma = (p * (1 - p)) ** 0.5
    assert abs(float(dropped.mean()) - p) < 5 * sigma / (rows * width) ** 0.5
    for side, count in ((0, rows), (1, width)):  # spread over lines as independent draws would be
        scores = (dropped.mean(side) - p) / (sigma / count**0.5)
        assert scores.abs().max() < 6 and float(scores.square().mean()) == pytest.approx(1, abs=0.15)
    assert set(dropout(torch.ones(9, 64), keys[:9], 0.5).unique().tolist()) == {0.0, 2.0}


def test_masks_of_different_seeds_steps_samples_sites_tokens_and_heads_are_independent() -> None:
    tokens, width = torch.arange(64), 512
    base = {"seed": 1, "step": 0, "first": 0, "count": 2, "device": CPU}
    masks = []
    for change in ({}, {"seed": 2}, {"step": 1}, {"first": 2}):
        sequences = sequence_keys(**{**base, **change})  # type: ignore[arg-type]
        keys = model_keys(sequences, range(2), tokens)
        for rows in (keys.embedding, *(k for b in keys.blocks for k in (b.attn_out, b.mlp_out))):
            masks += list(mask(rows, width))  # of each sample
        masks += [mask(attention_keys(b.attention, 0, 2, 0, 64), width)[0, h] for b in keys.blocks for h in (0, 1)]
    moved = [masks[0].roll(1, 0), masks[0].roll(1, 1), masks[0].roll(16, 1)]  # its own other tokens and features
    flat = torch.stack([*masks, *moved]).flatten(1)
    flat = (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)
    correlation = flat @ flat.t() / flat.shape[1]  # of independent masks: normal with deviation 1 / sqrt(n)
    scores = correlation.fill_diagonal_(0) * flat.shape[1] ** 0.5
    assert scores.abs().max() < 5.5 and len(scores) == 59
    pairs = scores[*torch.triu_indices(len(scores), len(scores), 1)]
    assert float(pairs.square().mean()) == pytest.approx(1, abs=0.15)


def test_neighboring_elements_are_dropped_together_as_often_as_chance_has_it() -> None:
    """Counts of all 256 patterns of eight neighbors, along features and along tokens, by a chi-squared test."""
    keys = fold_in(sequence_keys(5, 9, 0, 1, CPU)[0], torch.arange(2048))
    dropped = mask(keys, 2048, 0.5).long()
    for bits in (dropped, dropped.t()):
        patterns = (bits.reshape(-1, 8) << torch.arange(8)).sum(1)
        counts = torch.bincount(patterns, minlength=256).double()
        expected = len(patterns) / 256
        chi = float(((counts - expected) ** 2 / expected).sum())  # mean 255, deviation 22.6
        assert 150 < chi < 380


def test_a_part_of_the_tokens_heads_or_layers_has_that_part_of_the_masks() -> None:
    sequences = sequence_keys(1, 2, 8, 4, CPU)
    assert torch.equal(sequences[1:3], sequence_keys(1, 2, 9, 2, CPU))
    whole = model_keys(sequences, range(6), torch.arange(32))
    part = model_keys(sequences[1:3], range(2, 5), torch.arange(8, 16))
    for layer in range(3):
        for name in ("attn_out", "mlp_out"):
            expected = getattr(whole.blocks[layer + 2], name)[1:3, 8:16]
            assert torch.equal(getattr(part.blocks[layer], name), expected)
        heads = attention_keys(whole.blocks[layer + 2].attention, 0, 6, 0, 32)[1:3, 2:4, 8:16]
        assert torch.equal(attention_keys(part.blocks[layer].attention, 2, 2, 8, 8), heads)
    assert torch.equal(model_keys(sequences, range(1), torch.arange(32)).embedding, whole.embedding)


@pytest.mark.slow
def test_compiled_dropout_has_the_same_bits() -> None:
    keys, x = model_keys(sequence_keys(1, 0, 0, 2, CPU), range(1), torch.arange(33)).embedding, torch.randn(2, 33, 65)
    assert torch.equal(torch.compile(dropout)(x, keys, 0.1), dropout(x, keys, 0.1))
