"""Reads the indexed format of Megatron and NeoX: PREFIX.bin is all token ids, PREFIX.idx describes them.

    "MMIDIDX\\0\\0" | uint64 version 1 | uint8 dtype | uint64 S | uint64 D
    int32 length[S], in tokens | int64 pointer[S], in bytes | int64 document[D], the first sequence of each, then S

Megatron builds document, sample and shuffle indices over it: gigabytes for a large corpus. Here the .bin is one long
array, and the .idx is only checked and asked where a sequence starts.
"""

import hashlib
import re
import struct
from itertools import accumulate
from pathlib import Path

import numpy as np

from ingot.data.formats.mds_reader import map_file
from ingot.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes, unpadded
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are floats
CHUNK = 1 << 20  # entries checked at a time
CHECKED_CHUNKS = 8  # of a larger file (a terabyte of text), only the first and last chunks, so that opening stays fast


class IndexFile:
    """A checked .idx file."""

    def __init__(self, path: Path):
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(HEADER.size)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        if len(head) < HEADER.size or head[:9] != MAGIC:
            raise DataError(f"{path} does not start like a Megatron index; is it another kind of file?")
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != 1:
            raise DataError(f"{path} has version {version}; only version 1 is supported")
        if code not in DTYPES:
            known = ", ".join(f"{c} {name}" for c, name in DTYPES.items())
            raise DataError(f"{path} has the unknown dtype code {code} (known: {known})")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if size not in (expected, expected + sequences):  # multimodal files add one byte per sequence
            raise DataError(
                f"{path} has {size:,} bytes, but {sequences:,} sequences and {documents:,} document entries need "
                f"{expected:,}; copy or prepare it again"
            )
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        # The arrays below are unaligned: index only slices of them, since numpy copies.
        self._map = map_file(path, size)
        self.lengths = np.frombuffer(self._map, "<i4", sequences, HEADER.size)
        self.pointers = np.frombuffer(self._map, "<i8", sequences, HEADER.size + 4 * sequences)
        self.documents = np.frombuffer(self._map, "<i8", documents, HEADER.size + 12 * sequences)
        self.tokens = self._check()

    def _check(self) -> int:
        """Check that sequences are back to back and documents in order; returns the number of tokens."""
        sequences, width = len(self.lengths), self.dtype.itemsize
        if len(self.documents) == 0 or self.documents[0] != 0 or self.documents[-1] != sequences:
            raise DataError(f"{self.path} has document entries that do not cover its sequences; prepare it again")
        if sequences == 0:
            return 0
        if self.pointers[0] != 0:
            raise DataError(f"{self.path} has pointers that do not start at 0; copy or prepare it again")
        for i in _chunks(sequences):
            lengths = self.lengths[i : i + CHUNK].astype(np.int64)
            if (lengths < 0).any():
                raise DataError(f"{self.path} has a sequence of negative length; copy or prepare it again")
            steps = np.diff(self.pointers[i : i + CHUNK + 1])
            if (steps != lengths[: len(steps)] * width).any():
                raise DataError(f"{self.path} has pointers that do not match its lengths; copy or prepare it again")
        for i in _chunks(len(self.documents)):
            if (np.diff(self.documents[i : i + CHUNK + 1]) < 0).any():
                raise DataError(f"{self.path} has documents out of order; copy or prepare it again")
        return int(self.pointers[-1]) // width + int(self.lengths[-1])

    def digest(self) -> str:
        """A hash of both ends of the file, enough to tell one corpus from another."""
        return hashlib.sha256(self._map[:65_536] + self._map[-65_536:]).hexdigest()

    def token_at(self, sequence: int) -> int:
        """The position of a sequence's first token; one past the last sequence, the number of tokens."""
        return int(self.pointers[sequence]) // self.dtype.itemsize if sequence < len(self.pointers) else self.tokens


def _chunks(entries: int) -> list[int]:
    starts = list(range(0, entries, CHUNK))
    half = CHECKED_CHUNKS // 2
    return starts if len(starts) <= CHECKED_CHUNKS else starts[:half] + starts[-half:]


def split_edges(split: str, sequences: int, rule: str) -> list[int]:
    """The sequences at which training, validation and test data start, and where the last ends: [4].

    Megatron rounds each edge. GPT-NeoX rounds the size of each part, then subtracts the excess from every edge.
    """
    numbers = [float(number) for number in re.findall(r"[.0-9]+", split)]
    *_, total = accumulate(numbers)  # accumulated as they do: `sum` rounds differently
    shares = [number / total for number in [*numbers, 0.0, 0.0][:3]]
    if rule == "megatron":
        return [0, *(round(edge * sequences) for edge in accumulate(shares))]
    edges = list(accumulate(round(share * sequences) for share in shares))
    return [0, *(edge - (edges[-1] - sequences) for edge in edges)]


class FlatShard:
    """A file of tokens back to back."""

    def __init__(self, path: Path, dtype: np.dtype, tokens: int):
        self.path, self.tokens, self.dtype = path, tokens, dtype
        self._tokens = np.frombuffer(map_file(path, tokens * dtype.itemsize), dtype)

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens from `start` on."""
        out[:] = self._tokens[start : start + len(out)]
