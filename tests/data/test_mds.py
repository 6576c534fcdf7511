"""Reading MDS shards of every shape, and refusing damaged or hostile ones."""

import os
from pathlib import Path

import numpy as np
import pytest
from mds_bytes import edit_index, flatten, random_shards, random_tokens, write_mds

from ingot.config.data import SourceConfig
from ingot.data.formats.mds_reader import MdsShard, read_index, tokens_by_index
from ingot.data.loading.open_dataset import open_dataset
from ingot.errors import DataError


def all_tokens(folder: Path, **options: object) -> np.ndarray:
    """Every token of a dataset, put together again from its windows."""
    dataset = open_dataset(SourceConfig(path=str(folder), **options), 16)
    tokens, labels = dataset.gather(np.arange(dataset.samples))
    return np.concatenate([tokens[0, :1], labels.ravel()[: dataset.tokens - 1]])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"])
@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:DTYPE", "ndarray:DTYPE:20"])
def test_every_integer_type_and_encoding_reads_back(tmp_path: Path, dtype: str, encoding: str) -> None:
    rows = np.random.default_rng(0).integers(0, 100, (3, 5, 20)).astype(dtype)
    shards = [list(samples) for samples in rows]
    folder = write_mds(tmp_path / "data", shards, encoding.replace("DTYPE", dtype))
    assert (all_tokens(folder) == rows.ravel()).all()


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:uint16"])
def test_samples_of_any_length_next_to_other_columns_read_back(tmp_path: Path, encoding: str, extra: bool) -> None:
    shards = random_shards(longest=700)  # lengths stored in one byte and in two
    assert (all_tokens(write_mds(tmp_path / "data", shards, encoding, extra=extra)) == flatten(shards)).all()


def test_equally_long_samples_next_to_other_columns_read_back(tmp_path: Path) -> None:
    shards = [[random_tokens(20, seed=i) for i in range(6)]]
    for k, encoding in enumerate(("ndarray:uint16", "ndarray:uint16:20")):
        folder = write_mds(tmp_path / str(k), shards, encoding, extra=True)
        assert (all_tokens(folder) == flatten(shards)).all()


@pytest.mark.parametrize("stored", ["int64", "uint16"])
def test_raw_bytes_columns_of_older_converters_read_back(tmp_path: Path, stored: str) -> None:
    shards = random_shards(dtype=stored)
    folder = write_mds(tmp_path / "data", shards, "bytes")
    assert (all_tokens(folder, token_encoding_type=stored) == flatten(shards)).all()


@pytest.mark.parametrize("compression", ["zstd", "zstd:7", "gz", "bz2"])
def test_compressed_shards_are_decompressed_next_to_themselves_once(tmp_path: Path, compression: str) -> None:
    shards = random_shards()
    folder = write_mds(tmp_path / "data", shards, compression=compression)
    assert (all_tokens(folder) == flatten(shards)).all()
    unpacked = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.mds")}
    assert len(unpacked) == 3
    assert (all_tokens(folder) == flatten(shards)).all()
    assert unpacked == {path.name: path.stat().st_mtime_ns for path in folder.glob("*.mds")}


def test_a_shard_that_streaming_documents_is_read(tmp_path: Path) -> None:
    """Columns {tokens: ndarray:int32, id: int}, samples ([1, 2, 3], 7) and ([4, 5], 8)."""
    text = (
        b'{"column_encodings": ["int", "ndarray:int32"], "column_names": ["id", "tokens"], "column_sizes": [8, null], '
        b'"compression": null, "format": "mds", "hashes": [], "size_limit": 67108864, "version": 2}'
    )
    assert len(text) == 197
    first = bytes.fromhex("0e000000 0700000000000000 0403 010000000200000003000000")
    second = bytes.fromhex("0a000000 0800000000000000 0402 0400000005000000")
    shard = bytes.fromhex("02000000 d5000000 ef000000 05010000") + text + first + second
    (tmp_path / "shard.00000.mds").write_bytes(shard)
    (tmp_path / "index.json").write_text(
        '{"version": 2, "shards": [{"column_encodings": ["int", "ndarray:int32"], "column_names": ["id", "tokens"], '
        '"column_sizes": [8, null], "compression": null, "format": "mds", "hashes": [], "raw_data": {"basename": '
        f'"shard.00000.mds", "bytes": {len(shard)}, "hashes": {{}}}}, "samples": 2, "size_limit": 67108864, '
        '"version": 2, "zip_data": null}]}'
    )
    assert all_tokens(tmp_path).tolist() == [1, 2, 3, 4, 5]


