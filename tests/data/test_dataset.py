"""One long sequence of tokens, cut into windows."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mds_bytes import edit_index, flatten, random_shards, random_tokens, write_mds

from ingot.config.data import SourceConfig
from ingot.data.loading.open_dataset import fetch_index, locate, open_dataset
from ingot.data.loading.token_dataset import IGNORE
from ingot.errors import DataError


def open_at(path: Path, seq_len: int = 16, vocab_size: int | None = None, **options: object):
    return open_dataset(SourceConfig(path=str(path), **options), seq_len, vocab_size)


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 39, 64, 1000])
@pytest.mark.parametrize("equal", [True, False])
def test_windows_of_any_length_lose_no_token(tmp_path: Path, seq_len: int, equal: bool) -> None:
    shards = [[random_tokens(20, seed=10 * s + i) for i in range(5)] for s in range(3)] if equal else random_shards()
    flat = flatten(shards)
    dataset = open_at(write_mds(tmp_path / "data", shards), seq_len)
    assert (dataset.tokens, dataset.samples) == (len(flat), -(-(len(flat) - 1) // seq_len))
    ids = np.random.default_rng(0).permutation(dataset.samples)
    tokens, labels = dataset.gather(ids)
    assert tokens.dtype == labels.dtype == np.int64 and tokens.shape == labels.shape == (dataset.samples, seq_len)
    for i, row, label in zip(ids, tokens, labels, strict=True):
        window = flat[i * seq_len : i * seq_len + seq_len + 1]
        rest = seq_len + 1 - len(window)
        assert row.tolist() == [*window[:seq_len], *[0] * (rest - 1)]
        assert label.tolist() == [*window[1:], *[IGNORE] * rest]
    assert (labels != IGNORE).sum() == len(flat) - 1  # each token but the first is predicted once


def test_inputs_and_labels_own_their_memory(tmp_path: Path) -> None:
    tokens, labels = open_at(write_mds(tmp_path / "data", random_shards())).gather(np.arange(2))
    before = tokens.copy()
    labels[:] = IGNORE
    assert (tokens == before).all() and tokens.flags.c_contiguous and labels.flags.c_contiguous


@pytest.mark.parametrize("count", [0, 1])
def test_data_without_two_tokens_is_empty(tmp_path: Path, count: int) -> None:
    folder = write_mds(tmp_path / "data", [[random_tokens(1)]] if count else [])
    with pytest.raises(DataError, match=r"is empty: \d tokens"):
        open_at(folder)


def test_two_tokens_are_one_sample(tmp_path: Path) -> None:
    tokens, labels = open_at(write_mds(tmp_path / "d", [[np.array([3, 4], np.uint16)]]), 3).gather(np.array([0]))
    assert tokens.tolist() == [[3, 4, 0]] and labels.tolist() == [[4, IGNORE, IGNORE]]


def test_a_split_that_does_not_exist_is_answered_with_those_that_do(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_mds(tmp_path / split, random_shards())
    with pytest.raises(DataError, match=r"no split 'test'; it has train, val"):
        open_at(tmp_path, split="test")
    with pytest.raises(DataError, match=r"holds the splits train, val"):
        open_at(tmp_path)
    assert open_at(tmp_path, split="val").tokens == open_at(tmp_path / "val").tokens


def test_nothing_at_the_path_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_at(tmp_path / "nowhere", split="train")
    with pytest.raises(DataError, match="is empty; write a dataset there"):
        open_at(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"holds 1 \.txt, but no dataset .*; prepare it first"):
        open_at(tmp_path)


def test_a_token_beyond_the_vocabulary_is_named_with_its_sample_and_file(tmp_path: Path) -> None:
    shards = [[np.arange(20, dtype=np.uint16) for _ in range(4)] for _ in range(2)]
    shards[1][2][3] = 500
    dataset = open_at(write_mds(tmp_path / "data", shards), 10, vocab_size=100)
    dataset.gather(np.arange(12))
    with pytest.raises(DataError, match=r"sample 12 holds token id 500 \(in shard\.00001\.mds\)"):
        dataset.gather(np.array([3, 12]))


def test_a_negative_token_is_refused(tmp_path: Path) -> None:
    shards = [[np.array([1, 2, -3, 4], np.int32)]]
    with pytest.raises(DataError, match="token id -3"):
        open_at(write_mds(tmp_path / "data", shards, "ndarray:int32"), 4, vocab_size=100).gather(np.array([0]))


def write_meta(folder: Path, shards: list, **facts: object) -> None:
    counts = [{"basename": f"shard.{i:05}.mds", "tokens": sum(map(len, s))} for i, s in enumerate(shards)]
    meta = {"version": 1, "format": "mds", "tokens": len(flatten(shards)), "shards": counts, **facts}
    (folder / "meta.json").write_text(json.dumps(meta))


def test_meta_json_gives_counts_without_opening_a_shard(tmp_path: Path) -> None:
    shards = random_shards()
    folder = write_mds(tmp_path / "data", shards)
    counted = open_at(folder)
    write_meta(folder, shards, bytes=5 * len(flatten(shards)))
    for path in folder.glob("*.mds"):
        path.rename(f"{path}.away")
    told = open_at(folder)
    assert (told.tokens, told.samples, told.bytes_per_token) == (counted.tokens, counted.samples, 5.0)
    assert told.fingerprint() == counted.fingerprint()


def test_an_id_beyond_the_vocabulary_is_found_at_the_start_when_meta_json_tells(tmp_path: Path) -> None:
    shards = random_shards()
    folder = write_mds(tmp_path / "data", shards)
    write_meta(folder, shards, max_token=320)
    open_at(folder, vocab_size=321)
    with pytest.raises(DataError, match="token ids up to 320, beyond the model's vocabulary of 300"):
        open_at(folder, vocab_size=300)


def test_counts_in_meta_json_that_are_wrong_are_noticed(tmp_path: Path) -> None:
    shards = random_shards()
    folder = write_mds(tmp_path / "data", shards)
    write_meta(folder, [shards[0][1:], *shards[1:]])
    with pytest.raises(DataError, match=r"shard\.00000\.mds has .* tokens, but .* were expected"):
        open_at(folder).gather(np.arange(2))


def test_the_fingerprint_is_of_the_data_not_of_its_place(tmp_path: Path) -> None:
    shards = random_shards()
    one = write_mds(tmp_path / "one", shards)
    two = Path(shutil.copytree(one, tmp_path / "elsewhere/two"))
    assert open_at(one).fingerprint() == open_at(two).fingerprint()
    assert open_at(one).fingerprint() != open_at(one, 32).fingerprint()
    other = write_mds(tmp_path / "other", random_shards(seed=1))
    assert open_at(one).fingerprint() != open_at(other).fingerprint()
    packed = write_mds(tmp_path / "packed", shards, compression="zstd")
    edit_index(packed, lambda index: [s["raw_data"].pop("hashes") for s in index["shards"]])
    assert open_at(packed).tokens == open_at(one).tokens


def test_the_description_has_format_place_and_counts(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "data", [[random_tokens(1001)]])
    assert open_at(folder, 100).describe() == f"MDS {folder}: 1,001 tokens in 1 shard, 10 samples of 100"


def test_the_tokenizer_is_found_next_to_the_splits_or_in_them(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "root/train", random_shards())
    assert open_at(tmp_path / "root", split="train").tokenizer_folder is None
    for place in (tmp_path / "root/tokenizer", folder / "tokenizer"):
        place.mkdir()
        (place / "tokenizer.json").write_text("{}")
        assert open_at(folder).tokenizer_folder == place


def test_samples_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    dataset = open_at(write_mds(tmp_path / "data", [[random_tokens(33)]]))
    for wrong in (-1, dataset.samples):
        with pytest.raises(IndexError):
            dataset.gather(np.array([0, wrong]))


def test_shards_without_samples_are_skipped(tmp_path: Path) -> None:
    shards = random_shards()
    full = [shards[0], [], shards[1], [], [], shards[2], []]
    folder = write_mds(tmp_path / "data", full)
    tokens, _ = open_at(folder, 5).gather(np.arange(len(flatten(shards)) // 5 - 1))
    assert (tokens.ravel() == flatten(shards)[: tokens.size]).all()


def test_reading_never_waits_for_torch() -> None:
    program = (
        "import sys, ingot.data.loading.batch_loader, ingot.data.loading.mixture; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_more_shards_than_may_be_open_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.data.loading.token_dataset.OPEN_SHARDS", 2)
    shards = random_shards(shards=9)
    dataset = open_at(write_mds(tmp_path / "data", shards), 4)
    ids = np.random.default_rng(0).permutation(dataset.samples - 1)
    tokens, _ = dataset.gather(ids)
    assert (tokens == flatten(shards)[ids[:, None] * 4 + np.arange(4)]).all()
    assert len(dataset._open) == 2


def test_sizes_in_the_config_may_have_units() -> None:
    limits = {"100GB": 10**11, "64GiB": 2**36, "1.5mb": 1_500_000, "123": 123, "10 kb": 10_000}
    assert [SourceConfig(path="x", cache_limit=text).cache_limit for text in limits] == list(limits.values())
    for wrong in ("much", "-1GB", "1.2.3GB", "0"):
        with pytest.raises(ValueError, match="cache_limit"):
            SourceConfig(path="x", cache_limit=wrong)


@pytest.mark.parametrize(
    ("files", "split", "message"),
    [
        (["a.idx", "a.bin", "b.idx", "b.bin"], None, "holds several datasets: a, b; name one with path="),
        (
            ["train/a.idx", "train/a.bin", "train/b.idx"],
            "train",
            r"train holds several datasets: a, b; name one with path=",
        ),
        (["a.idx"], "a", r"a\.idx exists but a\.bin does not; copy both"),
        (["train/index.json"], "val", "has no split 'val'; it has train"),
        (["train/index.json", "val/index.json"], None, "holds the splits train, val; name one with split="),
        (["index.json"], "val", "is a dataset itself and has no split 'val'; set split to null for it"),
        (["train/x.parquet"], "train", "holds 1 .parquet, but no dataset"),
        (["notes.md"], None, "holds 1 .md, but no dataset"),
        ([], None, "is empty; write a dataset there"),
    ],
)
def test_a_folder_that_is_not_one_dataset_says_what_it_is(
    tmp_path: Path, files: list[str], split: str | None, message: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        locate(tmp_path, split)


def test_a_remote_folder_of_several_datasets_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    for name in ("a.idx", "a.bin", "b.idx", "b.bin"):
        (tmp_path / "remote" / name).touch()
    with pytest.raises(DataError, match=r"remote holds several datasets: a, b; name one with remote="):
        fetch_index(str(tmp_path / "remote"), tmp_path / "local", None, None)


@pytest.mark.parametrize("name", ["corpus", "corpus.v1.0"])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_a_pair_is_found_by_its_prefix_or_either_file(tmp_path: Path, name: str, ending: str) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"{name}{suffix}").touch()
    assert locate(tmp_path / f"{name}{ending}", None) == ("indexed", tmp_path / name)


def test_a_description_of_other_shards_is_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path, random_shards(shards=2))
    shards = [{"basename": f"shard.0000{number}.mds", "tokens": 5} for number in (0, 7)]
    (folder / "meta.json").write_text(json.dumps({"version": 1, "format": "mds", "tokens": 10, "shards": shards}))
    with pytest.raises(DataError, match=r"meta\.json lists other shards than index\.json; delete it"):
        open_dataset(SourceConfig(path=str(folder)), 4)
