"""Cuts the stream of all tokens, in input order, into shards.

A packer never sees a token. It knows how many tokens each part holds, and plans a shard as ranges of parts as soon as
these exist. So a shard depends on the input alone, not on pieces or workers.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.data.formats import indexed_writer as indexed
from ingot.data.formats import mds_writer as mds
from ingot.data.prepare.holdout import Holdout
from ingot.data.prepare.options import PrepareOptions
from ingot.data.tokenizer import Tokenizer
from ingot.errors import DataError


@dataclass(frozen=True)
class PackingPlan:
    """What the output is: the options, for one field of the documents, and what follows from the tokenizer. Two runs
    with the same plan and input write the same bytes."""

    options: PrepareOptions
    is_text: bool  # documents are kept as text
    dtype: str  # of the stored tokens
    before: list[int]  # tokens put before each document
    after: list[int]  # tokens put after each document
    holdout: Holdout | None = None  # which documents, if not all

    @staticmethod
    def of(options: PrepareOptions, tokenizer: Tokenizer | None) -> "PackingPlan":
        """The plan for some options and the tokenizer that they name."""
        if tokenizer is None:
            return PackingPlan(options, is_text=True, dtype="uint8", before=[], after=[])
        before, after = tokenizer.encode(options.bos_text), _eos_ids(tokenizer, options.eos_text)
        return PackingPlan(options, False, _token_dtype(options, tokenizer.vocab_size), before, after)

    def for_key(self, key: str) -> "PackingPlan":
        """The plan of one of several fields."""
        return replace(self, options=self.options.model_copy(update={"json_keys": (key,)}))

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the output's bytes. Its hash is kept with the output, so keys and values never change."""
        options = self.options
        writing = ("format", "concat_tokens", "no_wrap", "drop_last", "compression", "size_limit")
        reading = {name: getattr(options, name) for name in ("key", "max_document_bytes", "max_expansion")}
        if options.documents != "file":
            reading["documents"] = options.documents
        if self.holdout:
            wanted = ["val_fraction", options.val_fraction, "val_documents", options.val_documents]
            reading["holdout"] = [self.holdout.takes_held_out, *wanted]
        return {
            **{name: getattr(options, name) for name in writing},
            **{name: getattr(self, name) for name in ("is_text", "dtype", "before", "after")},
            "max_samples": options.sample_limit,
            "options": {**reading, "skip_bad": options.on_error == "skip"},
        }

    @property
    def shard_config(self) -> dict[str, Any]:
        """What every MDS shard says of itself."""
        encoding = "str" if self.is_text else f"ndarray:{self.dtype}"
        return mds.shard_config(encoding, self.options.compression, self.options.size_limit)


def _token_dtype(options: PrepareOptions, vocab_size: int) -> str:
    kind = options.token_type
    if kind == "auto":
        if options.format == "indexed":
            return indexed.default_dtype(vocab_size)
        return "uint16" if vocab_size <= 1 << 16 else "uint32"
    if np.iinfo(kind).max < vocab_size - 1:
        raise DataError(f"token_type={kind} cannot hold the {vocab_size:,} tokens of the vocabulary")
    return kind


def _eos_ids(tokenizer: Tokenizer, eos_text: str | None) -> list[int]:
    if eos_text is not None:
        return tokenizer.encode(eos_text)
    if tokenizer.eos_id is None:
        raise DataError("the tokenizer has no end-of-document token; set --eos_text, or --eos_text '' for none")
    if tokenizer.encode("a", special_tokens=True)[-1] == tokenizer.eos_id:
        return []  # it adds its own
    return [tokenizer.eos_id]


def part_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """The files of a part: its data, and the lengths of its documents."""
    return folder / "parts" / f"{number:08}.data", folder / "parts" / f"{number:08}.lengths"


@dataclass(frozen=True)
class ShardPlan:
    """One shard to write."""

    number: int
    parts: list[tuple[int, int, int]]  # (part, start, end): units of that part; indexed: (part, offset in the whole, 0)
    sample_starts: np.ndarray | None = None  # no_wrap: the first token of each sample
    text_sizes: np.ndarray | None = None  # text: the bytes of each document