def test_the_index_alone_tells_the_tokens_of_equally_long_samples(tmp_path: Path) -> None:
    rows = random_tokens(10 * 300).reshape(10, 300)
    shards = [list(rows[:6]), list(rows[6:9]), [rows[9][:130]]]  # a last sample of another length is fine
    for k, encoding in enumerate(("ndarray:uint16", "bytes")):
        infos = read_index(write_mds(tmp_path / str(k), shards, encoding) / "index.json")
        assert tokens_by_index(infos, "uint16") == [1800, 900, 130]
    for dtype in ("uint8", "int8"):  # one byte per token: only the width of the length field decides
        small = [[row.astype(dtype) for row in samples] for samples in shards]
        folder = write_mds(tmp_path / dtype, small, f"ndarray:{dtype}")
        assert tokens_by_index(read_index(folder / "index.json"), dtype) == [1800, 900, 130]
        assert (all_tokens(folder) == flatten(small)).all()
    infos = read_index(write_mds(tmp_path / "ragged", random_shards(), "ndarray:uint16") / "index.json")
    assert tokens_by_index(infos, "uint16") is None


def test_a_shard_shorter_than_its_index_says_is_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "data", random_shards())
    shard = folder / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"shard\.00001\.mds has .* bytes, but its index says"):
        open_dataset(SourceConfig(path=str(folder)), 16)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "data", random_shards())
    (folder / "shard.00002.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00002\.mds"):
        open_dataset(SourceConfig(path=str(folder)), 16)


def test_a_shard_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "data", random_shards())
    (folder / "shard.00002.mds").unlink()
    os.mkfifo(folder / "shard.00002.mds")
    with pytest.raises(DataError, match=r"shard\.00002\.mds is not a file"):
        open_dataset(SourceConfig(path=str(folder)), 16)


@pytest.mark.parametrize(
    "name", ["../outside.mds", "/etc/passwd", "a/../../b.mds", "..\\b.mds", "", ".ingot/x", "a\0b"]
)
def test_shards_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_mds(tmp_path / "data", random_shards())
    edit_index(folder, lambda index: index["shards"][0]["raw_data"].update(basename=name))
    with pytest.raises(DataError, match="outside its own folder"):
        open_dataset(SourceConfig(path=str(folder)), 16)


def test_pickled_columns_are_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "data", random_shards(), extra=True)
    edit_index(folder, lambda index: index["shards"][0].update(column_encodings=["pkl", "ndarray:uint16", "str"]))
    with pytest.raises(DataError, match="pickled"):
        open_dataset(SourceConfig(path=str(folder)), 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=3), "version 3"),
        (lambda index: index.pop("shards"), "'shards' is missing"),
        (lambda index: index["shards"][0].pop("samples"), "'samples' is missing"),
        (lambda index: index["shards"][0].update(samples="many"), "not a valid MDS index"),
        (lambda index: index["shards"][0].update(samples=10**6), "does not start like an MDS shard of 1000000"),
        (lambda index: index["shards"][0].update(format="json"), "format 'json'"),
        (
            lambda index: index["shards"][0].update(column_names=["text"]),
            "prepared without a tokenizer: its columns are text",
        ),
        (lambda index: index["shards"][0].update(column_encodings=["ndarray:float32"]), "float32"),
        (lambda index: index["shards"][0].update(column_sizes=[]), "do not add up"),
        (lambda index: index["shards"].clear(), "is empty"),
    ],
)
def test_a_wrong_index_is_one_clear_sentence(tmp_path: Path, change: object, message: str) -> None:
    folder = write_mds(tmp_path / "data", random_shards())
    edit_index(folder, change)
    with pytest.raises(DataError, match=message):
        open_dataset(SourceConfig(path=str(folder)), 16)


