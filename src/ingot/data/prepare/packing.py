"""The stream of all tokens, in order, cut into shards.

A packer never sees a token: it knows how many each part holds, and says which ranges of which parts make a shard as
soon as they are there. So a shard depends on the input alone, not on pieces or workers, and the rules of packing
(wrapped, whole documents, text, one flat file) are in one place.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.config.base import Section
from ingot.data.formats import indexed_writer as indexed
from ingot.data.formats import mds_writer as mds
from ingot.data.prepare.options import PrepareOptions
from ingot.data.tokenizer import Tokenizer
from ingot.errors import DataError


class PackingPlan(Section):
    """What the output is: the options, for one field of the documents, and what follows from the tokenizer. Two runs
    with the same plan and input write the same bytes."""

    options: PrepareOptions
    is_text: bool
    """Text is kept as text."""
    dtype: str
    """Type of the stored tokens."""
    before: list[int]
    """Tokens put before each document."""
    after: list[int]
    """Tokens put after each document."""

    @staticmethod
    def of(options: PrepareOptions, tokenizer: Tokenizer | None) -> "PackingPlan":
        """The plan for some options and the tokenizer that they name."""
        if tokenizer is None:
            return PackingPlan(options=options, is_text=True, dtype="uint8", before=[], after=[])
        before, after = tokenizer.encode(options.bos_text), _eos_ids(tokenizer, options.eos_text)
        dtype = _token_dtype(options, tokenizer.vocab_size)
        return PackingPlan(options=options, is_text=False, dtype=dtype, before=before, after=after)

    def for_key(self, key: str) -> "PackingPlan":
        """The plan of one of several fields."""
        return self.model_copy(update={"options": self.options.model_copy(update={"json_keys": (key,)})})

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the output's bytes. Its hash is kept with the output, so keys and values never change."""
        shared = ("format", "concat_tokens", "no_wrap", "drop_last", "compression", "size_limit")
        reading = ("key", "max_document_bytes", "max_expansion")
        options = {name: getattr(self.options, name) for name in reading}
        return {
            **{name: getattr(self.options, name) for name in shared},
            **{name: getattr(self, name) for name in ("is_text", "dtype", "before", "after")},
            "max_samples": self.options.sample_limit,
            "options": options | {"skip_bad": self.options.on_error == "skip"},
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
        raise DataError("the tokenizer names no end of document: give eos_text, or eos_text='' to have none")
    if tokenizer.encode("a", special_tokens=True)[-1] == tokenizer.eos_id:
        return []  # it adds its own
    return [tokenizer.eos_id]


def part_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """The files of a part: its data, and the lengths of its documents."""
    return folder / "parts" / f"{number:08}.data", folder / "parts" / f"{number:08}.lengths"


@dataclass
class ShardPlan:
    number: int
    parts: list[list[int]]  # [part, start, end): units of that part; for indexed [part, offset in the whole, 0]
    irregular: bytes = b""


class Packer:
    """Cuts the stream of all parts, in order, into shards. A unit is a token, or a byte where text stays text."""

    needs_lengths = True
    """Whether the lengths of documents are needed again, after a crash or at the end."""

    def __init__(self, plan: PackingPlan, folder: Path):
        self.plan, self.folder = plan, folder
        self.limit = 1 << 62 if plan.options.sample_limit is None else plan.options.sample_limit
        self.spans: deque[tuple[int, int, int]] = deque()  # (part, its first unit in the stream, its end)
        self.end = 0  # units so far
        self.finished = False
        self.shard_units: list[int] = []  # units in each planned shard
        self.samples = 0  # in planned shards
        self.pending: list[int] = []  # where samples start that are in no planned shard; of texts, their sizes

    @property
    def is_full(self) -> bool:
        return self.samples + len(self.pending) >= self.limit

    @property
    def open_part(self) -> int:
        """Parts below this one are only needed by shards that are already planned."""
        return self.spans[0][0] if self.spans and not self.finished else 1 << 60

    def add(self, part: int, units: int) -> list[ShardPlan]:
        """The shards that can be written now that this part is there too."""
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

    def _shard(self, start: int, end: int, samples: int, units: int, irregular: bytes = b"") -> ShardPlan:
        """The next shard, of units [start, end) of the stream; the parts before them are forgotten."""
        while self.spans and self.spans[0][2] <= start:
            self.spans.popleft()
        parts = [
            [part, max(start, first) - first, min(end, last) - first]
            for part, first, last in self.spans
            if first < end and last > start
        ]
        self.samples += samples
        self.shard_units.append(units)
        return ShardPlan(len(self.shard_units) - 1, parts, irregular)


class _TokenPacker(Packer):
    """Samples of equal length, back to back or, as LLM Foundry's no_wrap has it, each starting with a document: what
    does not fit in its sample is then dropped."""

    def __init__(self, plan: PackingPlan, folder: Path):
        super().__init__(plan, folder)
        self.needs_lengths = plan.options.no_wrap
        length, itemsize = plan.options.concat_tokens, np.dtype(plan.dtype).itemsize
        sample = 4 + len(mds.row_head(length, itemsize)) + length * itemsize  # with its offset
        # what Streaming's writer puts into a shard before it begins the next
        self.per_shard = max(1, (plan.options.size_limit - mds.header_bytes(plan.shard_config)) // sample)
        self.next_start = 0

    def _plan(self, part: int, begin: int) -> Iterator[ShardPlan]:
        length = self.plan.options.concat_tokens
        if self.plan.options.no_wrap:
            ends = np.cumsum(self._document_lengths(part), dtype=np.int64) + begin
            while (document := int(np.searchsorted(ends, self.next_start + length))) < len(ends):
                self.pending.append(self.next_start)
                self.next_start = int(ends[document])
        else:
            whole = (self.end - self.next_start) // length
            self.pending += range(self.next_start, self.next_start + whole * length, length)
            self.next_start += whole * length
        while min(len(self.pending), self.limit - self.samples) >= self.per_shard:
            yield self._take(self.per_shard)

    def _plan_rest(self) -> Iterator[ShardPlan]:
        if self.next_start < self.end and not self.plan.options.no_wrap and not self.plan.options.drop_last:
            self.pending.append(self.next_start)  # the last sample may be shorter
        while count := min(len(self.pending), self.per_shard, self.limit - self.samples):
            yield self._take(count)

    def _take(self, samples: int) -> ShardPlan:
        starts, self.pending = np.array(self.pending[:samples], dtype=np.int64), self.pending[samples:]
        begin, end = int(starts[0]), min(int(starts[-1]) + self.plan.options.concat_tokens, self.end)
        units = min(samples * self.plan.options.concat_tokens, end - begin)
        return self._shard(begin, end, samples, units, (starts - begin).tobytes() if self.plan.options.no_wrap else b"")


class _TextPacker(Packer):
    """Documents as they are, as many in a shard as Streaming would put there."""

    def __init__(self, plan: PackingPlan, folder: Path):
        super().__init__(plan, folder)
        self.start = 0
        self.used = self.base = mds.header_bytes(plan.shard_config)

    def _plan(self, part: int, begin: int) -> Iterator[ShardPlan]:
        for size in self._document_lengths(part).tolist():
            if self.is_full:
                break
            if size == 0:
                continue
            if self.used + size + 8 > self.plan.options.size_limit:
                yield from self._plan_rest()
            self.pending.append(size)
            self.used += size + 8

    def _plan_rest(self) -> Iterator[ShardPlan]:
        if self.pending:
            sizes, start = np.array(self.pending, dtype=np.int64), self.start
            self.start += sum(self.pending)
            self.pending, self.used = [], self.base
            yield self._shard(start, self.start, len(sizes), self.start - start, sizes.tobytes())


class _IndexedPacker(Packer):
    """Every part to its place in one `.bin`."""

    def _plan(self, part: int, begin: int) -> Iterator[ShardPlan]:
        self.spans.clear()  # a part is in one shard only
        if units := self.end - begin:
            self.shard_units.append(units)
            yield ShardPlan(len(self.shard_units) - 1, [[part, begin, 0]])


def make_packer(plan: PackingPlan, folder: Path) -> Packer:
    if plan.options.format == "indexed":
        return _IndexedPacker(plan, folder)
    return _TextPacker(plan, folder) if plan.is_text else _TokenPacker(plan, folder)
