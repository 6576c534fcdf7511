"""Reads MDS, the shard format of MosaicML Streaming: `index.json` and `shard.00000.mds` files.

    uint32 n | uint32 offset[n+1] | JSON | sample 0 ... sample n-1     little endian, offsets from the start of the file
    sample = uint32 length of each variable-size column, then the data of all columns in the same order

Streaming opens the file for every sample and decodes it in Python. Here a shard is one memory map. Where all samples
have the same length, as after packing, it is viewed as a strided matrix [samples, length], and reading is slicing.
"""

import json
import mmap
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ingot.errors import DataError

COLUMN = "tokens"
DTYPE_OF_CODE = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"
}  # fmt: skip
HEADER_KEYS = (
    "column_encodings", "column_names", "column_sizes", "compression", "format", "hashes", "size_limit", "version"
)  # fmt: skip
INTEGERS = frozenset(DTYPE_OF_CODE.values())


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a shard, as the index describes it."""

    basename: str
    bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True, slots=True)
class MdsShardInfo:
    """What the index says about one shard."""

    raw: ShardFile
    packed: ShardFile | None  # its compressed form
    compression: str | None  # zstd, gz, bz2, without its level
    samples: int
    encoding: str  # of the tokens column
    sizes: tuple[int | None, ...]  # bytes of each column, None where it varies
    column: int  # index of the tokens column
    header: int  # bytes before the first sample, as Streaming's writer lays them out


def read_index(path: Path) -> list[MdsShardInfo]:
    """The shards in an index.json, which may be damaged or hostile."""
    try:
        index = json.loads(path.read_bytes())
        if index["version"] != 2:
            raise DataError(f"{path} has version {index['version']}; only version 2 of MDS is supported")
        return [_shard_info(entry, path) for entry in index["shards"]]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise DataError(f"{path} is not a valid MDS index ({reason}); prepare or copy the data again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _shard_info(entry: dict[str, Any], path: Path) -> MdsShardInfo:
    if entry["format"] != "mds":
        raise DataError(f"{path} describes shards of format '{entry['format']}'; only mds is supported")
    names, encodings = entry["column_names"], entry["column_encodings"]
    if "pkl" in encodings:
        raise DataError(f"{path} has a pickled column, which could run code when read; use another encoding")
    if COLUMN not in names:
        raise DataError(
            f"{path.parent} was prepared without a tokenizer: its columns are {', '.join(names)}, and training needs "
            f"'{COLUMN}'; run the same `ingot prepare` again with --tokenizer TOKENIZER --reprocess"
        )
    column = names.index(COLUMN)
    packed = _shard_file(entry["zip_data"], path) if entry.get("zip_data") else None
    compression = entry["compression"].split(":")[0] if packed else None
    samples = int(entry["samples"])
    if len(names) != len(encodings) or len(names) != len(entry["column_sizes"]) or samples < 0:
        raise ValueError("columns or samples do not add up")
    sizes = tuple(None if size is None else int(size) for size in entry["column_sizes"])
    raw = _shard_file(entry["raw_data"], path)
    described = {key: entry[key] for key in HEADER_KEYS if key in entry}
    header = 4 * (samples + 2) + len(json.dumps(described, sort_keys=True))
    return MdsShardInfo(raw, packed, compression, samples, str(encodings[column]), sizes, column, header)


def _shard_file(entry: dict[str, Any], path: Path) -> ShardFile:
    name = entry["basename"]
    parts = PurePosixPath(name).parts
    if not parts or parts[0] in ("/", "//", ".ingot") or ".." in parts or set(name) & {"\\", "\0"}:
        raise DataError(f"{path} names the shard '{name}', which is outside its own folder; do not trust this data")
    return ShardFile(name, int(entry["bytes"]), {str(k): str(v) for k, v in (entry.get("hashes") or {}).items()})


def tokens_by_index(infos: list[MdsShardInfo], raw_type: str) -> list[int] | None:
    """Tokens in each shard from the index alone: exact where the column has a fixed size, else deduced from the shard
    sizes if all samples seem to have the same length. None if only the shards tell."""
    lengths = [_sample_length(info, raw_type) for info in infos if info.samples]
    if None in lengths or len(set(lengths[:-1])) > 1:
        return None
    return [info.samples * (_sample_length(info, raw_type) or 0) for info in infos]


def token_dtype(infos: list[MdsShardInfo], raw_type: str) -> np.dtype:
    """The token type of all shards; int64 if they differ or only the shards tell."""
    encodings = {info.encoding for info in infos}
    if len(encodings) != 1 or encodings == {"ndarray"}:
        return np.dtype(np.int64)
    return _static_dtype(encodings.pop(), raw_type, infos[0].raw.basename)


def _sample_length(info: MdsShardInfo, raw_type: str) -> int | None:
    size = info.sizes[info.column]
    if size is not None:
        return size // _static_dtype(info.encoding, raw_type, info.raw.basename).itemsize
    name, _, rest = info.encoding.partition(":")
    if len(info.sizes) > 1 or not info.samples or (name == "ndarray" and not rest):
        return None
    each, odd = divmod(info.raw.bytes - info.header, info.samples)
    dtype = _static_dtype(info.encoding, raw_type, info.raw.basename)
    for power in range(4):  # the length of an array is stored in 1, 2, 4 or 8 bytes
        head = 4 + (1 + (1 << power) if name == "ndarray" else 0)
        length, rest_bytes = divmod(each - head, dtype.itemsize)
        if odd == rest_bytes == 0 and length > 0 and (name != "ndarray" or length.bit_length() <= 8 << power):
            return length
    return None


class MdsShard:
    """The tokens of one memory-mapped shard."""

    def __init__(self, path: Path, info: MdsShardInfo, raw_type: str = "int64"):
        n = info.samples
        header = 4 * (n + 2)
        self.path = path
        self._map = map_file(path, info.raw.bytes)
        data = np.frombuffer(self._map, np.uint8)
        if len(data) < header or int(data[:4].view("<u4")[0]) != n:
            raise DataError(f"{path} does not start like an MDS shard of {n} samples; prepare or copy the data again")
        offsets = data[4:header].view("<u4").astype(np.int64)  # [n+1]
        if n == 0:
            self.tokens = 0
            return
        if offsets[0] < header or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
            raise DataError(f"{path} has sample offsets that do not match its size; prepare or copy the data again")
        stride = int(offsets[1] - offsets[0])
        # Of equally long samples only the first is decoded: decoding all would read the whole shard from disk.
        self._uniform = len(info.sizes) == 1 and bool((np.diff(offsets) == stride).all())
        known = 1 if self._uniform else n
        self.dtype, starts, self._lengths = _locate(data, offsets[: known + 1], info, raw_type, path)
        self._starts = starts  # byte of each sample's first token
        if self._uniform:
            self.length = int(self._lengths[0])
            self.tokens = n * self.length
            self._first_row, self._stride = int(offsets[0]), stride
            self._rows = np.ndarray((n, self.length), self.dtype, data, int(starts[0]), (stride, self.dtype.itemsize))
            self._head = data[offsets[0] : starts[0]].tobytes()
        else:
            self._ends = np.cumsum(self._lengths)  # [n], in tokens
            self.tokens = int(self._ends[-1])

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens from `start` on."""
        if self._uniform:
            self._read_rows(start, out)
        else:
            self._read_ragged(start, out)

    def _read_rows(self, start: int, out: np.ndarray) -> None:
        row, column = divmod(start, self.length)
        done, head, wanted = 0, self._head, len(out)
        while done < wanted:
            at = self._first_row + row * self._stride
            if self._map[at : at + len(head)] != head:
                raise DataError(f"{self.path}: sample {row} is encoded unlike the first one; the shard is damaged")
            end = min(done + self.length - column, wanted)
            out[done:end] = self._rows[row, column : column + end - done]
            done, row, column = end, row + 1, 0

    def _read_ragged(self, start: int, out: np.ndarray) -> None:
        row = int(np.searchsorted(self._ends, start, side="right"))
        skipped = start - int(self._ends[row] - self._lengths[row])
        done = 0
        while done < len(out):
            taken = min(int(self._lengths[row]) - skipped, len(out) - done)
            offset = int(self._starts[row]) + skipped * self.dtype.itemsize
            out[done : done + taken] = np.frombuffer(self._map, self.dtype, taken, offset)
            done, row, skipped = done + taken, row + 1, 0


