"""What a worker process does: load once, fork, and do the two tasks of a preparation.

`tokenize` turns a piece of the input into a part: its tokens (or texts) back to back in one file, the length of each
document in another. `shard` turns a range of the parts into a shard of the dataset. Every worker does both, so no
single process writes everything.
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ingot.data.formats import mds_writer as mds
from ingot.data.formats.indexed_writer import copy_into
from ingot.data.prepare.holdout import HashScan
from ingot.data.prepare.packing import PackingPlan, ShardPlan, part_paths
from ingot.data.prepare.pool import Progress
from ingot.data.prepare.tokenize_engine import Engine, pick_engine
from ingot.data.sources.documents import TextBlock
from ingot.data.sources.pieces import Piece, read_piece
from ingot.data.sources.plain_text import FindCut
from ingot.errors import DataError, IngotError, disk_error

LONGEST = 5  # documents named in the summary
_CHUNK_BYTES = 4 << 20  # of a shard at once
BUCKETS = 32


@dataclass
class DocumentStats:
    """Counts of some documents. A unit is a token, or a byte where text stays text."""

    documents: int = 0  # empty ones included
    empty: int = 0
    units: int = 0
    bytes: int = 0
    skipped: int = 0  # bad records
    others: int = 0  # documents that another split takes
    max_token: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)  # entry b: documents whose length has b bits
    longest: list[tuple[int, str]] = field(default_factory=list)  # (units, where)
    bad: list[str] = field(default_factory=list)  # the first few bad records

    def add(self, other: "DocumentStats") -> None:
        """Count more documents, which come after these."""
        for name in ("documents", "empty", "units", "bytes", "skipped", "others"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_token = max(self.max_token, other.max_token)
        self.histogram = [a + b for a, b in zip(self.histogram, other.histogram, strict=True)]
        self.longest = sorted([*self.longest, *other.longest], key=lambda pair: -pair[0])[:LONGEST]
        self.bad = [*self.bad, *other.bad][:LONGEST]


@dataclass(frozen=True)
class Task:
    """What a worker does next, for the split that is built in `folder`."""

    plan: PackingPlan
    folder: Path
    number: int
    work: Piece | ShardPlan


class TokenizeWorker:
    """Makes the parts and shards of one split."""

    def __init__(self, plan: PackingPlan, folder: Path, engine: Engine | None):
        self.plan, self.folder, self.engine = plan, folder, engine
        self.dtype = np.dtype(plan.dtype)

    # ---- tokenize ----

    def tokenize(self, number: int, piece: Piece, progress: Progress) -> dict[str, Any]:
        """Turn a piece into a part; returns its `DocumentStats` as plain values, and the hash of its data."""
        stats = DocumentStats()
        data_path, lengths_path = part_paths(self.folder, number)
        data_tmp, lengths_tmp = (p.with_name(f"{p.name}.{os.getpid()}.tmp") for p in (data_path, lengths_path))
        digest = xxhash.xxh3_64()
        open_length = 0  # tokens so far of a document that continues in the next block
        is_open = False
        before_open = (digest.copy(), 0, 0, 0)  # hash, position, units and bytes before that document
        find_cut = self.engine.find_cut if self.engine else lambda text, low, high: None
        try:
            with data_tmp.open("wb") as data_file, lengths_tmp.open("wb") as lengths_file:
                for block, others in self._blocks(piece, find_cut):
                    bad = self._bad_records(block)
                    if not (self.plan.holdout and self.plan.holdout.takes_held_out):  # counted once
                        stats.add(bad)
                    stats.others += others
                    if not block.texts:
                        if is_open:  # its end is bad: remove what has been written of it
                            digest, position, stats.units, stats.bytes = before_open
                            data_file.seek(position)
                            data_file.truncate()
                        is_open, open_length = False, 0
                        continue
                    if not is_open:
                        before_open = (digest.copy(), data_file.tell(), stats.units, stats.bytes)
                    values, lengths = self._encode(block.texts, starts=not is_open, ends=block.ends)
                    lengths[0] += open_length
                    is_open = not block.ends
                    open_length = int(lengths[-1]) if is_open else 0
                    closed = lengths[:-1] if is_open else lengths
                    digest.update(values)
                    data_file.write(values)
                    lengths_file.write(closed.astype("<i4").tobytes())
                    counted = _count(block, closed, values, piece)
                    stats.add(counted)
                    progress({"documents": counted.documents, "units": counted.units, "bytes": counted.bytes})
            data_tmp.replace(data_path)
            lengths_tmp.replace(lengths_path)
        except OSError as error:
            raise disk_error("write", data_path, error) from None
        finally:
            data_tmp.unlink(missing_ok=True)
            lengths_tmp.unlink(missing_ok=True)
        return {**asdict(stats), "hash": digest.hexdigest()}

    def _blocks(self, piece: Piece, find_cut: FindCut) -> Iterator[tuple[TextBlock, int]]:
        """The documents of a piece that belong to this split, and how many belong to the other one."""
        blocks = read_piece(piece, self.plan.options, find_cut)
        return self.plan.holdout.select(blocks) if self.plan.holdout else ((block, 0) for block in blocks)

    def _encode(self, texts: list[bytes], starts: bool, ends: bool) -> tuple[Any, np.ndarray]:
        """Documents to what is stored, back to back, and the length of each in tokens (or bytes, for text)."""
        if self.engine is None:
            return b"".join(texts), np.array([len(text) for text in texts], dtype=np.int64)
        ids, lengths = self.engine.encode(texts)
        before = self.plan.before + self.engine.rules.prefix
        after = self.engine.rules.suffix + self.plan.after
        if len(texts) == 1 and not (starts and ends):  # a part of a huge document
            before, after = before if starts else [], after if ends else []
        return frame(ids, lengths, before, after, self.dtype)

    def _bad_records(self, block: TextBlock) -> DocumentStats:
        bad = []
        for record, problem in block.bad:
            where = f"{block.path}:{record + 1}" if block.record_count > 1 or record else block.path
            if self.plan.options.on_error == "stop":
                raise DataError(f"{where}: {problem}; fix it, or skip such records with --on_error skip")
            bad.append(f"{where}: {problem}")
        return DocumentStats(skipped=len(bad), bad=bad[:LONGEST])

    # ---- shard ----

    def shard(self, shard: ShardPlan) -> dict[str, Any]:
        """Write one shard; returns its entry of index.json."""
        folder = self.folder / "shards"
        if self.plan.options.format == "indexed":
            ((part, offset, _),) = shard.parts
            copy_into(folder / "tokens.bin", offset * self.dtype.itemsize, part_paths(self.folder, part)[0])
            return {}
        config = self.plan.shard_config
        starts, ends, sizes = self._samples(shard)
        begin = mds.shard_begin(sizes, config)

        def chunks() -> Iterator[bytes]:
            yield begin
            first = 0
            while first < len(starts):
                last = max(first + 1, int(np.searchsorted(ends, starts[first] + _CHUNK_BYTES // self.dtype.itemsize)))
                yield self._body(shard.parts, starts[first:last], ends[first:last])
                first = last

        total = len(begin) + int(sizes.sum())
        return mds.write_shard(folder, shard.number, chunks(), total, len(starts), config)

    def _samples(self, shard: ShardPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where each sample starts and ends in the parts, and its bytes in the shard; int64 [samples] each."""
        length = self.plan.options.concat_tokens
        if shard.text_sizes is not None:
            ends = np.cumsum(shard.text_sizes)
            return ends - shard.text_sizes, ends, shard.text_sizes + 4
        if shard.sample_starts is not None:
            starts, ends = shard.sample_starts, shard.sample_starts + length
        else:
            total = sum(end - start for _, start, end in shard.parts)
            starts = np.arange(0, total, length, dtype=np.int64)
            ends = np.minimum(starts + length, total)
        width = self.dtype.itemsize
        known = {n: len(mds.row_head(n, width)) + n * width for n in np.unique(ends - starts).tolist()}
        return starts, ends, np.array([known[n] for n in (ends - starts).tolist()], dtype=np.int64)

    def _body(self, parts: Sequence[Sequence[int]], starts: np.ndarray, ends: np.ndarray) -> bytes:
        """Some samples as they are stored in the shard."""
        stream = self._read_parts(parts, int(starts[0]), int(ends[-1]))
        lengths = ends - starts
        if self.engine is not None and (lengths == lengths[0]).all() and (starts[1:] == ends[:-1]).all():
            return mds.rows_body(stream.reshape(len(starts), -1))
        samples = [stream[a:b] for a, b in zip(starts - starts[0], ends - starts[0], strict=True)]
        if self.engine is None:
            return mds.values_body([s.tobytes() for s in samples])
        return mds.values_body([mds.token_value(s) for s in samples])

    def _read_parts(self, parts: Sequence[Sequence[int]], start: int, end: int) -> np.ndarray:
        """Units [start, end) of the ranges of parts, counted over all of them together."""
        stream = np.empty(end - start, self.dtype)
        at = 0
        for number, first, last in parts:
            low, high = max(start, at), min(end, at + last - first)
            if low < high:
                path = part_paths(self.folder, number)[0]
                wanted = stream[low - start : high - start].data.cast("B")
                try:
                    with path.open("rb") as file:
                        file.seek((first + low - at) * self.dtype.itemsize)
                        count = file.readinto(wanted)
                except OSError as error:
                    raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
                if count < len(wanted):
                    raise DataError(f"{path}: shorter than when it was written; remove {self.folder} and start again")
            at += last - first
        return stream


