"""The stream of all tokens, in order, cut into shards.

A packer never sees a token: it knows how many each part holds, and says which ranges of which parts make a shard as
soon as they are there. So a shard depends on the input alone, not on pieces or workers, and the rules of packing
(wrapped, whole documents, text, one flat file) stand in one place.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.data.formats import mds_writer as mds
from ingot.data.prepare.input_files import ReadOptions


@dataclass(frozen=True)
class PackingPlan:
    """What the output shall be. Two runs with the same plan and input give the same bytes."""

    format: str
    is_text: bool  # kept as text
    dtype: str
    before: list[int]  # tokens put before each document
    after: list[int]  # tokens put after each document
    concat_tokens: int
    no_wrap: bool
    drop_last: bool
    max_samples: int | None
    compression: str | None
    size_limit: int
    options: ReadOptions

    @property
    def shard_config(self) -> dict[str, Any]:
        """What every MDS shard says of itself."""
        return mds.shard_config("str" if self.is_text else f"ndarray:{self.dtype}", self.compression, self.size_limit)


def part_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """The files of a part: its data, and the lengths of its documents."""
    return folder / "parts" / f"{number:08}.data", folder / "parts" / f"{number:08}.lengths"


@dataclass
class Shard:
    number: int
    parts: list[list[int]]  # [part, start, end): units of that part; for indexed [part, offset in the whole, 0]
    irregular: bytes = b""


class Packer:
    """Cuts the stream of all parts, in order, into shards. A unit is a token, or a byte where text stays text."""

    needs_lengths = True
    """Whether the lengths of documents are needed again, after a crash or at the end."""

    def __init__(self, plan: PackingPlan, folder: Path):
        self.plan, self.folder = plan, folder
        self.limit = 1 << 62 if plan.max_samples is None else plan.max_samples
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

    def add(self, part: int, units: int) -> list[Shard]:
        """The shards that can be written now that this part is there too."""
        begin = self.end
        self.end += units
        if units:
            self.spans.append((part, begin, self.end))
        return list(self._plan(part, begin))

    def finish(self) -> list[Shard]:
        """The shards of what is left."""
        self.finished = True
        return list(self._plan_rest())

    def _plan(self, part: int, begin: int) -> Iterable[Shard]:
        raise NotImplementedError

    def _plan_rest(self) -> Iterable[Shard]:
        return ()

    def _document_lengths(self, part: int) -> np.ndarray:
        return np.fromfile(part_paths(self.folder, part)[1], dtype="<i4")

    def _shard(self, start: int, end: int, samples: int, units: int, irregular: bytes = b"") -> Shard:
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
        return Shard(len(self.shard_units) - 1, parts, irregular)


class _TokenPacker(Packer):
    """Samples of equal length, back to back or, as LLM Foundry's no_wrap has it, each begun by a document: what does
    not fill its sample is then left out."""

    def __init__(self, plan: PackingPlan, folder: Path):
        super().__init__(plan, folder)
        self.needs_lengths = plan.no_wrap
        length, itemsize = plan.concat_tokens, np.dtype(plan.dtype).itemsize
        sample = 4 + len(mds.row_head(length, itemsize)) + length * itemsize  # with its offset
        # what Streaming's writer puts into a shard before it begins the next
        self.per_shard = max(1, (plan.size_limit - mds.header_bytes(plan.shard_config)) // sample)
        self.next_start = 0

    def _plan(self, part: int, begin: int) -> Iterator[Shard]:
        length = self.plan.concat_tokens
        if self.plan.no_wrap:
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

    def _plan_rest(self) -> Iterator[Shard]:
        if self.next_start < self.end and not self.plan.no_wrap and not self.plan.drop_last:
            self.pending.append(self.next_start)  # the last sample may be shorter
        while count := min(len(self.pending), self.per_shard, self.limit - self.samples):
            yield self._take(count)

    def _take(self, samples: int) -> Shard:
        starts, self.pending = np.array(self.pending[:samples], dtype=np.int64), self.pending[samples:]
        begin, end = int(starts[0]), min(int(starts[-1]) + self.plan.concat_tokens, self.end)
        units = min(samples * self.plan.concat_tokens, end - begin)
        return self._shard(begin, end, samples, units, (starts - begin).tobytes() if self.plan.no_wrap else b"")


class _TextPacker(Packer):
    """Documents as they are, as many in a shard as Streaming would put there."""

    def __init__(self, plan: PackingPlan, folder: Path):
        super().__init__(plan, folder)
        self.start = 0
        self.used = self.base = mds.header_bytes(plan.shard_config)

    def _plan(self, part: int, begin: int) -> Iterator[Shard]:
        for size in self._document_lengths(part).tolist():
            if self.is_full:
                break
            if size == 0:
                continue
            if self.used + size + 8 > self.plan.size_limit:
                yield from self._plan_rest()
            self.pending.append(size)
            self.used += size + 8

    def _plan_rest(self) -> Iterator[Shard]:
        if self.pending:
            sizes, start = np.array(self.pending, dtype=np.int64), self.start
            self.start += sum(self.pending)
            self.pending, self.used = [], self.base
            yield self._shard(start, self.start, len(sizes), self.start - start, sizes.tobytes())


class _IndexedPacker(Packer):
    """Every part to its place in one `.bin`."""

    def _plan(self, part: int, begin: int) -> Iterator[Shard]:
        self.spans.clear()  # a part is in one shard only
        if units := self.end - begin:
            self.shard_units.append(units)
            yield Shard(len(self.shard_units) - 1, [[part, begin, 0]])


def make_packer(plan: PackingPlan, folder: Path) -> Packer:
    if plan.format == "indexed":
        return _IndexedPacker(plan, folder)
    return _TextPacker(plan, folder) if plan.is_text else _TokenPacker(plan, folder)
