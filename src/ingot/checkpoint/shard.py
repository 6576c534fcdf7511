"""One safetensors file: written in a single pass that hashes on the way, read through a map of its bytes.

The library's own save_file would take a second read of the file for the hash; its reader checks a header only after
having read as much as the header claims to be. Files are the same either way: the library loads ours.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from ingot.checkpoint.manifest import File, check_regular
from ingot.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK = 1 << 22
MAX_HEADER_BYTES = 1 << 25


class _Span(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_shard(path: Path, tensors: dict[str, Tensor], get: Callable[[str], Tensor] | None = None) -> File:
    """Write tensors to a new file and onto the disk. With `get` their values come from there, one at a time."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # each begins where its type may
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    with path.open("wb", buffering=1 << 20) as file:
        for block in _blocks(
            len(text).to_bytes(8, "little") + text, [n for n, _ in ordered], get or tensors.__getitem__
        ):
            digest.update(block)  # this and the write let other threads run
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return File(8 + len(text) + end, digest.hexdigest())


def _blocks(header: bytes, names: list[str], get: Callable[[str], Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for name in names:
        tensor = get(name)
        if tensor.numel():
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(content), BLOCK):
                yield content[begin : begin + BLOCK]


class Shard:
    """An open file, of which nothing is read before it is asked for."""

    def __init__(self, path: Path):
        self.path = path
        try:
            size = check_regular(path)
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                    raise CheckpointError(f"{path} is no safetensors file: its header would be {length} bytes long")
                self._spans = msgspec.json.decode(file.read(length), type=dict[str, _Span])
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {path.parent} is incomplete: {path.name} is missing") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: its header cannot be read: {error}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        self._start = 8 + length

    def get(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that must be there with this type and shape; its values are read when they are used."""
        span, count = self._spans.get(name), math.prod(shape)
        if span is None or span.dtype != dtype or span.shape != shape:
            raise CheckpointError(f"{self.path} is not the file that the manifest means: {name} is missing or differs")
        begin, end = span.data_offsets
        kind = DTYPES[dtype]
        if begin < 0 or end - begin != count * kind.itemsize or self._start + end > len(self._bytes):
            raise CheckpointError(f"{self.path} is damaged: {name} is not within the file")
        if count == 0:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._bytes, dtype=kind, count=count, offset=self._start + begin).reshape(shape)
