"""MDS written from its description, independently of the package, for tests of the reader."""

import bz2
import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import zstandard

CODES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "uint32": 32, "int32": 33, "uint64": 64, "int64": 65}
PACKERS = {"zstd": zstandard.ZstdCompressor().compress, "gz": gzip.compress, "bz2": bz2.compress}


def encode(tokens: np.ndarray, encoding: str) -> bytes:
    """One token array in a given encoding."""
    parts = encoding.split(":")
    if parts[0] == "bytes" or len(parts) == 3:
        return tokens.tobytes()
    power = next(p for p in range(4) if len(tokens) < 1 << (8 << p))
    code = b"" if len(parts) == 2 else bytes([CODES[tokens.dtype.name]])
    return code + bytes([1 << 2 | power]) + len(tokens).to_bytes(1 << power, "little") + tokens.tobytes()


def write_mds(
    folder: Path, shards: list, encoding: str = "ndarray:uint16", *, compression: str | None = None, extra: bool = False
) -> Path:
    """Shards of token arrays; `extra` adds a column before and one after the tokens, of varying size."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["id", "tokens", "url"] if extra else ["tokens"]
    static = len(encoding.split(":")) == 3
    entries = []
    for number, samples in enumerate(shards):
        blobs = []
        for k, tokens in enumerate(samples):
            value = encode(tokens, encoding)
            head = b"" if static else len(value).to_bytes(4, "little")
            if extra:
                url = b"u" * (k % 5)
                blobs.append(head + len(url).to_bytes(4, "little") + k.to_bytes(8, "little") + value + url)
            else:
                blobs.append(head + value)
        size = samples[0].nbytes if static else None
        entry = {
            "column_encodings": ["int", encoding, "str"] if extra else [encoding],
            "column_names": names,
            "column_sizes": [8, size, None] if extra else [size],
            "compression": compression, "format": "mds", "hashes": ["sha1"], "size_limit": 1 << 26, "version": 2,
        }  # fmt: skip
        text = json.dumps(entry, sort_keys=True).encode()
        offsets = np.cumsum([4 * (len(blobs) + 2) + len(text), *map(len, blobs)])
        raw = len(blobs).to_bytes(4, "little") + offsets.astype("<u4").tobytes() + text + b"".join(blobs)
        name = f"shard.{number:05}.mds"
        entry |= {"samples": len(blobs), "raw_data": describe(name, raw), "zip_data": None}
        if compression:
            packed = PACKERS[compression.split(":")[0]](raw)
            entry["zip_data"] = describe(f"{name}.{compression.split(':')[0]}", packed)
            (folder / f"{name}.{compression.split(':')[0]}").write_bytes(packed)
        else:
            (folder / name).write_bytes(raw)
        entries.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


def describe(name: str, data: bytes) -> dict:
    return {"basename": name, "bytes": len(data), "hashes": {"sha1": hashlib.sha1(data).hexdigest()}}


def edit_index(folder: Path, change) -> None:
    """Apply a function to the parsed index and write it back."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def random_tokens(count: int, high: int = 50_000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, count).astype(np.uint16)


def random_shards(seed: int = 0, shards: int = 3, samples: int = 7, longest: int = 40, dtype: str = "uint16") -> list:
    """Samples of varying length."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(0, 100, rng.integers(1, longest)).astype(dtype) for _ in range(samples)] for _ in range(shards)
    ]


def flatten(shards: list) -> np.ndarray:
    return np.concatenate([tokens for samples in shards for tokens in samples]).astype(np.int64)
