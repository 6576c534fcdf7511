"""Writes Megatron's `.bin/.idx` pair, byte for byte, in bounded memory (`indexed_reader` describes the format).

Megatron keeps all lengths in Python lists; here each input piece has a file of them, which is streamed three times.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ingot.data.formats.indexed_reader import DTYPES, HEADER, MAGIC
from ingot.errors import DataError, disk_error
from ingot.storage.atomic import begin_to_store, whole_file

DTYPE_CODES = {name: code for code, name in DTYPES.items()}


def default_dtype(vocab_size: int) -> str:
    """The choice of Megatron and NeoX, which keep the last few values of uint16 free."""
    return "uint16" if vocab_size < 65500 else "int32"


def write_idx(path: Path, dtype: np.dtype, length_files: Sequence[Path]) -> None:
    """Write an `.idx` from files of document lengths (int32, 0 for an empty document)."""
    if dtype.name not in DTYPE_CODES:
        raise DataError(f"token_type={dtype.name} does not exist in the indexed format; use {', '.join(DTYPE_CODES)}")
    documents = sequences = 0
    for lengths in _lengths(length_files):
        documents += len(lengths)
        sequences += int(np.count_nonzero(lengths))
    with whole_file(path) as file:
        file.write(HEADER.pack(MAGIC, 1, DTYPE_CODES[dtype.name], sequences, documents + 1))
        for lengths in _lengths(length_files):
            file.write(lengths[lengths > 0].tobytes())
        offset = 0
        for lengths in _lengths(length_files):
            sizes = lengths[lengths > 0].astype(np.int64) * dtype.itemsize
            file.write((np.cumsum(sizes) - sizes + offset).tobytes())
            offset += int(sizes.sum())
        file.write(bytes(8))
        before = 0
        for lengths in _lengths(length_files):
            filled = lengths > 0
            file.write((np.cumsum(filled, dtype=np.int64) + before).tobytes())
            before += int(np.count_nonzero(filled))


def copy_into(target: Path, offset: int, source: Path) -> None:
    """Copy a file to an offset of a larger one, within the operating system's kernel where possible."""
    try:
        out = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            with source.open("rb") as file:
                size = left = os.fstat(file.fileno()).st_size
                while left:
                    done = os.copy_file_range(file.fileno(), out, left, None, offset)
                    if not done:
                        raise DataError(f"{source} became shorter while it was read; run the command again")
                    offset, left = offset + done, left - done
                begin_to_store(out, offset - size, size)
        finally:
            os.close(out)
    except OSError as error:
        raise disk_error("write", target, error) from None


def _lengths(files: Sequence[Path]) -> Iterator[np.ndarray]:
    for file in files:
        yield np.fromfile(file, dtype="<i4")