class Packer:
    """Cuts the stream of all parts into shards. A unit is a token, or a byte where text stays text."""

    needs_lengths = True
    """Whether the lengths of documents are needed again, after a crash or at the end."""

    def __init__(self, plan: PackingPlan, folder: Path):
        self.options, self.folder = plan.options, folder
        self.limit = 1 << 62 if plan.options.sample_limit is None else plan.options.sample_limit
        self.spans: deque[tuple[int, int, int]] = deque()  # (part, its first unit in the stream, its end)
        self.end = 0  # units so far
        self.finished = False
        self.shard_units: list[int] = []  # units in each planned shard
        self.samples = 0  # in planned shards
        self.pending: list[int] = []  # samples in no planned shard: where each starts, or its size if it is text

    @property
    def is_full(self) -> bool:
        return self.samples + len(self.pending) >= self.limit

    @property
    def open_part(self) -> int:
        """Parts below this one are only needed by shards that are already planned."""
        return self.spans[0][0] if self.spans and not self.finished else 1 << 60

    def add(self, part: int, units: int) -> list[ShardPlan]:
        """The shards that can be written now that this part exists."""
        begin = self.end
        self.end += units
        if units:
            self.spans.append((part, begin, self.end))
        return list(self._plan(part, begin))

    def finish(self) -> list[ShardPlan]:
        """The shards of what is left."""
        self.finished = True
        return list(self._plan_rest())

    def _plan(self, part: int, begin: int) -> Iterable[ShardPlan]:
        raise NotImplementedError

    def _plan_rest(self) -> Iterable[ShardPlan]:
        return ()

    def _document_lengths(self, part: int) -> np.ndarray:
        return np.fromfile(part_paths(self.folder, part)[1], dtype="<i4")

    def _take_parts(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Units [start, end) of the stream as ranges of parts; the parts before them are forgotten."""
        while self.spans and self.spans[0][2] <= start:
            self.spans.popleft()
        return [
            (part, max(start, first) - first, min(end, last) - first)
            for part, first, last in self.spans
            if first < end and last > start
        ]


class _TokenPacker(Packer):
    """Samples of equal length, back to back or, with LLM Foundry's no_wrap, each starting with a document: the rest of
    a document that does not fit in its sample is then dropped."""

    def __init__(self, plan: PackingPlan, folder: Path):
        super().__init__(plan, folder)
        self.needs_lengths = plan.options.no_wrap
        length, itemsize = plan.options.concat_tokens, np.dtype(plan.dtype).itemsize
        sample = 4 + len(mds.row_head(length, itemsize)) + length * itemsize  # with its offset
        # what Streaming's writer puts into a shard before it begins the next
        self.per_shard = max(1, (plan.options.size_limit - mds.header_bytes(plan.shard_config)) // sample)
        self.next_start = 0

    def _plan(self, part: int, begin: int) -> Iterator[ShardPlan]:
        length = self.options.concat_tokens
        if self.options.no_wrap:
            ends = np.cumsum(self._document_lengths(part), dtype=np.int64) + begin
            while (document := int(np.searchsorted(ends, self.next_start + length))) < len(ends):
                self.pending.append(self.next_start)
                self.next_start = int(ends[document])
        else:
            starts = range(self.next_start, self.end - length + 1, length)
            self.pending += starts
            self.next_start += len(starts) * length
        while min(len(self.pending), self.limit - self.samples) >= self.per_shard:
            yield self._shard(self.per_shard)

    def _plan_rest(self) -> Iterator[ShardPlan]:
        if self.next_start < self.end and not self.options.no_wrap and not self.options.drop_last:
            self.pending.append(self.next_start)  # the last sample may be shorter
        while count := min(len(self.pending), self.per_shard, self.limit - self.samples):
            yield self._shard(count)

    def _shard(self, samples: int) -> ShardPlan:
        length = self.options.concat_tokens
        starts, self.pending = np.array(self.pending[:samples], dtype=np.int64), self.pending[samples:]
        begin, end = int(starts[0]), min(int(starts[-1]) + length, self.end)
        self.samples += samples
        self.shard_units.append(min(samples * length, end - begin))
        sample_starts = starts - begin if self.options.no_wrap else None
        return ShardPlan(len(self.shard_units) - 1, self._take_parts(begin, end), sample_starts)


class _TextPacker(Packer):
    """Documents as they are, as many in a shard as Streaming would put there."""

    def __init__(self, plan: PackingPlan, folder: Path):
        super().__init__(plan, folder)
        self.start = 0
        self.used = self.header = mds.header_bytes(plan.shard_config)

    def _plan(self, part: int, begin: int) -> Iterator[ShardPlan]:
        for size in self._document_lengths(part).tolist():
            if self.is_full:
                break
            if size == 0:
                continue
            if self.used + size + 8 > self.options.size_limit:
                yield from self._plan_rest()
            self.pending.append(size)
            self.used += size + 8

    def _plan_rest(self) -> Iterator[ShardPlan]:
        if self.pending:
            sizes, start = np.array(self.pending, dtype=np.int64), self.start
            self.start += int(sizes.sum())
            self.pending, self.used = [], self.header
            self.samples += len(sizes)
            self.shard_units.append(self.start - start)
            parts = self._take_parts(start, self.start)
            yield ShardPlan(len(self.shard_units) - 1, parts, text_sizes=sizes)


class _IndexedPacker(Packer):
    """Every part at its place in one `.bin`."""

    def _plan(self, part: int, begin: int) -> Iterator[ShardPlan]:
        self.spans.clear()  # a part is in one shard only
        if units := self.end - begin:
            self.shard_units.append(units)
            yield ShardPlan(len(self.shard_units) - 1, [(part, begin, 0)])


def make_packer(plan: PackingPlan, folder: Path) -> Packer:
    if plan.options.format == "indexed":
        return _IndexedPacker(plan, folder)
    return _TextPacker(plan, folder) if plan.is_text else _TokenPacker(plan, folder)
