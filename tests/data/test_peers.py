"""Splits and blends are those of Megatron and GPT-NeoX. Their functions are restated here from their sources."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from mds_bytes import random_shards, write_mds
from mixtures import open_mix
from test_indexed import FIXTURE, write_pair

from ingot.config.data import DocumentsConfig, SourceConfig
from ingot.data.formats.indexed_reader import split_edges
from ingot.data.loading.mixture import BLOCK, SOURCE_SHIFT, Mixture
from ingot.data.loading.open_dataset import open_dataset
from ingot.errors import DataError

GREEDY = {"mix_order": "greedy"}


def megatron_split(split: str, size: int) -> list[tuple[int, int]]:
    shares = [float(number) for number in re.findall(r"[.0-9]+", split)]
    shares += [0.0] * (3 - len(shares))
    shares = (np.array(shares) / np.sum(np.array(shares))).tolist()
    edges = [0.0]
    for share in shares:
        edges.append(edges[-1] + share)
    return [(round(low * float(size)), round(high * float(size))) for low, high in itertools.pairwise(edges)]


def neox_split(split: str, size: int) -> list[tuple[int, int]]:
    separator = "," if "," in split else "/"
    shares = [float(number) for number in split.split(separator)]
    shares = [*shares, 0.0, 0.0][:3]
    total = 0.0
    for share in shares:
        total += share
    index = [0]
    for i, share in enumerate(shares):
        index.append(index[i] + round(share / total * float(size)))
    excess = index[-1] - size
    for i in range(1, 4):
        index[i] -= excess
    return list(itertools.pairwise(index))


@pytest.mark.parametrize(
    "split", ["969, 30, 1", "949,50,1", "995,4,1", "90,5,5", "8/1/1", "1", "98,2", "0.7,.2,0.1", "1,1,1"]
)
@pytest.mark.parametrize(("rule", "restated"), [("megatron", megatron_split), ("neox", neox_split)])
def test_documents_are_split_by_the_peers_rounding(split: str, rule: str, restated) -> None:  # type: ignore[no-untyped-def]
    for size in [*range(1, 400), 1000, 12_345, 210_607_728]:
        edges = split_edges(split, size, rule)
        assert list(itertools.pairwise(edges)) == restated(split, size), size


@pytest.mark.parametrize(
    ("split", "size", "megatron", "neox"),
    [
        ("969,30,1", 1000, [0, 969, 999, 1000], [0, 969, 999, 1000]),
        ("969,30,1", 12_345, [0, 11962, 12333, 12345], [0, 11963, 12333, 12345]),
        ("90,5,5", 33, [0, 30, 31, 33], [0, 29, 31, 33]),
        ("995,4,1", 7, [0, 7, 7, 7], [0, 7, 7, 7]),
    ],
)
def test_document_splits_have_the_edges_computed_by_hand(
    split: str, size: int, megatron: list[int], neox: list[int]
) -> None:
    assert (split_edges(split, size, "megatron"), split_edges(split, size, "neox")) == (megatron, neox)


def part(prefix: Path, split: str, name: str) -> dict:
    return {"path": str(prefix), "documents": {"split": split, "part": name}}


def test_the_parts_of_one_file_hold_their_documents_and_no_others(tmp_path: Path) -> None:
    documents = [[[100 * d + i for i in range(3 + 7 * d % 11)]] for d in range(20)]
    prefix = write_pair(tmp_path / "x", documents)
    flat = [[t for [s] in documents[low:high] for t in s] for low, high in ((0, 14), (14, 18), (18, 20))]
    for name, expected in zip(("train", "valid", "test"), flat, strict=True):
        dataset = open_dataset(SourceConfig(**part(prefix, "7,2,1", name)), 5)
        tokens, labels = dataset.gather(np.arange(dataset.samples))
        assert dataset.tokens == len(expected)
        assert [*tokens[0, :1], *labels[labels != -100]] == expected
    train, valid = (open_dataset(SourceConfig(**part(prefix, "7,2,1", name)), 5) for name in ("train", "valid"))
    assert train.fingerprint() != valid.fingerprint()


def test_a_part_of_remote_data_is_what_it_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ingot.data.loading.open_dataset.CHUNK_BYTES", 64
    )  # so that the part begins and ends within chunks
    prefix = write_pair(tmp_path / "far/x", [[[100 * d + i for i in range(11)]] for d in range(30)])
    here = open_dataset(SourceConfig(**part(prefix, "3,5,2", "valid")), 7)
    there = open_dataset(SourceConfig(**part(tmp_path / "cache", "3,5,2", "valid"), remote=str(tmp_path / "far")), 7)
    ids = np.arange(here.samples)
    there.announce(there.order(1, False), 0)
    assert all((a == b).all() for a, b in zip(here.gather(ids), there.gather(ids), strict=True))


@pytest.mark.skipif(not FIXTURE.is_dir(), reason="the reference files are not here")
def test_a_real_corpus_is_split_as_its_makers_would() -> None:
    prefix = next(FIXTURE.rglob("*text_document.idx")).with_suffix("")
    sizes = [open_dataset(SourceConfig(**part(prefix, "969,30,1", p)), 128).tokens for p in ("train", "valid", "test")]
    assert sum(sizes) == open_dataset(SourceConfig(path=str(prefix)), 128).tokens and min(sizes) > 0


def test_impossible_parts_are_refused(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[[1, 2, 3]]] * 5)
    with pytest.raises(DataError, match="none of its 5 documents is test by 969,30,1"):
        open_dataset(SourceConfig(**part(prefix, "969,30,1", "test")), 4)
    write_mds(tmp_path / "mds", random_shards())
    with pytest.raises(DataError, match=r"is MDS.*needs \.bin and \.idx"):
        open_dataset(SourceConfig(**part(tmp_path / "mds", "969,30,1", "train")), 4)
    for split in ("", "a,b", "1,2,3,4", "0,0,0", "1.2.3", "1,,2"):
        with pytest.raises(ValueError, match="write up to three shares"):
            DocumentsConfig(split=split, part="train")


def test_what_follows_the_end_of_a_document_has_no_label_as_with_eod_mask_loss(tmp_path: Path) -> None:
    documents = [[[*range(1, 2 + d % 7), 0]] for d in range(30)]  # each ends with 0
    source = SourceConfig(path=str(write_pair(tmp_path / "x", documents)))
    whole, masked = open_dataset(source, 8), open_dataset(source, 8, no_loss_after_token=0)
    ids = np.arange(whole.samples)
    (tokens, labels), (same, scored) = whole.gather(ids), masked.gather(ids)
    loss_mask = tokens != 0  # Megatron: loss_mask[data == eod_token] = 0.0
    assert (tokens == same).all() and (scored == np.where(loss_mask, labels, -100)).all()
    assert (labels[~loss_mask] > 0).any()  # there was something to leave out
    assert whole.fingerprint() == masked.fingerprint()
    mix = SourceConfig(mix={"a": source.model_dump(include={"path"})})
    assert (open_dataset(mix, 8, no_loss_after_token=0).gather(ids)[1] == scored).all()


def peers_blend(weights: list[float], size: int) -> np.ndarray:
    """`build_blending_indices`."""
    normal = np.array(weights, np.float64)
    normal = normal / np.sum(normal)
    normal = normal / np.sum(normal)
    taken, chosen = np.zeros(len(weights)), np.empty(size, np.int64)
    for i in range(size):
        errors = normal * max(float(i), 1.0) - taken
        chosen[i] = np.argmax(errors)
        taken[chosen[i]] += 1
    return chosen


@pytest.mark.parametrize(
    "weights",
    [{"web": 0.3, "books": 0.7}, {"web": 1, "books": 1, "code": 1}, {"z": 0.05, "web": 5, "a": 2, "books": 2}],
)
def test_each_sample_comes_from_the_source_that_the_peers_take_it_from(tmp_path: Path, weights: dict) -> None:
    mixture, size = open_mix(tmp_path, GREEDY, **weights), 2 * BLOCK + 777
    ids = mixture.order(1, True).take(np.arange(size))
    chosen = peers_blend(list(weights.values()), size)
    assert (ids >> SOURCE_SHIFT == chosen).all()
    for k, name in enumerate(weights):  # and each source gives its samples in its own order
        samples = ids[chosen == k] & ((1 << SOURCE_SHIFT) - 1)
        assert (samples == mixture.order(1, True).orders[k].take(np.arange(len(samples)))).all()
        share = weights[name] / sum(weights.values())
        assert len(samples) <= math.ceil(math.ceil(size * share) * 1.005)  # what peers set aside is enough
    assert mixture.taken(size) == dict(zip(weights, np.bincount(chosen).tolist(), strict=True))


def test_without_weights_whole_samples_count(tmp_path: Path) -> None:
    mixture = open_mix(tmp_path, GREEDY, web=None, books=None)
    sizes = [(d.tokens - 1) // 4 for d in mixture._datasets]
    chosen = mixture.order(1, True).take(np.arange(sum(sizes))) >> SOURCE_SHIFT
    assert (chosen == peers_blend(sizes, sum(sizes))).all() and np.bincount(chosen).tolist() == sizes


def test_any_position_of_a_blend_may_be_asked_for_first(tmp_path: Path) -> None:
    whole = open_mix(tmp_path, GREEDY, web=2, books=1).order(1, True).take(np.arange(3 * BLOCK))
    scattered = np.random.default_rng(0).integers(0, 3 * BLOCK, (5, 40))
    assert (open_mix(tmp_path, GREEDY, web=2, books=1).order(1, True).take(scattered) == whole[scattered]).all()


@pytest.mark.parametrize("position", [0, 1, 1000, BLOCK, 2 * BLOCK + 12_345])
def test_a_blend_resumes_from_the_counts_of_its_checkpoint(tmp_path: Path, position: int) -> None:
    one, two = open_mix(tmp_path, GREEDY, web=2, books=1), open_mix(tmp_path, GREEDY, web=4, books=2)
    two.resume(json.loads(json.dumps(one.state(position), sort_keys=True)), position)
    assert two.stage.start == position  # so that nothing before it is replayed
    later = np.arange(position, position + BLOCK + 99)
    assert (one.order(1, True).take(later) == two.order(1, True).take(later)).all()
    again = open_mix(tmp_path, GREEDY, web=2, books=1)
    again.resume(two.state(position + 77), position + 77)
    assert (again.order(1, True).take(later[77:]) == one.order(1, True).take(later[77:])).all()


@pytest.mark.parametrize("after", [{"web": 1, "books": 3}, {"web": 2, "code": 4, "books": 1}, {"web": 1}])
@pytest.mark.parametrize("rules", [("greedy", "greedy"), ("greedy", "drawn"), ("drawn", "greedy")])
def test_changed_weights_and_rules_repeat_and_skip_no_sample(
    tmp_path: Path, after: dict, rules: tuple[str, str]
) -> None:
    def opened(weights: dict, rule: str) -> Mixture:
        mixture = open_mix(tmp_path, GREEDY, **weights)
        return Mixture(dict(zip(mixture.names, mixture._datasets, strict=True)), weights, rule)

    position = BLOCK + 321
    before = opened({"web": 2, "books": 1}, rules[0])
    mixture = opened(after, rules[1])
    mixture.resume(json.loads(json.dumps(before.state(position))), position)
    assert mixture.stage.taken == dict.fromkeys(after, 0) | before.taken(position)
    ids = mixture.order(1, True).take(np.arange(position, position + 2000))
    for k, name in enumerate(mixture.names):
        first = before.taken(position).get(name, 0)
        samples = ids[ids >> SOURCE_SHIFT == k] & ((1 << SOURCE_SHIFT) - 1)
        order = mixture.order(1, True).orders[k]
        assert (samples == order.take(np.arange(first, first + len(samples)))).all()
