"""The two tasks of preparation, and the process that does them.

`tokenize`: a piece of the input to a part: its tokens (or texts) back to back in one file, the length of each document
in another. `shard`: a range of the parts to a shard of the data set. Every worker does both, so nothing funnels
through one process. A worker speaks over its pipes, in frames of a JSON head and raw bytes: no pickle, no second
import of the caller's main module, and it ends when its parent does.
"""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from ingot import errors
from ingot.data import mds_writer as mds
from ingot.data.documents import Block
from ingot.data.engine import Engine
from ingot.data.indexed_writer import copy_into
from ingot.data.input_files import ReadOptions, SourceFile
from ingot.data.sources import Piece, read_piece
from ingot.data.tokenizer import load_tokenizer
from ingot.errors import DataError, IngotError, disk_error

LONGEST = 5  # documents named in the summary
_CHUNK_BYTES = 4 << 20  # of a shard at once
BUCKETS = 32  # of the histogram of document lengths: bucket b counts lengths of b bits

_WORKER_ENV = {
    "TOKENIZERS_PARALLELISM": "false",  # one thread each: the workers are the parallelism
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # reuse memory between pieces instead of faulting it in anew
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}

Progress = Callable[[dict[str, int]], None]


@dataclass(frozen=True)
class Job:
    """What every worker must know."""

    folder: str  # where parts and shards are built
    tokenizer: str | None  # folder; None keeps text as text
    engine: str
    dtype: str
    before: list[int]  # tokens put before each document
    after: list[int]  # tokens put after each document
    format: str
    concat_tokens: int
    compression: str | None
    size_limit: int
    skip_bad: bool
    options: ReadOptions

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Job":
        return Job(**{**values, "options": ReadOptions(**values["options"])})

    @property
    def parts(self) -> Path:
        return Path(self.folder) / "parts"


def part_paths(job: Job, number: int) -> tuple[Path, Path]:
    """The files of a part: its data, and the lengths of its documents."""
    return job.parts / f"{number:08}.data", job.parts / f"{number:08}.lengths"


