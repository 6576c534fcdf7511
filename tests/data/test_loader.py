"""Batches: the same for any number of ranks, from any batch on, prepared by a thread that comes and goes quietly."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mds_bytes import flatten, random_shards, write_mds

from ingot.config.data import SourceConfig
from ingot.data.loading.batch_loader import BatchLoader
from ingot.data.loading.open_dataset import open_dataset
from ingot.data.loading.token_dataset import Dataset
from ingot.errors import DataError


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return open_dataset(SourceConfig(path=str(write_mds(tmp_path / "data", random_shards(shards=5)))), 4)


def loader_threads() -> int:
    return sum(thread.name == "ingot-loader" for thread in threading.enumerate())


def take(loader: BatchLoader, count: int, start: int = 0) -> list:
    batches = loader.batches(start)
    taken = [next(batches) for _ in range(count)]
    batches.close()
    return taken


def test_a_batch_is_the_samples_it_names(dataset: Dataset) -> None:
    for batch in take(BatchLoader(dataset, 6, seed=1, shuffle=True), 50):
        tokens, labels = dataset.gather(batch.samples)
        assert (batch.tokens == tokens).all() and (batch.labels == labels).all()


def test_epochs_follow_each_other_without_losing_a_sample(dataset: Dataset) -> None:
    n = dataset.samples
    ids = np.concatenate([b.samples for b in take(BatchLoader(dataset, 7, seed=1, shuffle=True), 3 * n // 7 + 1)])
    for epoch in ids[: 3 * n].reshape(3, n):
        assert sorted(epoch) == list(range(n))


def test_any_number_of_ranks_gets_the_same_global_batches(dataset: Dataset) -> None:
    """Random shapes: ranks, batch, microbatches and places to resume; the ids of each global batch never change."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        ranks = int(rng.integers(1, 65))
        batch_samples = ranks * int(rng.integers(1, 5))
        seed, start = int(rng.integers(0, 2**31)), int(rng.integers(0, 10**9))
        whole = BatchLoader(dataset, batch_samples, seed=seed, shuffle=True).ids(start, 4)
        per_rank = batch_samples // ranks
        parts = [(r * per_rank, (r + 1) * per_rank) for r in range(ranks)]
        loaders = [BatchLoader(dataset, batch_samples, seed=seed, shuffle=True, part=part) for part in parts]
        assert (np.concatenate([loader.ids(start, 4) for loader in loaders], axis=1) == whole).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_a_run_resumed_on_other_ranks_continues_reading_where_it_stopped(dataset: Dataset, ranks: int) -> None:
    whole = [batch.samples for batch in take(BatchLoader(dataset, 12, seed=3, shuffle=True), 20)]
    size = 12 // ranks
    for start in (0, 1, 7, 19):
        got = [
            take(BatchLoader(dataset, 12, seed=3, shuffle=True, part=(r * size, (r + 1) * size)), 20 - start, start)
            for r in range(ranks)
        ]
        for b in range(20 - start):
            assert (np.concatenate([got[r][b].samples for r in range(ranks)]) == whole[start + b]).all()
            tokens, _ = dataset.gather(whole[start + b])
            assert (np.concatenate([got[r][b].tokens for r in range(ranks)]) == tokens).all()


@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_batches_do_not_depend_on_how_far_ahead_they_are_prepared(dataset: Dataset, prefetch: int) -> None:
    plain = take(BatchLoader(dataset, 5, seed=1, shuffle=True), 30)
    ahead = take(BatchLoader(dataset, 5, seed=1, shuffle=True, prefetch=prefetch), 30)
    assert all((a.tokens == b.tokens).all() for a, b in zip(plain, ahead, strict=True))


def test_no_more_batches_are_prepared_ahead_than_asked(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, gather = [], dataset.gather
    monkeypatch.setattr(dataset, "gather", lambda ids: (prepared.append(1), gather(ids))[1])
    batches = BatchLoader(dataset, 5, seed=1, shuffle=True, prefetch=3).batches()
    for taken in range(1, 4):
        next(batches)
        time.sleep(0.05)  # long enough for hundreds of them
        assert taken <= len(prepared) <= taken + 3
    batches.close()


def test_without_shuffling_batches_are_consecutive(dataset: Dataset) -> None:
    batches = take(BatchLoader(dataset, 5, seed=1, shuffle=False), 3)
    assert [b.samples.tolist() for b in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]


def test_the_thread_ends_when_the_iterator_is_closed_dropped_or_left_by_an_exception(dataset: Dataset) -> None:
    loader = BatchLoader(dataset, 5, seed=1, shuffle=True)
    batches = loader.batches()
    next(batches)
    assert loader_threads() == 1
    batches.close()
    assert loader_threads() == 0
    batches = loader.batches()
    next(batches)
    del batches
    gc.collect()
    assert loader_threads() == 0
    with pytest.raises(RuntimeError, match="of the trainer"):
        fail_after_one(loader)
    assert loader_threads() == 0


def fail_after_one(loader: BatchLoader) -> None:
    for _ in loader.batches():
        raise RuntimeError("of the trainer")


def test_an_error_in_the_thread_reaches_the_consumer_after_the_batches_before_it(tmp_path: Path) -> None:
    shards = random_shards(shards=2)
    folder = write_mds(tmp_path / "data", shards)
    dataset = open_dataset(SourceConfig(path=str(folder)), 4)
    (folder / "shard.00001.mds").unlink()
    good = len(flatten(shards[:1])) // 4 - 1
    batches = BatchLoader(dataset, 1, seed=1, shuffle=False).batches()
    for i in range(good):
        assert next(batches).samples.tolist() == [i]
    with pytest.raises(DataError, match=r"shard\.00001"):
        for _ in range(3):
            next(batches)
    assert loader_threads() == 0


def test_a_part_outside_the_batch_is_refused(dataset: Dataset) -> None:
    for part in ((0, 9), (-1, 2), (5, 4)):
        with pytest.raises(ValueError, match="part"):
            BatchLoader(dataset, 8, seed=1, shuffle=True, part=part)
