"""Several sources in given shares, also when the shares change."""

import json
from pathlib import Path

import numpy as np
import pytest
from mds_bytes import flatten, random_shards
from mixtures import open_mix

from ingot.config.data import SourceConfig
from ingot.data.loading.batch_loader import BatchLoader
from ingot.data.loading.mixture import ANNOUNCE_EVERY, BLOCK, SOURCE_SHIFT, Mixture, _Replay, _shares
from ingot.errors import DataError


def by_source(mixture: Mixture, ids: np.ndarray) -> dict[str, np.ndarray]:
    return {name: ids[ids >> SOURCE_SHIFT == k] & ((1 << SOURCE_SHIFT) - 1) for k, name in enumerate(mixture.names)}


def test_each_block_has_exactly_the_shares(tmp_path: Path) -> None:
    mixture = open_mix(tmp_path, web=5, books=3, code=2)
    order = mixture.order(1, True)
    for block in (0, 7, 10**6):
        drawn = by_source(mixture, order.take(np.arange(block * BLOCK, (block + 1) * BLOCK)))
        assert {name: len(ids) for name, ids in drawn.items()} == {"books": 4915, "code": 3277, "web": 8192}


def test_sources_are_mixed_finely(tmp_path: Path) -> None:
    mixture = open_mix(tmp_path, web=1, books=1)
    source = mixture.order(1, True).take(np.arange(BLOCK)) >> SOURCE_SHIFT
    counts = source.reshape(-1, 64).sum(axis=1)
    assert counts.min() > 8 and counts.max() < 56


