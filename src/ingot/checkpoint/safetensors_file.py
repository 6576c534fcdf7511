"""One safetensors file: written in a single pass that also computes its hash, read by the library.

The library's save_file goes through the page cache and leaves the hash to a second read of the file. Our writer fills
the file past the cache from a snapshot in host memory, so the training loop waits only for the copy: 22 ms for a 1b
model on an H200 (benchmarks/results/checkpoint.json).
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ingot.checkpoint.manifest import File, check_regular
from ingot.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PADDING = "__padding__"  # name of the bytes between weights and training state that align the second
BLOCK = 1 << 22
PAGE = 4096
MAX_HEADER_BYTES = 1 << 25


def header_of(tensors: dict[str, Tensor]) -> bytes:
    """The first bytes of a file of tensors in this order, padded to a whole page."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def in_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Wide types first, so that each tensor is aligned to its type without gaps."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def write_shard(path: Path, tensors: dict[str, Tensor], get: Callable[[str], Tensor] | None = None) -> File:
    """Write tensors to a new file and flush it to disk. With `get`, it supplies their values, one at a time."""
    tensors = in_order(tensors)
    values = map(get, tensors) if get is not None else iter(tensors.values())
    blocks = (block for tensor in values for block in blocks_of(bytes_of(tensor)))
    return write_blocks(path, chain([memoryview(header_of(tensors))], blocks))


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def blocks_of(content: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(content), BLOCK):
        yield content[begin : begin + BLOCK]


def write_blocks(path: Path, blocks: Iterable[memoryview], weights_bytes: int | None = None) -> File:
    """Write a new file and hash it in the same pass, and where the weights are a part of it, these alone too.

    The page cache is bypassed where blocks are whole pages and the file system allows it: filling the cache would take
    as much CPU time as the hash, and evict what training uses.
    """
    digest, size, weights = xxhash.xxh3_128(), 0, None
    descriptor, direct = _create(path)
    try:
        for block in blocks:
            rest = block
            if weights_bytes is not None and weights is None and size + len(block) >= weights_bytes:
                rest = block[weights_bytes - size :]
                digest.update(block[: weights_bytes - size])
                weights = weights_bytes, digest.hexdigest()
            digest.update(rest)  # this and the write release the GIL
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
    return File(size, digest.hexdigest(), weights)


def _create(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with contextlib.suppress(OSError, AttributeError):
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    return os.open(path, flags, 0o666), False


def open_safetensors(path: Path) -> Any:
    """Open a file whose header has a sane size: the library would read a header of any size into memory first."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(os.fstat(file.fileno()).st_size - 8, MAX_HEADER_BYTES):
                raise OSError(f"its header would be {length} bytes long")
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut short ({error}); copy it again") from None


class SafetensorsFile:
    """An open file of a checkpoint."""

    def __init__(self, path: Path):
        self.path = path
        try:
            check_regular(path)
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {path.parent} is incomplete: {path.name} is missing") from None
        self._file = open_safetensors(path)

    def get(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that must have this type and shape. It maps the file: values are read when they are used."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path} does not match the manifest: {error}") from None
        if tensor.dtype != DTYPES[dtype] or tensor.shape != shape:
            found = f"{DTYPE_NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
            raise CheckpointError(
                f"{self.path} does not match the manifest: {name} is {found} and should be {dtype} {list(shape)}"
            )
        return tensor
