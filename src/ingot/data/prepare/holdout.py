"""Divides documents between a split and the validation documents that are held out of it.

A document is held out if the hash of its text is below a threshold: neither the order of the input nor the number of
workers matters, and copies of a text are all on one side. Texts that differ slightly are different documents here.
Only the beginning of a text is hashed, since a huge one is never in memory as a whole.

With a fraction, the threshold is known. With a number of documents it is found first, by hashing all of them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ingot.data.prepare.options import PrepareOptions
from ingot.data.prepare.pool import InProcess, WorkerPool
from ingot.data.prepare.progress import follow
from ingot.data.sources.documents import TextBlock
from ingot.data.sources.input_files import SourceFile
from ingot.data.sources.pieces import Piece, plan_pieces, read_piece
from ingot.errors import DataError

VAL = "val"
_HASHED_BYTES = 1 << 16  # fewer than any block of a huge text has
_HASHES = 1 << 64


@dataclass(frozen=True)
class Holdout:
    """The documents that a split takes: those that are held out, or all others."""

    takes_held_out: bool
    below: int = 0
    """Documents whose hash is below are held out."""

    def select(self, blocks: Iterator[TextBlock]) -> Iterator[tuple[TextBlock, int]]:
        """The blocks with the documents of this split, and how many documents of each the other split takes. Empty ones
        count as not held out."""
        is_open = takes_open = False  # whether a document continues in the next block, and whether it is ours
        for block in blocks:
            own: list[bool] = []
            others = 0
            for index, text in enumerate(block.texts):
                if continues := is_open and index == 0:
                    taken = takes_open
                else:
                    taken = (bool(text) and hash_text(text) < self.below) == self.takes_held_out
                own.append(taken)
                ends = block.ends or index < len(block.texts) - 1
                others += ends and not taken and (continues or bool(text))
            is_open = bool(own) and not block.ends
            takes_open = is_open and own[-1]
            texts = [text for text, taken in zip(block.texts, own, strict=True) if taken]
            records = block.records[np.array(own, bool)]
            yield TextBlock(texts, records, block.bad, block.record_count, block.path, block.ends), others


def hash_text(text: bytes) -> int:
    """Where a document is among all possible ones, from 0 to 2**64."""
    return xxhash.xxh3_64_intdigest(text[:_HASHED_BYTES])


@dataclass(frozen=True)
class HashScan:
    """A piece whose smallest hashes are wanted."""

    piece: Piece
    options: PrepareOptions
    count: int

    def run(self) -> dict[str, Any]:
        """The smallest hashes of different documents."""
        blocks = read_piece(self.piece, self.options, lambda text, low, high: high)
        found = np.zeros(0, np.uint64)
        is_open = False
        for block in blocks:
            texts = block.texts[1:] if is_open else block.texts
            is_open = bool(block.texts) and not block.ends
            hashes = np.array([hash_text(text) for text in texts if text], np.uint64)
            found = np.unique(np.concatenate([found, hashes]))[: self.count]
        return {"hashes": found}


def find_threshold(options: PrepareOptions, files: Sequence[SourceFile], workers: int) -> int:
    """Documents whose hash is below this are held out."""
    if options.val_fraction is not None:
        return int(options.val_fraction * _HASHES)
    wanted = options.val_documents or 0
    found = np.zeros(0, np.uint64)
    size = sum(file.size for file in files)
    pieces = follow("choosing validation documents", plan_pieces(files, False, options), lambda p: p.size, size)
    running: set[Future[dict[str, Any]]] = set()
    with closing(WorkerPool(workers, False) if workers else InProcess()) as pool:
        pool.load(None, "auto")
        while True:
            while len(running) < pool.slots and (piece := next(pieces, None)) is not None:
                running.add(pool.submit(HashScan(piece, options, wanted + 1), lambda counts: None))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                found = np.unique(np.concatenate([found, future.result()["hashes"]]))[: wanted + 1]
    if len(found) <= wanted:
        raise DataError(
            f"--val_documents {wanted}: the input has {len(found)} different documents, and none would be left to "
            "train on; hold out fewer, or divide the text into more with --documents line or paragraph"
        )
    return int(found[wanted])


def check_division(options: PrepareOptions, held_out: int, others: int, files: Sequence[SourceFile]) -> None:
    """Refuse a division that leaves one of the splits without a document."""
    if bool(held_out) == bool(others):  # none at all is another error
        return
    count, path = held_out + others, Path(files[0].path).name
    where = path if len(files) == 1 else f"the {len(files)} input files"
    if count == 1:
        raise DataError(
            f"{where}: one document, which cannot be divided into training and validation; make several of it with "
            "--documents paragraph or line"
        )
    what = "no document is held out" if others else "every document is held out"
    raise DataError(f"{where}: {what} of {count:,} at --val_fraction {options.val_fraction}; use --val_documents N")
