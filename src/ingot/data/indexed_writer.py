"""Megatron's `.bin/.idx` pair, byte for byte, in bounded memory.

`.bin` is the tokens, back to back. `.idx` (little endian): 9 bytes of magic, uint64 version, uint8 dtype code, uint64
sequences S, uint64 documents + 1, then int32 lengths[S], int64 byte offsets[S], int64 document_indices[documents + 1].
Megatron keeps all lengths in Python lists; here they stand in one file per piece and are streamed three times.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ingot.data.files import begin_to_store, whole_file
from ingot.errors import DataError, disk_error

MAGIC = b"MMIDIDX\x00\x00"
DTYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def default_dtype(vocab_size: int) -> str:
    """Megatron's and NeoX's choice; they keep the last few values of uint16 free."""
    return "uint16" if vocab_size < 65500 else "int32"


def write_idx(path: Path, dtype: np.dtype, length_files: Sequence[Path]) -> tuple[int, int]:
    """Write an `.idx` from files of document lengths (int32, 0 for an empty document); returns documents and tokens."""
    if dtype.name not in DTYPE_CODES:
        raise DataError(f"token_type={dtype.name}: the indexed format knows {', '.join(DTYPE_CODES)}")
    documents = sequences = tokens = 0
    for lengths in _lengths(length_files):
        documents += len(lengths)
        sequences += int(np.count_nonzero(lengths))
        tokens += int(lengths.sum(dtype=np.int64))
    with whole_file(path) as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, DTYPE_CODES[dtype.name], sequences, documents + 1))
        for lengths in _lengths(length_files):
            file.write(lengths[lengths > 0].tobytes())
        offset = 0
        for lengths in _lengths(length_files):
            sizes = lengths[lengths > 0].astype(np.int64) * dtype.itemsize
            ends = np.cumsum(sizes) + offset
            file.write((ends - sizes).tobytes())
            offset = int(ends[-1]) if len(ends) else offset
        file.write(struct.pack("<q", 0))
        before = 0
        for lengths in _lengths(length_files):
            seen = np.cumsum(lengths > 0, dtype=np.int64) + before
            file.write(seen.tobytes())
            before = int(seen[-1]) if len(seen) else before
    return documents, tokens


def copy_into(target: Path, offset: int, source: Path) -> None:
    """Copy a whole file into its place in a larger one, inside the kernel where it can."""
    try:
        out = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            with source.open("rb") as file:
                size = left = os.fstat(file.fileno()).st_size
                while left:
                    done = os.copy_file_range(file.fileno(), out, left, None, offset)
                    if not done:
                        raise DataError(f"{source}: became shorter while it was read")
                    offset, left = offset + done, left - done
                begin_to_store(out, offset - size, size)
        finally:
            os.close(out)
    except OSError as error:
        raise disk_error("write", target, error) from None


def _lengths(files: Sequence[Path]) -> Iterator[np.ndarray]:
    for file in files:
        yield np.fromfile(file, dtype="<i4")