def map_file(path: Path, size: int) -> mmap.mmap:
    """A read-only memory map of a file that must have `size` bytes."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise DataError(f"{path} is not a file; copy or prepare the data again")
        with path.open("rb") as file:
            found = path.stat().st_size
            if found != size:
                raise DataError(f"{path} has {found:,} bytes, but its index says {size:,}; copy or prepare it again")
            if size == 0:
                raise DataError(f"{path} is empty; copy or prepare the data again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; copy or prepare the data again") from None


def _locate(
    data: np.ndarray, offsets: np.ndarray, info: MdsShardInfo, raw_type: str, path: Path
) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """The token type, and for each of the k samples between `offsets` [k+1] its first token's byte and token count."""
    begin, end = offsets[:-1], offsets[1:]
    variable = [i for i, size in enumerate(info.sizes) if size is None]
    if (end - begin < 4 * len(variable)).any():
        raise DataError(f"{path} has a sample shorter than its own header; the shard is damaged")
    start = begin + 4 * len(variable)
    length = np.zeros_like(begin)
    for i in range(info.column + 1):
        start = start + length
        size = info.sizes[i]
        length = np.full_like(begin, size) if size is not None else _unsigned(data, begin + 4 * variable.index(i), 4)
    name, _, rest = info.encoding.partition(":")
    stop = start + length
    if (stop > end).any():
        raise DataError(f"{path} has a tokens column that extends beyond its sample; the shard is damaged")
    if name == "ndarray" and ":" not in rest:
        start, dtype = _skip_array_head(data, start, stop, rest, path)
    else:
        dtype = _static_dtype(info.encoding, raw_type, str(path))
    counts, odd = np.divmod(stop - start, dtype.itemsize)
    if odd.any():
        raise DataError(f"{path} has a tokens column of {stop[0] - start[0]} bytes, not a multiple of {dtype.name}")
    return dtype, start, counts


