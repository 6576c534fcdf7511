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

from ingot.data import mds_writer as mds
from ingot.data.input_files import ReadOptions


@dataclass(frozen=True)
class Plan:
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

    def __init__(self, plan: Plan, folder: Path):
        self.plan, self.folder = plan, folder
        self.limit = 1 << 62 if plan.max_samples is None else plan.max_samples
        self.spans: deque[tuple[int, int, int]] = deque()  # (part, its first unit in the stream, its end)
        self.end = 0  # units so far
        self.finished = False
        self.shard_units: list[int] = []  # units in each planned shard
        self.samples = 0  # in planned shards

    @property
    def is_full(self) -> bool:
        return self.samples + self.pending_samples() >= self.limit

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

    def pending_samples(self) -> int:
        """Samples that are there and in no planned shard."""
        return 0

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


class _WrappedPacker(Packer):
    """Samples of equal length, back to back: sample i is tokens [i * L, (i + 1) * L)."""

    needs_lengths = False

    def __init__(self, plan: Plan, folder: Path):
        super().__init__(plan, folder)
        self.per_shard = samples_per_shard(plan)
        self.start = 0

    def pending_samples(self) -> int:
        return (self.end - self.start) // self.plan.concat_tokens

    def _plan(self, part: int, begin: int) -> Iterator[Shard]:
        while min(self.pending_samples(), self.limit - self.samples) >= self.per_shard:
            yield self._take(self.per_shard)

    def _plan_rest(self) -> Iterator[Shard]:
        rest = self.pending_samples()
        if not self.plan.drop_last:
            rest = -(-(self.end - self.start) // self.plan.concat_tokens)  # the last one may be shorter
        last = self.samples + min(rest, self.limit - self.samples)
        while self.samples < last:
            yield self._take(min(last - self.samples, self.per_shard))

    def _take(self, samples: int) -> Shard:
        start = self.start
        self.start = min(start + samples * self.plan.concat_tokens, self.end)
        return self._shard(start, self.start, samples, self.start - start)


class _DocumentPacker(Packer):
    """Samples that begin with a document; what does not fill its sample is left out, as LLM Foundry's no_wrap does."""

    def __init__(self, plan: Plan, folder: Path):
        super().__init__(plan, folder)
        self.per_shard = samples_per_shard(plan)
        self.starts: list[int] = []
        self.sample_start = 0

    def pending_samples(self) -> int:
        return len(self.starts)

    def _plan(self, part: int, begin: int) -> Iterator[Shard]:
        ends = np.cumsum(self._document_lengths(part), dtype=np.int64) + begin
        length = self.plan.concat_tokens
        while (document := int(np.searchsorted(ends, self.sample_start + length))) < len(ends):
            self.starts.append(self.sample_start)
            self.sample_start = int(ends[document])
        while min(len(self.starts), self.limit - self.samples) >= self.per_shard:
            yield self._take(self.per_shard)

    def _plan_rest(self) -> Iterator[Shard]:
        while count := min(len(self.starts), self.per_shard, self.limit - self.samples):
            yield self._take(count)

    def _take(self, samples: int) -> Shard:
        starts, self.starts = np.array(self.starts[:samples], dtype=np.int64), self.starts[samples:]
        length = self.plan.concat_tokens
        begin, end = int(starts[0]), int(starts[-1]) + length
        return self._shard(begin, end, samples, samples * length, (starts - begin).tobytes())


class _TextPacker(Packer):
    """Documents as they are, as many in a shard as Streaming would put there."""

    def __init__(self, plan: Plan, folder: Path):
        super().__init__(plan, folder)
        self.sizes: list[int] = []
        self.start = 0
        self.used = self.base = mds.header_bytes(plan.shard_config)

    def pending_samples(self) -> int:
        return len(self.sizes)

    def _plan(self, part: int, begin: int) -> Iterator[Shard]:
        for size in self._document_lengths(part).tolist():
            if self.is_full:
                break
            if size == 0:
                continue
            if self.used + size + 8 > self.plan.size_limit:
                yield from self._plan_rest()
            self.sizes.append(size)
            self.used += size + 8

    def _plan_rest(self) -> Iterator[Shard]:
        if self.sizes:
            sizes, start = np.array(self.sizes, dtype=np.int64), self.start
            self.start += sum(self.sizes)
            self.sizes, self.used = [], self.base
            yield self._shard(start, self.start, len(sizes), self.start - start, sizes.tobytes())


class _IndexedPacker(Packer):
    """Every part to its place in one `.bin`."""

    def _plan(self, part: int, begin: int) -> Iterator[Shard]:
        self.spans.clear()  # a part is in one shard only
        if units := self.end - begin:
            self.shard_units.append(units)
            yield Shard(len(self.shard_units) - 1, [[part, begin, 0]])


def make_packer(plan: Plan, folder: Path) -> Packer:
    if plan.format == "indexed":
        return _IndexedPacker(plan, folder)
    if plan.is_text:
        return _TextPacker(plan, folder)
    return _DocumentPacker(plan, folder) if plan.no_wrap else _WrappedPacker(plan, folder)


def samples_per_shard(plan: Plan) -> int:
    """How many samples Streaming's writer puts into a shard before it begins the next."""
    length, itemsize = plan.concat_tokens, np.dtype(plan.dtype).itemsize
    sample = 4 + len(mds.row_head(length, itemsize)) + length * itemsize  # with its offset
    return max(1, (plan.size_limit - mds.header_bytes(plan.shard_config)) // sample)
