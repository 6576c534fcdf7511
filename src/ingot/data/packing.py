"""The stream of all tokens, in order, cut into shards.

A packer never sees a token: it knows how many each part holds, and says which ranges of which parts make a shard as
soon as they are there. So a shard depends on the input alone, not on pieces or workers, and the rules of packing
(wrapped, whole documents, text, one flat file) stand in one place.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

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
        self.spans: deque[tuple[int, int, int]] = deque()  # (part, its first unit in the stream, its end)
        self.end = 0  # units so far
        self.next_shard = 0
        self.finished = False
        self.shard_units: list[int] = []  # units in each planned shard
        self.samples = 0

    @property
    def is_full(self) -> bool:
        limit = self.plan.max_samples
        return limit is not None and self.samples + self.pending_samples() >= limit

    @property
    def open_part(self) -> int:
        """Parts below this one are only needed by shards that are already planned."""
        if self.finished:
            return 1 << 60
        return self.spans[0][0] if self.spans else 1 << 60

    def pending_samples(self) -> int:
        raise NotImplementedError

    def add(self, part: int, units: int) -> list[Shard]:
        raise NotImplementedError

    def finish(self) -> list[Shard]:
        raise NotImplementedError

    def _span(self, start: int, end: int) -> list[list[int]]:
        """The parts that hold units [start, end) of the stream; earlier parts are forgotten."""
        while self.spans and self.spans[0][2] <= start:
            self.spans.popleft()
        return [
            [part, max(start, first) - first, min(end, last) - first]
            for part, first, last in self.spans
            if first < end and last > start
        ]

    def _append(self, part: int, units: int) -> None:
        if units:
            self.spans.append((part, self.end, self.end + units))
            self.end += units

    def _plan(self, start: int, end: int, units: int, irregular: bytes = b"") -> Shard:
        shard = Shard(self.next_shard, self._span(start, end), irregular)
        self.next_shard += 1
        self.shard_units.append(units)
        return shard


class _WrappedPacker(Packer):
    """Samples of equal length, back to back: sample i is tokens [i * L, (i + 1) * L)."""

    needs_lengths = False

    def __init__(self, plan: Plan, folder: Path):
        super().__init__(plan, folder)
        self.per_shard = samples_per_shard(plan)
        self.start = 0

    def pending_samples(self) -> int:
        return (self.end - self.start) // self.plan.concat_tokens

    def add(self, part: int, units: int) -> list[Shard]:
        self._append(part, units)
        planned = []
        limit = self.plan.max_samples
        while self.pending_samples() >= self.per_shard and (limit is None or self.samples + self.per_shard <= limit):
            planned.append(self._take(self.per_shard * self.plan.concat_tokens))
        return planned

    def finish(self) -> list[Shard]:
        length, limit = self.plan.concat_tokens, self.plan.max_samples
        rest = self.end - self.start
        if self.plan.drop_last:
            rest -= rest % length
        if limit is not None:
            rest = min(rest, (limit - self.samples) * length)
        planned = []
        while rest > 0:
            count = min(rest, self.per_shard * length)
            planned.append(self._take(count))
            rest -= count
        self.finished = True
        return planned

    def _take(self, units: int) -> Shard:
        shard = self._plan(self.start, self.start + units, units)
        self.start += units
        self.samples += -(-units // self.plan.concat_tokens)
        return shard


class _DocumentPacker(Packer):
    """Samples that begin with a document; what does not fill its sample is left out, as LLM Foundry's no_wrap does."""

    def __init__(self, plan: Plan, folder: Path):
        super().__init__(plan, folder)
        self.per_shard = samples_per_shard(plan)
        self.starts: list[int] = []
        self.sample_start = 0

    def pending_samples(self) -> int:
        return len(self.starts)

    def add(self, part: int, units: int) -> list[Shard]:
        base = self.end
        self._append(part, units)
        ends = np.cumsum(np.fromfile(part_paths(self.folder, part)[1], dtype="<i4"), dtype=np.int64) + base
        while True:
            document = int(np.searchsorted(ends, self.sample_start + self.plan.concat_tokens))
            if document == len(ends):
                break
            self.starts.append(self.sample_start)
            self.sample_start = int(ends[document])
        planned = []
        while len(self.starts) >= self.per_shard and not self._over(self.per_shard):
            planned.append(self._take(self.per_shard))
        return planned

    def finish(self) -> list[Shard]:
        limit = self.plan.max_samples
        planned = []
        while count := min(
            len(self.starts), self.per_shard, limit - self.samples if limit is not None else len(self.starts)
        ):
            planned.append(self._take(count))
        self.finished = True
        return planned

    def _over(self, count: int) -> bool:
        return self.plan.max_samples is not None and self.samples + count > self.plan.max_samples

    def _take(self, count: int) -> Shard:
        starts, self.starts = self.starts[:count], self.starts[count:]
        relative = np.array(starts, dtype=np.int64) - starts[0]
        length = self.plan.concat_tokens
        self.samples += count
        return self._plan(starts[0], starts[-1] + length, count * length, relative.tobytes())


class _TextPacker(Packer):
    """Documents as they are, as many in a shard as Streaming would put there."""

    def __init__(self, plan: Plan, folder: Path):
        super().__init__(plan, folder)
        self.sizes: list[int] = []
        self.start = 0
        self.base = mds.header_bytes(mds.shard_config(mds.text_column(), plan.compression, plan.size_limit))
        self.used = self.base

    def pending_samples(self) -> int:
        return len(self.sizes)

    def add(self, part: int, units: int) -> list[Shard]:
        self._append(part, units)
        planned = []
        for size in np.fromfile(part_paths(self.folder, part)[1], dtype="<i4").tolist():
            if self.plan.max_samples is not None and self.samples + len(self.sizes) >= self.plan.max_samples:
                break
            if size == 0:
                continue
            if self.sizes and self.used + size + 8 > self.plan.size_limit:
                planned.append(self._take())
            self.sizes.append(size)
            self.used += size + 8
        return planned

    def finish(self) -> list[Shard]:
        self.finished = True
        return [self._take()] if self.sizes else []

    def _take(self) -> Shard:
        sizes, self.sizes, self.used = self.sizes, [], self.base
        units = sum(sizes)
        shard = self._plan(self.start, self.start + units, units, np.array(sizes, dtype=np.int64).tobytes())
        self.start += units
        self.samples += len(sizes)
        return shard


class _IndexedPacker(Packer):
    """Every part to its place in one `.bin`."""

    def pending_samples(self) -> int:
        return 0

    def add(self, part: int, units: int) -> list[Shard]:
        offset = self.end
        self.end += units
        if not units:
            return []
        shard = Shard(self.next_shard, [[part, offset, 0]])
        self.next_shard += 1
        self.shard_units.append(units)
        return [shard]

    def finish(self) -> list[Shard]:
        self.finished = True
        return []


def make_packer(plan: Plan, folder: Path) -> Packer:
    if plan.format == "indexed":
        return _IndexedPacker(plan, folder)
    if plan.is_text:
        return _TextPacker(plan, folder)
    return _DocumentPacker(plan, folder) if plan.no_wrap else _WrappedPacker(plan, folder)


def samples_per_shard(plan: Plan) -> int:
    """How many samples Streaming's writer puts into a shard before it begins the next."""
    token, length = np.dtype(plan.dtype), plan.concat_tokens
    config = mds.shard_config(mds.token_column(token), plan.compression, plan.size_limit)
    sample = 4 + 4 + len(mds.array_header(length)) + length * token.itemsize
    return max(1, (plan.size_limit - mds.header_bytes(config)) // sample)
