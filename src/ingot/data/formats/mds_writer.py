"""Writes MDS, the shard format of MosaicML Streaming, byte for byte (`mds_reader` describes the format).

Streaming writes one sample at a time; here a shard of equally long samples is a matrix, filled by numpy assignments.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from ingot.storage.atomic import begin_to_store, whole_file, write_whole

SIZE_LIMIT = 1 << 26  # bytes of one raw shard, Streaming's default
HASH = "xxh3_64"


def shard_config(encoding: str, compression: str | None, size_limit: int = SIZE_LIMIT) -> dict[str, Any]:
    """The header of a shard and of its index entry: one column, of text (`str`) or tokens (`ndarray:DTYPE`)."""
    return {
        "column_names": ["text" if encoding == "str" else "tokens"],
        "column_encodings": [encoding],
        "column_sizes": [None],
        "compression": compression,
        "format": "mds",
        "hashes": [HASH],
        "size_limit": size_limit,
        "version": 2,
    }


def header_bytes(config: dict[str, Any]) -> int:
    """Bytes of a shard apart from its samples and their offsets (4 bytes each)."""
    return len(shard_begin(np.zeros(0, dtype=np.int64), config))


def shard_begin(sizes: np.ndarray, config: dict[str, Any]) -> bytes:
    """Everything before the samples, given their sizes in bytes [samples]."""
    text = json.dumps(config, sort_keys=True).encode()
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    offsets += 4 + 4 * len(offsets) + len(text)
    return np.uint32(len(sizes)).tobytes() + offsets.astype(np.uint32).tobytes() + text


def rows_body(rows: np.ndarray) -> bytes:
    """Equally long token samples as a shard stores them; rows is [samples, tokens]."""
    head = row_head(rows.shape[1], rows.itemsize)
    body = np.empty((len(rows), len(head) + rows.shape[1] * rows.itemsize), dtype=np.uint8)  # [samples, bytes]
    body[:, : len(head)] = np.frombuffer(head, dtype=np.uint8)
    body[:, len(head) :] = rows.view(np.uint8).reshape(len(rows), -1)
    return body.tobytes()


def values_body(values: Sequence[bytes | memoryview]) -> bytes:
    """Values of any size as a shard stores them."""
    return b"".join(part for value in values for part in (len(value).to_bytes(4, "little"), value))


def row_head(length: int, itemsize: int) -> bytes:
    """The bytes before the tokens of a sample: its size and its array header."""
    head = _array_head(length)
    return (len(head) + length * itemsize).to_bytes(4, "little") + head


def token_value(tokens: np.ndarray) -> bytes:
    """A token array as a value of its column."""
    return _array_head(len(tokens)) + tokens.tobytes()


def _array_head(length: int) -> bytes:
    """The header of a 1-d array with a static dtype and a dynamic shape."""
    code = next(k for k in range(4) if length < 1 << (8 << k))
    return bytes([1 << 2 | code]) + length.to_bytes(1 << code, "little")


def write_shard(
    folder: Path, number: int, chunks: Iterable[bytes], size: int, samples: int, config: dict[str, Any]
) -> dict[str, Any]:
    """Write a shard of `size` bytes chunk by chunk, compressed if `config` says so; returns its index.json entry."""
    raw_name = f"shard.{number:05}.mds"
    raw_hash, zip_hash = xxhash.xxh3_64(), xxhash.xxh3_64()
    packer = None
    if config["compression"]:
        level = int(config["compression"].partition(":")[2] or 3)  # of `zstd:LEVEL`; Streaming's default is 3
        packer = zstandard.ZstdCompressor(level=level).compressobj(size=size)
    name = f"{raw_name}.zstd" if packer else raw_name
    written = 0
    with whole_file(folder / name) as file:
        for chunk in chunks:
            raw_hash.update(chunk)
            data = chunk
            if packer:
                data = packer.compress(chunk)
                zip_hash.update(data)
            written += file.write(data)
            file.flush()
            begin_to_store(file.fileno(), written - len(data), len(data))
        if packer:
            data = packer.flush()
            zip_hash.update(data)
            written += file.write(data)
    raw = {"basename": raw_name, "bytes": size, "hashes": {HASH: raw_hash.hexdigest()}}
    packed = {"basename": name, "bytes": written, "hashes": {HASH: zip_hash.hexdigest()}} if packer else None
    return {**config, "samples": samples, "raw_data": raw, "zip_data": packed}


def write_index(folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write index.json, which makes a folder of shards a dataset."""
    index = {"version": 2, "shards": list(entries)}
    write_whole(folder / "index.json", json.dumps(index, sort_keys=True).encode())
