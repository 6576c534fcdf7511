"""What is written, against readers and writers made from the formats' descriptions."""

import itertools
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ingot.data.formats import mds_writer as mds
from ingot.data.formats.indexed_writer import default_dtype, write_idx
from ingot.data.prepare.prepare import prepare
from ingot.data.tokenizer import load_tokenizer
from ingot.errors import DataError, DiskError
from ingot.storage.atomic import write_whole

REAL = Path(__file__).parents[3] / "shared" / "data"


def read_mds(path: Path) -> list[bytes]:
    """The values of a one-column shard, as Streaming's reader finds them: by offsets alone."""
    data = path.read_bytes()
    (count,) = struct.unpack_from("<I", data)
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    assert offsets[-1] == len(data)
    values = []
    for begin, end in itertools.pairwise(offsets):
        (size,) = struct.unpack_from("<I", data, begin)
        assert begin + 4 + size == end
        values.append(data[begin + 4 : end])
    return values


def read_tokens(value: bytes, dtype: str) -> np.ndarray:
    """A 1-d array value: `ndim << 2 | k`, the length in 1 << k bytes, the tokens."""
    assert value[0] >> 2 == 1
    width = 1 << (value[0] & 3)
    length = int.from_bytes(value[1 : 1 + width], "little")
    tokens = np.frombuffer(value[1 + width :], dtype=dtype)
    assert len(tokens) == length
    return tokens


def config_for(dtype: str) -> dict:
    return mds.shard_config(f"ndarray:{dtype}", None, mds.SIZE_LIMIT)


def shard_from_rows(rows: np.ndarray, config: dict) -> bytes:
    """A shard of equally long token samples, rows: [samples, tokens]."""
    body = mds.rows_body(rows)
    return mds.shard_begin(np.full(len(rows), len(body) // len(rows)), config) + body


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("length", [1, 255, 256, 2048, 65_536])
def test_rows_come_back_as_they_were(dtype: str, length: int, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 50_000, size=(3, length)).astype(dtype)
    config = config_for(dtype)
    shard = shard_from_rows(rows, config)
    entry = mds.write_shard(tmp_path, 7, [shard], len(shard), 3, config)
    values = read_mds(tmp_path / "shard.00007.mds")
    assert [read_tokens(v, dtype).tolist() for v in values] == rows.tolist()
    data = (tmp_path / "shard.00007.mds").read_bytes()
    assert entry["raw_data"]["bytes"] == len(data)
    assert entry["raw_data"]["hashes"] == {"xxh3_64": xxhash.xxh3_64_hexdigest(data)}


def test_a_matrix_of_rows_and_the_same_rows_one_by_one_are_the_same_shard() -> None:
    rows = np.arange(5 * 300, dtype=np.uint16).reshape(5, 300)
    values = [mds.token_value(r) for r in rows]
    begin = mds.shard_begin(np.array([len(v) + 4 for v in values]), config_for("uint16"))
    assert shard_from_rows(rows, config_for("uint16")) == begin + mds.values_body(values)


def test_the_shard_begins_as_streaming_writes_it() -> None:
    """The head of a shard that mosaicml-streaming 0.13's MDSWriter wrote: columns {tokens: ndarray:int32}, no hashes."""
    config = {**config_for("int32"), "hashes": []}
    shard = shard_from_rows(np.arange(2048, dtype=np.int32)[None], config)
    text = (
        b'{"column_encodings": ["ndarray:int32"], "column_names": ["tokens"], "column_sizes": [null], '
        b'"compression": null, "format": "mds", "hashes": [], "size_limit": 67108864, "version": 2}'
    )
    begin = 4 + 8 + len(text)
    expected = struct.pack("<III", 1, begin, begin + 4 + 3 + 8192) + text + b"\x03\x20\x00\x00\x05\x00\x08"
    assert shard[: len(expected)] == expected


def test_megatrons_choice_of_type() -> None:
    assert [default_dtype(v) for v in (50_257, 65_499, 65_500, 128_000)] == ["uint16", "uint16", "int32", "int32"]


def test_idx_keeps_empty_documents_as_megatron_does(tmp_path: Path) -> None:
    np.array([3, 0, 2], dtype="<i4").tofile(tmp_path / "a")
    np.array([], dtype="<i4").tofile(tmp_path / "b")
    np.array([0, 4], dtype="<i4").tofile(tmp_path / "c")
    write_idx(tmp_path / "x.idx", np.dtype("uint16"), [tmp_path / n for n in "abc"])
    data = (tmp_path / "x.idx").read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<QBQQ", data, 9) == (1, 8, 3, 6)
    assert np.frombuffer(data, "<i4", 3, 34).tolist() == [3, 2, 4]
    assert np.frombuffer(data, "<i8", 3, 46).tolist() == [0, 6, 10]
    assert np.frombuffer(data, "<i8", 6, 70).tolist() == [0, 1, 1, 2, 2, 3]
    assert len(data) == 34 + 12 * 3 + 8 * 6


def test_idx_refuses_a_type_that_megatron_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="uint32"):
        write_idx(tmp_path / "x.idx", np.dtype("uint32"), [])


@pytest.mark.parametrize("engine", ["auto", "hf"])
@pytest.mark.parametrize("workers", [0, 2])
def test_megatrons_own_files_come_out_byte_for_byte(engine: str, workers: int, tmp_path: Path) -> None:
    fixture = REAL / "megatron_fixture"
    source = REAL / "openwebtext-1000.reconstructed.jsonl"
    if not source.is_file():
        pytest.skip("Megatron's fixture is not on this machine")
    prepare(
        source,
        tmp_path,
        tokenizer=fixture / "gpt2-tiny-vocab.json",
        format="indexed",
        output_prefix=str(tmp_path / "out"),
        engine=engine,
        num_workers=workers,
        show=lambda line: None,
    )
    for suffix in ("bin", "idx"):
        expected = (fixture / f"meg-gpt2-openwebtext_text_document.{suffix}").read_bytes()
        assert (tmp_path / f"out_text_document.{suffix}").read_bytes() == expected


def test_mds_is_what_llm_foundry_and_streaming_would_write(tmp_path: Path) -> None:
    """Their packing loop over Hugging Face's ids, sample by sample, against the shards read back."""
    source, file = REAL / "c4_en_first1000.jsonl", REAL / "20B_tokenizer.json"
    if not source.is_file():
        pytest.skip("C4 is not on this machine")
    tokenizer = load_tokenizer(file)
    for no_wrap in (False, True):
        out = tmp_path / str(no_wrap)
        options = {"no_wrap": no_wrap, "drop_last": True, "token_type": "int32", "show": lambda line: None}
        prepare(source, out, tokenizer=tokenizer, concat_tokens=1000, num_workers=0, size_limit=1 << 18, **options)
        buffer: list[int] = []
        expected = []
        for line in source.read_text(encoding="utf-8").splitlines():
            buffer = buffer + tokenizer.encode(json.loads(line)["text"]) + [0]
            while len(buffer) >= 1000:
                expected.append(buffer[:1000])
                buffer = [] if no_wrap else buffer[1000:]
        shards = sorted((out / "train").glob("shard.*.mds"))
        got = [read_tokens(v, "int32").tolist() for shard in shards for v in read_mds(shard)]
        assert len(shards) > 3
        assert got == expected


def test_a_file_is_complete_or_absent(tmp_path: Path) -> None:
    write_whole(tmp_path / "x", b"old")
    with pytest.raises(DiskError, match="cannot write"):
        write_whole(tmp_path / "absent" / "x", b"new")
    write_whole(tmp_path / "x", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"new"
