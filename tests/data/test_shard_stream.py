"""Shards on their way: decompressed in bounded chunks, and compared with what the index says of them."""

import hashlib

import pytest
from mds_bytes import PACKERS

from ingot.data.formats.mds_reader import ShardFile
from ingot.data.loading.shard_stream import Again, decompress, verify_stream
from ingot.errors import DataError

TEXT = bytes(range(256)) * 2000


def chunks(data: bytes, size: int = 1000) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("kind", list(PACKERS))
def test_what_was_compressed_comes_back_and_damage_is_tried_again(kind: str) -> None:
    packed = PACKERS[kind](TEXT)
    assert b"".join(decompress(kind, iter(chunks(packed)))) == TEXT
    with pytest.raises(Again, match=f"cannot be decompressed as {kind}"):
        list(decompress(kind, iter([b"nonsense that is longer than a header"])))


def test_more_than_the_compressed_data_is_tried_again() -> None:
    packed = PACKERS["bz2"](TEXT)  # whose reader stops at the end of its data
    with pytest.raises(Again, match="it has extra bytes after its bz2 data"):
        list(decompress("bz2", iter([*chunks(packed), b"x" * 5_000_000, b"y"])))


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(DataError, match="shards compressed with 'snappy' are not supported; use "):
        list(decompress("snappy", iter([b"x"])))


@pytest.mark.parametrize(
    ("data", "hashes", "problem"),
    [
        (TEXT, {"sha1": hashlib.sha1(TEXT).hexdigest()}, None),
        (TEXT[:-1], {}, "has 511,999 bytes, but the index says 512,000"),
        (TEXT + b"x", {}, "has more than the 512,000 bytes of the index"),
        (TEXT[::-1], {"sha1": hashlib.sha1(TEXT).hexdigest()}, "its sha1 is .*, but the index says"),
    ],
)
def test_a_stream_is_compared_with_its_index(data: bytes, hashes: dict[str, str], problem: str | None) -> None:
    stream = verify_stream(chunks(data), ShardFile("x", len(TEXT), hashes))
    if problem is None:
        assert b"".join(stream) == TEXT
        return
    with pytest.raises(Again, match=problem):
        list(stream)