def test_an_index_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(b"\x80\x04pickle")
    with pytest.raises(DataError, match="not a valid MDS index"):
        open_dataset(SourceConfig(path=str(tmp_path)), 16)


def test_a_sample_encoded_unlike_its_neighbors_of_the_same_size_is_refused(tmp_path: Path) -> None:
    """Two tokens of four bytes take the place of four of two: only the head of the sample tells."""
    samples = [np.arange(4, dtype=np.uint16), np.arange(2, dtype=np.uint32), np.arange(4, dtype=np.uint16)]
    dataset = open_dataset(SourceConfig(path=str(write_mds(tmp_path / "data", [samples], "ndarray"))), 2)
    assert dataset.gather(np.array([0]))[0].tolist() == [[0, 1]]
    with pytest.raises(DataError, match="sample 1 is encoded unlike the first one"):
        dataset.gather(np.array([2]))


GOOD = bytes([33, 4, 3]) + np.arange(3, dtype="<i4").tobytes()  # int32; one dimension, its size in one byte; 3


@pytest.mark.parametrize(
    ("encoding", "column", "message"),
    [
        ("ndarray", GOOD[:2], "has an empty tokens column"),
        ("ndarray:int32", GOOD[1:2], "has an empty tokens column"),
        ("ndarray:int32", b"", "has an empty tokens column"),
        ("ndarray", bytes([65, *GOOD[1:], 0]), "mixes token types in one shard"),
        ("ndarray", bytes([33, 8, 3, 1, *GOOD[3:]]), "has tokens in 2 dimensions"),
        ("ndarray", bytes([33, 4, 4, *GOOD[3:]]), "contradicts its own length"),
        ("ndarray", bytes([33, 5, 3, 1, *GOOD[3:]]), "contradicts its own length"),  # 259, in two bytes
        ("ndarray", GOOD + b"x", "contradicts its own length"),
        ("bytes", GOOD[3:] + b"x", "bytes, not a multiple of int32"),
    ],
    ids=map(str, range(9)),
)
def test_a_damaged_tokens_column_is_one_sentence(tmp_path: Path, encoding: str, column: bytes, message: str) -> None:
    start = {"ndarray": 0, "ndarray:int32": 1, "bytes": 3}[encoding]
    samples = [np.frombuffer(sample, np.uint8) for sample in (column, GOOD[start:])]
    folder = write_mds(tmp_path, [samples], "bytes")  # the columns as they are
    shard = folder / "shard.00000.mds"
    edit_index(folder, lambda index: index["shards"][0].update(column_encodings=[encoding]))
    with pytest.raises(DataError, match=message):
        MdsShard(shard, read_index(folder / "index.json")[0], "int32")


def test_a_column_beyond_its_sample_is_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path, [[np.arange(3, dtype=np.int32), np.arange(9, dtype=np.int32)]], "bytes")
    shard, (info,) = folder / "shard.00000.mds", read_index(folder / "index.json")
    good = shard.read_bytes()
    assert MdsShard(shard, info, "int32").tokens == 12
    for size in (16, 0xFFFFFFFF):
        shard.write_bytes(good[: info.header] + size.to_bytes(4, "little") + good[info.header + 4 :])
        with pytest.raises(DataError, match="extends beyond its sample"):
            MdsShard(shard, info, "int32")


@pytest.mark.parametrize("equal", [True, False])
def test_no_damaged_byte_crashes_or_reads_beyond_the_shard(tmp_path: Path, equal: bool) -> None:
    """Each byte before the tokens of a small shard is changed in turn: an error or some tokens, never a crash."""
    shards = [[random_tokens(20, seed=i) for i in range(3)]] if equal else random_shards(shards=1, samples=3)
    folder = write_mds(tmp_path / "data", shards, "ndarray")
    info = read_index(folder / "index.json")[0]
    good = (folder / info.raw.basename).read_bytes()
    refused = 0
    for at in [*range(16), *range(info.header, len(good))]:
        damaged = bytearray(good)
        damaged[at] ^= 0x41
        path = tmp_path / "damaged.mds"
        path.write_bytes(damaged)
        try:
            shard = MdsShard(path, info)
            out = np.zeros(shard.tokens, np.int64)
            shard.read(0, out)
        except DataError:
            refused += 1
    assert refused > 16
