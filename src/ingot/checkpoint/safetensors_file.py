"""One safetensors file: written in a single pass that hashes on the way, read through a map of its bytes.

The library's own save_file would take a second read of the file for the hash; its reader checks a header only after
having read as much as the header claims to be. Files are the same either way: the library loads ours.
"""

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
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
PAGE = 4096
MAX_HEADER_BYTES = 1 << 25


class _Span(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def header_of(tensors: dict[str, Tensor]) -> bytes:
    """The first bytes of a file of tensors in this order, filled up to a whole page."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def in_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Wide types first, so that without gaps each begins where its type may."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def write_shard(path: Path, tensors: dict[str, Tensor], get: Callable[[str], Tensor] | None = None) -> File:
    """Write tensors to a new file and onto the disk. With `get` their values come from there, one at a time."""
    tensors = in_order(tensors)
    values = map(get, tensors) if get is not None else iter(tensors.values())
    blocks = (block for tensor in values for block in blocks_of(bytes_of(tensor)))
    return write_blocks(path, chain([memoryview(header_of(tensors))], blocks))


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def blocks_of(content: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(content), BLOCK):
        yield content[begin : begin + BLOCK]


def write_blocks(path: Path, blocks: Iterable[memoryview]) -> File:
    """Write a new file and hash it on the way.

    Past the page cache where the blocks are whole pages and the file system can: the cache would cost a processor as
    much as the hash, and push out what training uses.
    """
    digest, size = xxhash.xxh3_128(), 0
    descriptor, direct = _create(path)
    try:
        for block in blocks:
            digest.update(block)  # this and the write let other threads run
            size += len(block)
            while block:
                try:
                    block = block[os.write(descriptor, block) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    direct = False
                    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_WRONLY)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return File(size, digest.hexdigest())


def _create(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with contextlib.suppress(OSError, AttributeError):
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    return os.open(path, flags, 0o666), False


class SafetensorsFile:
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