def test_each_source_is_read_in_its_own_order_epoch_by_epoch(tmp_path: Path) -> None:
    mixture = open_mix(tmp_path, web=2, books=1)
    ids = by_source(mixture, mixture.order(1, True).take(np.arange(3 * BLOCK + 777)))
    for name, samples in ids.items():
        n = mixture._datasets[mixture.names.index(name)].samples
        for epoch in range(len(samples) // n):
            assert sorted(samples[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_without_weights_each_source_counts_by_its_size(tmp_path: Path) -> None:
    mixture = open_mix(tmp_path, web=None, books=None)
    sizes = [d.samples for d in mixture._datasets]
    assert np.allclose(mixture.shares, np.array(sizes) / sum(sizes) * BLOCK, atol=1)
    assert mixture.samples == sum(sizes)


def test_the_fingerprint_is_of_the_sources_whatever_their_shares(tmp_path: Path) -> None:
    """Ranks compare it at the start of a run."""
    fingerprint = open_mix(tmp_path, web=2, books=1).fingerprint()
    assert open_mix(tmp_path, books=5, web=1).fingerprint() == fingerprint
    assert open_mix(tmp_path, web=2, code=1).fingerprint() != fingerprint


def test_the_order_is_a_pure_function_of_the_position(tmp_path: Path) -> None:
    order = open_mix(tmp_path, web=2, books=1).order(1, True)
    whole = order.take(np.arange(2 * BLOCK))
    scattered = np.random.default_rng(0).integers(0, 2 * BLOCK, (5, 40))
    assert (open_mix(tmp_path, books=1, web=2).order(1, True).take(scattered) == whole[scattered]).all()


def test_blocks_that_are_read_again_change_none_of_those_after_them(tmp_path: Path) -> None:
    """As after a rollback, with the greedy rule, which remembers the counts before each block."""
    blocks = [2, 0, 3, 1, 3]
    expected = [_Replay((0.7, 0.3), (0, 0)).block(block) for block in blocks]
    replay = _Replay((0.7, 0.3), (0, 0))
    for block, (sources, before) in zip(blocks, expected, strict=True):
        found = replay.block(block)
        assert (found[0] == sources).all() and (found[1] == before).all()


def test_gathered_samples_are_those_of_the_sources(tmp_path: Path) -> None:
    mixture = open_mix(tmp_path, web=2, books=1)
    batches = BatchLoader(mixture, 8, seed=1, shuffle=True).batches(3)
    batch = next(batches)
    batches.close()
    for sample, tokens, labels in zip(batch.samples, batch.tokens, batch.labels, strict=True):
        name = mixture.names[sample >> SOURCE_SHIFT]
        flat = flatten(random_shards(seed=len(name), shards=4, samples=30 * len(name)))
        place = 4 * (sample & ((1 << SOURCE_SHIFT) - 1))
        window = flat[place : place + 5]
        assert tokens[: len(window)].tolist() == window[:4].tolist()
        assert labels[: len(window) - 1].tolist() == window[1:].tolist()


@pytest.mark.parametrize("position", [0, 1, 1000, BLOCK, 2 * BLOCK + 12_345])
@pytest.mark.parametrize(
    "after",
    [{"web": 1, "books": 3}, {"web": 2, "books": 1, "code": 4}, {"web": 1}, {"another": 1, "web": 1, "books": 1}],
)
def test_changed_shares_repeat_and_skip_no_sample(tmp_path: Path, position: int, after: dict[str, float]) -> None:
    before = open_mix(tmp_path, web=2, books=1)
    first = by_source(before, before.order(1, True).take(np.arange(position)))
    saved = json.loads(json.dumps(before.state(), sort_keys=True))  # through a checkpoint
    mixture = open_mix(tmp_path, **after)
    mixture.resume(saved, position)
    second = by_source(mixture, mixture.order(1, True).take(np.arange(position, position + 3 * BLOCK)))
    for name in after:
        samples = np.concatenate([first.get(name, np.empty(0, np.int64)), second[name]])
        alone = mixture._datasets[mixture.names.index(name)]
        order = Mixture({name: alone}).order(1, True).orders[0]
        assert (samples == order.take(np.arange(len(samples)))).all()  # its own order, without gap or repetition


def test_a_source_that_returns_continues_where_it_was(tmp_path: Path) -> None:
    one = open_mix(tmp_path, web=1, books=1)
    two = open_mix(tmp_path, web=1)
    two.resume(one.state(), 1000)
    three = open_mix(tmp_path, web=1, books=1)
    three.resume(two.state(), 3000)
    assert three.stage.taken["books"] == one.stage.taken_at(1000)["books"]
    assert three.stage.taken["web"] == one.stage.taken_at(1000)["web"] + 2000


def test_unchanged_shares_resume_to_the_very_same_order(tmp_path: Path) -> None:
    one = open_mix(tmp_path, web=2, books=1)
    two = open_mix(tmp_path, web=4, books=2)
    two.resume(json.loads(json.dumps(one.state())), 5000)
    positions = np.arange(5000, 9000)
    assert (one.order(1, True).take(positions) == two.order(1, True).take(positions)).all()


def test_other_data_under_the_name_of_a_source_is_refused(tmp_path: Path) -> None:
    state = open_mix(tmp_path, web=1, books=1).state()
    state["sources"]["books"] = "another"
    with pytest.raises(DataError, match="the training data books has changed since the checkpoint"):
        open_mix(tmp_path, web=1, books=1).resume(state, 5)
    with pytest.raises(DataError, match="was trained on a single dataset, not on a mixture"):
        open_mix(tmp_path, web=1, books=1).resume({"fingerprint": "of a single dataset"}, 5)


def test_tiny_weights_still_get_a_sample(tmp_path: Path) -> None:
    mixture = open_mix(tmp_path, web=1e9, books=1, code=1)
    assert mixture.shares == [1, 1, BLOCK - 2]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "is missing"),
        ({"path": "x", "mix": {"a": {"path": "y"}}}, "inside mix"),
        ({"mix": {"a": {"path": "y", "weight": 1}, "b": {"path": "z"}}}, "with and without"),
        ({"mix": {"a": {"weight": 1}}}, "is missing"),
        ({"mix": {"a": {"path": "y", "weight": 0}}}, "greater than 0"),
    ],
)
def test_an_impossible_mixture_is_refused(source: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SourceConfig(**source)


def test_sources_are_told_where_the_reader_is_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, told = open_mix(tmp_path, web=3, books=1), []
    for name, dataset in zip(mixture.names, mixture._datasets, strict=True):
        monkeypatch.setattr(dataset, "announce", lambda order, position, name=name: told.append((name, position)))
    order = mixture.order(1, True)
    start = 5 * BLOCK
    for position in range(start, start + ANNOUNCE_EVERY, 100):
        mixture.announce(order, position)
    assert sorted(told) == [("books", start // 4), ("web", start // 4 * 3)]  # once
    mixture.announce(order, start + ANNOUNCE_EVERY)
    assert len(told) == 4


def test_every_source_has_a_share_however_small_its_weight() -> None:
    assert _shares([2, 1, 1]) == [BLOCK // 2, BLOCK // 4, BLOCK // 4]
    assert _shares([1, 1e-9, 1e-9]) == [BLOCK - 2, 1, 1]
    assert sum(_shares([1, 1, 1])) == sum(_shares([0.3] * 700)) == BLOCK
    assert _shares([1.0] * BLOCK) == [1] * BLOCK
    with pytest.raises(DataError, match=f"at most {BLOCK} sources"):
        _shares([1.0] * (BLOCK + 1))