def frame(
    ids: np.ndarray, lengths: np.ndarray, before: list[int], after: list[int], dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Put constant tokens around each document that has any; ids [tokens], lengths [documents]."""
    extra = len(before) + len(after)
    if not extra:
        return ids.astype(dtype), lengths
    filled = lengths > 0
    new_lengths = lengths + extra * filled
    ends = np.cumsum(new_lengths)[filled]  # of each document with text
    starts = ends - new_lengths[filled]
    framed = np.empty(int(new_lengths.sum()), dtype=dtype)
    is_text = np.ones(len(framed), dtype=bool)
    for i, token in enumerate(before):
        framed[starts + i] = token
        is_text[starts + i] = False
    for i, token in enumerate(reversed(after), 1):
        framed[ends - i] = token
        is_text[ends - i] = False
    framed[is_text] = ids
    return framed, new_lengths


def _count(block: TextBlock, lengths: np.ndarray, values: Any, piece: Piece) -> DocumentStats:
    """Count the documents of a block that have ended, by their lengths, and all of its tokens."""
    bits = np.frexp(lengths.astype(np.float64))[1]  # number of bits of each length; 0 for 0
    longest = np.argsort(-lengths, kind="stable")[:LONGEST].tolist()
    return DocumentStats(
        documents=len(lengths),
        empty=int(np.count_nonzero(lengths == 0)),
        units=len(values),
        bytes=sum(map(len, block.texts)),
        max_token=int(values.max()) if isinstance(values, np.ndarray) and len(values) else 0,
        histogram=np.bincount(bits, minlength=BUCKETS)[:BUCKETS].tolist(),
        longest=[(int(lengths[i]), _location(block, i, piece)) for i in longest],
    )


def _location(block: TextBlock, index: int, piece: Piece) -> str:
    if piece.how == "range" and piece.start:
        return f"{block.path} (bytes {piece.start:,} to {piece.end:,})"
    return f"{block.path}:{block.records[index] + 1}" if block.record_count > 1 else block.path


def run_task(task: Task | HashScan, engine: Engine | None, progress: Progress) -> dict[str, Any]:
    """Do a task, whatever it is."""
    if isinstance(task, HashScan):
        return task.run()
    worker = TokenizeWorker(task.plan, task.folder, engine)
    if isinstance(task.work, Piece):
        return worker.tokenize(task.number, task.work, progress)
    return worker.shard(task.work)


def main() -> None:
    """Load the engine, fork a worker for each pipe (the file descriptors on the command line), wait for all to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what Ctrl-C means
    control, *pipes = (Connection(int(number)) for number in sys.argv[1:])
    try:
        if control.recv():
            with contextlib.suppress(ImportError):
                import awkward  # type: ignore[import-untyped]  # noqa: F401  gigatoken needs it; the caller is still busy
        rules, wanted = control.recv()
        engine = pick_engine(rules, wanted) if rules else None
    except EOFError:  # the caller has ended
        return
    except IngotError as error:
        control.send(("error", error))
        return
    gc.freeze()  # keep shared memory shared
    pids = []
    for pipe in pipes:
        if (pid := os.fork()) == 0:
            for other in (control, *pipes):
                if other is not pipe:
                    other.close()
            _serve(pipe, engine)
        pids.append(pid)
    control.send(("done", (pids, engine.name if engine else "none", engine.reason if engine else "")))
    for pipe in pipes:
        pipe.close()
    for _ in pids:
        os.wait()


def _serve(pipe: Connection, engine: Engine | None) -> None:
    """Do tasks until the pipe closes; never returns."""
    try:
        while True:
            task = pipe.recv()
            try:
                answer: Any = "done", run_task(task, engine, lambda counts: pipe.send(("progress", counts)))
            except IngotError as error:
                answer = "error", error
            pipe.send(answer)
            del task, answer
    except (EOFError, ConnectionError):
        pass  # the caller has ended
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(0)  # skips the interpreter's clean-up, which takes a tenth of a second


if __name__ == "__main__":
    main()
    os._exit(0)