def _skip_array_head(
    data: np.ndarray, start: np.ndarray, stop: np.ndarray, static: str, path: Path
) -> tuple[np.ndarray, np.dtype]:
    """Skip the header of an array that stores its type or shape: [code] (ndim << 2 | k) dims."""
    if (stop - start < 2 + (not static)).any():
        raise DataError(f"{path} has an empty tokens column; the shard is damaged")
    if static:
        dtype = _integer(static, str(path))
    else:
        codes = np.unique(data[start])
        if len(codes) > 1:
            raise DataError(f"{path} mixes token types in one shard; the shard is damaged")
        dtype = _integer(DTYPE_OF_CODE.get(int(codes[0]), f"code {codes[0]}"), str(path))
        start = start + 1
    shape = data[start].astype(np.int64)
    dims, width = shape >> 2, 1 << (shape & 3)
    head = 1 + dims * width
    if (dims != 1).any() or (start + head > stop).any():
        raise DataError(f"{path} has tokens in {dims.max()} dimensions; only one-dimensional arrays are supported")
    said = np.zeros_like(start)
    for w in np.unique(width).tolist():
        here = width == w
        said[here] = _unsigned(data, start[here] + 1, w)
    if (said * dtype.itemsize != stop - start - head).any():
        raise DataError(f"{path} has a tokens column that contradicts its own length; the shard is damaged")
    return start + head, dtype


def _unsigned(data: np.ndarray, at: np.ndarray, width: int) -> np.ndarray:
    """The little-endian unsigned integers of `width` bytes at unaligned positions, as int64."""
    return data[at[:, None] + np.arange(width)].copy().view(f"<u{width}")[:, 0].astype(np.int64)


def _static_dtype(encoding: str, raw_type: str, where: str) -> np.dtype:
    name, _, rest = encoding.partition(":")
    if name == "bytes":
        return _integer(raw_type, where)
    if name == "ndarray" and rest:
        return _integer(rest.split(":")[0], where)
    return _integer(encoding, where)


def _integer(name: str, where: str) -> np.dtype:
    name = "int64" if name == "int" else name
    if name not in INTEGERS:
        raise DataError(f"{where} stores tokens as '{name}', not as integers ({', '.join(sorted(INTEGERS))})")
    return np.dtype(name).newbyteorder("<")