class Worker:
    """Does the tasks of one job."""

    def __init__(self, job: Job):
        self.job = job
        self.dtype = np.dtype(job.dtype)
        self.engine = Engine(load_tokenizer(job.tokenizer), job.engine, "") if job.tokenizer else None

    # ---- tokenize ----

    def tokenize(self, number: int, piece: Piece, handed: bytes, progress: Progress) -> dict[str, Any]:
        """Turn a piece into a part, and say what was in it."""
        stats: dict[str, Any] = {"documents": 0, "units": 0, "bytes": 0, "empty": 0, "skipped": 0, "max_token": 0}
        stats |= {"bad": [], "longest": [], "histogram": [0] * BUCKETS}
        data_path, lengths_path = part_paths(self.job, number)
        data_tmp, lengths_tmp = (p.with_suffix(f".{os.getpid()}.tmp") for p in (data_path, lengths_path))
        lengths_tmp = lengths_tmp.with_name(lengths_tmp.name + "l")
        digest = xxhash.xxh3_64()
        open_length = 0  # tokens so far of a document that goes on in the next block
        is_open = False
        find_cut = self.engine.find_cut if self.engine else _cut_anywhere
        try:
            with data_tmp.open("wb") as data_file, lengths_tmp.open("wb") as lengths_file:
                for block in read_piece(piece, handed, self.job.options, find_cut):
                    self._note_bad(block, stats)
                    if not block.texts:
                        is_open, open_length = False, 0
                        continue
                    encoded = [text.encode() for text in block.texts]
                    size = sum(map(len, encoded))
                    values, lengths = self._encode(block.texts, encoded, starts=not is_open, ends=block.ends)
                    del encoded
                    lengths[0] += open_length
                    is_open = not block.ends
                    open_length = int(lengths[-1]) if is_open else 0
                    closed = lengths[:-1] if is_open else lengths
                    digest.update(values)
                    data_file.write(values)
                    lengths_file.write(closed.astype("<i4").tobytes())
                    self._note(block, closed, values, size, piece, stats)
                    progress({"documents": len(closed), "units": _units(values), "bytes": size})
            data_tmp.replace(data_path)
            lengths_tmp.replace(lengths_path)
        except OSError as error:
            raise disk_error("write", data_path, error) from None
        finally:
            data_tmp.unlink(missing_ok=True)
            lengths_tmp.unlink(missing_ok=True)
        return {**stats, "hash": digest.hexdigest()}

    def _encode(self, texts: list[str], encoded: list[bytes], starts: bool, ends: bool) -> tuple[Any, np.ndarray]:
        """Documents to what is stored, back to back, and the length of each in tokens (or bytes, for text)."""
        if self.engine is None:
            return b"".join(encoded), np.array([len(e) for e in encoded], dtype=np.int64)
        ids, lengths = self.engine.encode(texts, encoded)
        before = self.job.before + self.engine.prefix
        after = self.engine.suffix + self.job.after
        if len(texts) == 1 and not (starts and ends):  # a part of a huge document
            before, after = before if starts else [], after if ends else []
        return frame(ids, lengths, before, after, self.dtype)

    def _note_bad(self, block: Block, stats: dict[str, Any]) -> None:
        for record, problem in block.bad:
            where = f"{block.path}:{record + 1}" if block.record_count > 1 or record else block.path
            if not self.job.skip_bad:
                raise DataError(f"{where}: {problem}; correct it, or leave such records out with on_error=skip")
            if len(stats["bad"]) < LONGEST:
                stats["bad"].append(f"{where}: {problem}")
        stats["skipped"] += len(block.bad)

    def _note(
        self, block: Block, lengths: np.ndarray, values: Any, size: int, piece: Piece, stats: dict[str, Any]
    ) -> None:
        stats["documents"] += len(lengths)
        stats["empty"] += int(np.count_nonzero(lengths == 0))
        stats["bytes"] += size
        stats["units"] += _units(values)
        if isinstance(values, np.ndarray) and len(values):
            stats["max_token"] = max(stats["max_token"], int(values.max()))
        bits = np.frexp(lengths.astype(np.float64))[1]  # number of bits of each length; 0 for 0
        for bucket, count in enumerate(np.bincount(bits, minlength=BUCKETS)[:BUCKETS].tolist()):
            stats["histogram"][bucket] += count
        top = np.argsort(-lengths, kind="stable")[:LONGEST]
        found = [[int(lengths[i]), _location(block, int(i), piece)] for i in top]
        stats["longest"] = sorted(stats["longest"] + found, key=lambda pair: -pair[0])[:LONGEST]

    # ---- shard ----

    def shard(self, number: int, parts: Sequence[Sequence[int]], irregular: bytes) -> dict[str, Any]:
        """Write one shard from ranges [start, end) of parts; `irregular` holds sample starts, or lengths of texts."""
        job = self.job
        folder = Path(job.folder) / "shards"
        if job.format == "indexed":
            ((part, offset, _),) = parts
            copy_into(folder / "tokens.bin", offset * self.dtype.itemsize, part_paths(job, part)[0])
            return {}
        column = mds.token_column(self.dtype) if self.engine else mds.text_column()
        config = mds.shard_config(column, job.compression, job.size_limit)
        starts, ends, sizes = self._samples(parts, irregular)
        begin = mds.shard_begin(sizes, config)

        def chunks() -> Iterator[bytes]:
            yield begin
            first = 0
            while first < len(starts):
                last = max(first + 1, int(np.searchsorted(ends, starts[first] + _CHUNK_BYTES // self.dtype.itemsize)))
                yield self._body(parts, starts[first:last], ends[first:last])
                first = last

        total = len(begin) + int(sizes.sum())
        return mds.write_shard_in_chunks(folder, number, chunks(), total, len(starts), config)

    def _samples(self, parts: Sequence[Sequence[int]], irregular: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where each sample starts and ends in the parts, and its bytes in the shard; int64 [samples] each."""
        length = self.job.concat_tokens
        if self.engine is None:
            lengths = np.frombuffer(irregular, dtype=np.int64)
            ends = np.cumsum(lengths)
            return ends - lengths, ends, lengths + 4
        if irregular:
            starts = np.frombuffer(irregular, dtype=np.int64)
            ends = starts + length
        else:
            total = sum(end - start for _, start, end in parts)
            starts = np.arange(0, total, length, dtype=np.int64)
            ends = np.minimum(starts + length, total)
        heads = {int(n): len(mds.row_head(int(n), self.dtype.itemsize)) for n in np.unique(ends - starts)}
        sizes = np.array([heads[n] + n * self.dtype.itemsize for n in (ends - starts).tolist()], dtype=np.int64)
        return starts, ends, sizes

    def _body(self, parts: Sequence[Sequence[int]], starts: np.ndarray, ends: np.ndarray) -> bytes:
        """Some samples as they stand in the shard."""
        stream = self._read_parts(_cut_parts(parts, int(starts[0]), int(ends[-1])))
        lengths = ends - starts
        if self.engine is not None and (lengths == lengths[0]).all() and (starts[1:] == ends[:-1]).all():
            return mds.rows_body(stream.reshape(len(starts), -1))
        samples = [stream[a:b] for a, b in zip(starts - starts[0], ends - starts[0], strict=True)]
        if self.engine is None:
            return mds.values_body([s.tobytes() for s in samples])
        return mds.values_body([mds.token_value(s) for s in samples])

    def _read_parts(self, parts: Sequence[Sequence[int]]) -> np.ndarray:
        """Ranges of several parts, back to back."""
        stream = np.empty(sum(end - start for _, start, end in parts), self.dtype if self.engine else np.uint8)
        view = memoryview(stream.data).cast("B")
        filled = 0
        for number, start, end in parts:
            path = part_paths(self.job, number)[0]
            size = (end - start) * stream.itemsize
            try:
                with path.open("rb", buffering=0) as file:
                    file.seek(start * stream.itemsize)
                    done = 0
                    while done < size and (count := file.readinto(view[filled + done : filled + size])):
                        done += count
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
            if done < size:
                raise DataError(f"{path}: shorter than when it was written; remove {self.job.folder} and start again")
            filled += size
        return stream

    def run(self, head: dict[str, Any], blob: bytes, progress: Progress) -> dict[str, Any]:
        """Do one task as it comes over the pipe."""
        if head["task"] == "shard":
            return self.shard(head["number"], head["parts"], blob)
        return self.tokenize(head["number"], piece_from_json(head["piece"]), blob, progress)


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


def _cut_parts(parts: Sequence[Sequence[int]], start: int, end: int) -> list[list[int]]:
    """The ranges of parts that hold units [start, end) of all of them together."""
    found, at = [], 0
    for number, first, last in parts:
        low, high = max(start, at), min(end, at + last - first)
        if low < high:
            found.append([number, first + low - at, first + high - at])
        at += last - first
    return found


def piece_to_json(piece: Piece) -> dict[str, Any]:
    """A piece as plain values."""
    return asdict(piece)


def piece_from_json(values: dict[str, Any]) -> Piece:
    """The piece of `piece_to_json`."""
    return Piece(**{**values, "files": tuple(SourceFile(**f) for f in values["files"])})


def _location(block: Block, index: int, piece: Piece) -> str:
    if piece.how == "range":
        return f"{block.path} (bytes {piece.start:,} to {piece.end:,})" if piece.start else f"{block.path}:{index + 1}"
    record = int(block.records[index]) if block.records is not None else block.first_record + index
    return f"{block.path}:{record + 1}" if block.record_count > 1 else block.path


def _units(values: Any) -> int:
    return len(values)


def _cut_anywhere(text: str, low: int, high: int) -> int | None:
    return None


# ---- the process ----------------------------------------------------------------------------------------------------


def send(stream: IO[bytes], head: dict[str, Any], blob: bytes = b"") -> None:
    """Write one frame."""
    text = json.dumps(head).encode()
    stream.write(struct.pack("<IQ", len(text), len(blob)) + text)
    if blob:
        stream.write(blob)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Read one frame; None at the end of the stream."""
    sizes = stream.read(12)
    if len(sizes) < 12:
        return None
    head_size, blob_size = struct.unpack("<IQ", sizes)
    head = json.loads(stream.read(head_size))
    return head, stream.read(blob_size) if blob_size else b""


class WorkerProcess:
    """A worker process, seen from the parent."""

    def __init__(self, job: Job):
        env = {**os.environ, **_WORKER_ENV}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ingot.data.prepare_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        assert self.process.stdin and self.process.stdout
        self.requests, self.replies = self.process.stdin, self.process.stdout
        send(self.requests, job.to_json())

    def run(self, head: dict[str, Any], blob: bytes, progress: Progress) -> dict[str, Any]:
        try:
            send(self.requests, head, blob)
            while (reply := receive(self.replies)) is not None:
                answer = reply[0]
                if "progress" in answer:
                    progress(answer["progress"])
                elif "done" in answer:
                    return dict(answer["done"])
                else:
                    raise getattr(errors, answer["kind"], DataError)(answer["error"])
        except BrokenPipeError:
            pass
        code = self.process.wait()
        raise DataError(
            f"a worker process ended with exit code {code}, perhaps for lack of memory; "
            "run the same command again, with fewer num_workers if it happens again"
        )

    def end(self) -> None:
        for pipe in (self.requests, self.replies):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Serve tasks from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up among the replies
    first = receive(requests)
    if first is None:
        return
    try:
        worker = Worker(Job.from_json(first[0]))
        while (request := receive(requests)) is not None:
            head, blob = request
            del request
            result = worker.run(head, blob, lambda counts: send(replies, {"progress": counts}))
            blob = b""
            send(replies, {"done": result})
    except IngotError as error:
        send(replies, {"error": str(error), "kind": type(error).__name__})
    except BrokenPipeError:
        pass  # the parent is gone


if __name__ == "__main__":
    main()
