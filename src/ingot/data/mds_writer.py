"""MDS, the shard format of MosaicML's Streaming, byte for byte.

A shard (little endian): uint32 n, uint32 offsets[n + 1] from the start of the file, a JSON of the columns, n samples.
A sample of one variable-size column: uint32 length, then the value. A token array: one byte `ndim << 2 | k`, its
length as uint8/16/32/64 (k = 0..3), the values. Streaming writes samples one by one; a shard of equal token samples is
a matrix, so here it is filled by a few numpy assignments.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from ingot.data.files import write_whole

SIZE_LIMIT = 1 << 26  # bytes of one raw shard, Streaming's default
HASH = "xxh3_64"


def token_column(dtype: np.dtype) -> dict[str, Any]:
    """The description of shards with one column of tokens."""
    return _column("tokens", f"ndarray:{dtype.name}")


def text_column() -> dict[str, Any]:
    """The description of shards with one column of text."""
    return _column("text", "str")


def _column(name: str, encoding: str) -> dict[str, Any]:
    return {"column_names": [name], "column_encodings": [encoding], "column_sizes": [None]}


def array_header(length: int) -> bytes:
    """What stands before the values of a 1-d array of a static dtype and a dynamic shape."""
    for code, size in enumerate((1, 2, 4, 8)):
        if length < 1 << (8 * size):
            return bytes([1 << 2 | code]) + length.to_bytes(size, "little")
    raise ValueError(length)


def shard_config(column: dict[str, Any], compression: str | None, size_limit: int = SIZE_LIMIT) -> dict[str, Any]:
    """The part of a shard's index entry that is also inside the shard."""
    return {
        **column,
        "compression": compression,
        "format": "mds",
        "hashes": [HASH],
        "size_limit": size_limit,
        "version": 2,
    }


def header_bytes(config: dict[str, Any]) -> int:
    """Bytes that a shard needs besides its samples and their offsets (4 bytes each)."""
    return 4 + 4 + len(_config_json(config))


def shard_from_rows(rows: np.ndarray, config: dict[str, Any]) -> bytes | bytearray:
    """A shard of equally long token samples, rows: [samples, tokens]."""
    samples, length = rows.shape
    head = array_header(length)
    head = (len(head) + length * rows.itemsize).to_bytes(4, "little") + head
    width = len(head) + length * rows.itemsize
    begin = _begin(np.full(samples, width, dtype=np.int64), config)
    shard = bytearray(len(begin) + samples * width)
    shard[: len(begin)] = begin
    body = np.frombuffer(shard, dtype=np.uint8, offset=len(begin)).reshape(samples, width)  # [samples, bytes]
    body[:, : len(head)] = np.frombuffer(head, dtype=np.uint8)
    body[:, len(head) :] = rows.view(np.uint8).reshape(samples, length * rows.itemsize)
    return shard


def shard_from_values(values: Sequence[bytes | memoryview], config: dict[str, Any]) -> bytes:
    """A shard of encoded values of any size, one column."""
    sizes = np.array([len(v) + 4 for v in values], dtype=np.int64)
    parts: list[bytes | memoryview] = [_begin(sizes, config)]
    for value in values:
        parts += [len(value).to_bytes(4, "little"), value]
    return b"".join(parts)


def token_value(tokens: np.ndarray) -> bytes:
    """One token array as a value of its column."""
    return array_header(len(tokens)) + tokens.tobytes()


def write_shard(folder: Path, number: int, shard: bytes | bytearray, samples: int, config: dict[str, Any]) -> dict:
    """Write one shard, compressed if so configured, and return its entry for index.json."""
    raw_name = f"shard.{number:05}.mds"
    entry = {**config, "samples": samples, "raw_data": _file_info(raw_name, shard), "zip_data": None}
    data: bytes | bytearray = shard
    name = raw_name
    if config["compression"]:
        data = zstandard.ZstdCompressor(level=zstd_level(config["compression"])).compress(shard)
        name = f"{raw_name}.zstd"
        entry["zip_data"] = _file_info(name, data)
    write_whole(folder / name, data)
    return entry


def write_index(folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write index.json, which makes a folder of shards a data set."""
    index = {"version": 2, "shards": list(entries)}
    write_whole(folder / "index.json", json.dumps(index, sort_keys=True).encode())


def zstd_level(compression: str) -> int:
    """The level in `zstd` or `zstd:LEVEL`; Streaming's default is 3."""
    return int(compression.partition(":")[2] or 3)


def _begin(sizes: np.ndarray, config: dict[str, Any]) -> bytes:
    text = _config_json(config)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    offsets += 4 + 4 * len(offsets) + len(text)
    return np.uint32(len(sizes)).tobytes() + offsets.astype(np.uint32).tobytes() + text


def _config_json(config: dict[str, Any]) -> bytes:
    return json.dumps(config, sort_keys=True).encode()


def _file_info(name: str, data: bytes | bytearray) -> dict[str, Any]:
    return {"basename": name, "bytes": len(data), "hashes": {HASH: xxhash.xxh3_64_hexdigest(data)}}
