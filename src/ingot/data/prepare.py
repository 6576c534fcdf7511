"""Text to a data set: sources -> tokenizer -> packer -> shards, on all cores, restartable, in bounded memory.

The peers funnel tokens through one writing process, and begin again after a crash. Here the input is divided into
pieces (`sources`), workers turn pieces into parts and parts into shards (`prepare_worker`), and this file only decides
what is next. A shard is a range of the token stream of the whole input, so it does not depend on how the input was
divided nor on who did the work: any number of workers gives the same bytes. A shard is written as soon as the parts
that it spans are there, and those parts are then removed, so little more than the data set itself is ever on the disk.

Each finished task is a line in a journal. After a crash the same command reads the journal and does what is left. The
split appears under its final name by one rename, when it is complete.
"""

import fcntl
import hashlib
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ingot import errors
from ingot.data import indexed_writer as indexed
from ingot.data import mds_writer as mds
from ingot.data.engine import choose_engine
from ingot.data.files import write_json
from ingot.data.prepare_progress import Reporter
from ingot.data.prepare_worker import BUCKETS, LONGEST, Job, Worker, part_paths, piece_to_json, receive, send
from ingot.data.sources import PIECE_BYTES, Piece, ReadOptions, SourceFile, find_files, plan_pieces
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.errors import DataError, disk_error

# LLM Foundry's truncated splits: how many samples each holds.
SPLIT_SAMPLES = {"train_small": 100_000, "val_small": 10_000, "val_xsmall": 3_000, "val_xxsmall": 100}
_WORKER_BYTES = 220 << 20  # what one worker needs, with room to spare


@dataclass
class SplitReport:
    """What was written for one split."""

    folder: str
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0
    empty: int = 0
    samples: int = 0
    shards: int = 0
    histogram: list[int] = field(default_factory=list)
    """Documents by length: entry b counts those of 2**(b-1) to 2**b - 1 tokens."""
    longest: list[tuple[int, str]] = field(default_factory=list)
    """(tokens, where) of the longest documents."""
    bad_records: list[str] = field(default_factory=list)
    """The first few records that were skipped, and why."""


@dataclass
class PrepareReport:
    """What `prepare` did."""

    splits: dict[str, SplitReport]
    seconds: float
    engine: str
    train_command: str

    @property
    def documents(self) -> int:
        return sum(s.documents for s in self.splits.values())

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.splits.values())

    @property
    def bytes(self) -> int:
        return sum(s.bytes for s in self.splits.values())

    @property
    def skipped(self) -> int:
        return sum(s.skipped for s in self.splits.values())


def prepare(
    input: str | Path | Sequence[str | Path],
    out_root: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None,
    split: str = "train",
    concat_tokens: int = 2048,
    eos_text: str | None = None,
    bos_text: str = "",
    no_wrap: bool = False,
    drop_last: bool = False,
    max_samples: int | None = None,
    format: str = "mds",
    compression: str | None = None,
    token_type: str = "auto",
    json_keys: str | Sequence[str] = "text",
    output_prefix: str | None = None,
    num_workers: int | None = None,
    memory: int = 1_500_000_000,
    on_error: str = "stop",
    engine: str = "auto",
    max_document_bytes: int = 1 << 26,
    max_expansion: int = 200,
    show: Callable[[str], None] | None = None,
) -> PrepareReport:
    """Turn text files into one split of a data set; run again with the same arguments, it continues.

    input: files, folders, globs: json, jsonl, txt, parquet, csv, plain or .gz .zst .xz .bz2 .zip
    tokenizer: folder, file or hub id; None keeps text as text (MDS column `text`)
    eos_text: ends a document; None means the tokenizer's own end of document, "" means none
    no_wrap, drop_last: as LLM Foundry packs: a sample starts with a document; the last, shorter sample is left out
    max_samples: stop after so many samples; by default what LLM Foundry has for train_small and its kin
    output_prefix: for the indexed format, where the pair goes (default: OUT_ROOT/SPLIT/SPLIT)
    memory: bytes that all processes together should stay below; limits the default number of workers
    show: receives lines of progress; by default a bar on a terminal, lines otherwise
    """
    started = time.monotonic()
    _check_choices(format, compression, on_error, concat_tokens, tokenizer, no_wrap)
    keys = [json_keys] if isinstance(json_keys, str) else list(json_keys)
    if len(keys) > 1 and format == "mds":
        raise DataError("several json_keys need format=indexed: an MDS data set here has one column")
    inputs = [input] if isinstance(input, str | Path) else list(input)
    files = find_files(inputs)
    tok = tokenizer if isinstance(tokenizer, Tokenizer) or tokenizer is None else load_tokenizer(tokenizer)
    chosen = choose_engine(tok, engine) if tok else None
    reporter = Reporter(show)
    if chosen:
        reporter.say(f"engine: {chosen.name} ({chosen.reason})")
    workers = _worker_count(num_workers, memory, sum(f.size for f in files), reporter)
    report = SplitReport("")
    for key in keys:
        options = ReadOptions(key, max_document_bytes, max_expansion)
        target = _Target.choose(Path(out_root), split, format, output_prefix, key)
        plan = _Plan(
            format=format,
            dtype=_token_dtype(tok, format, token_type),
            before=tok.encode(bos_text) if tok else [],
            after=_eos_ids(tok, eos_text) if tok else [],
            concat_tokens=concat_tokens,
            no_wrap=no_wrap,
            drop_last=drop_last,
            max_samples=max_samples if max_samples is not None else SPLIT_SAMPLES.get(split),
            compression=compression,
            skip_bad=on_error == "skip",
            engine=chosen.name if chosen else "text",
        )
        report = _Preparation(target, plan, files, tok, options, workers, reporter).run()
    name = chosen.name if chosen else "text kept as text"
    command = _train_command(Path(out_root), split)
    return PrepareReport({split: report}, time.monotonic() - started, name, command)


@dataclass(frozen=True)
class _Plan:
    """What the output shall be. Two runs with the same plan and input give the same bytes."""

    format: str
    dtype: str
    before: list[int]
    after: list[int]
    concat_tokens: int
    no_wrap: bool
    drop_last: bool
    max_samples: int | None
    compression: str | None
    skip_bad: bool
    engine: str


@dataclass(frozen=True)
class _Target:
    """Where the output goes: a folder of its own, or a pair of files at a prefix."""

    tokenizer_folder: Path
    work: Path  # where it is built
    folder: Path  # final folder
    stem: str | None  # name of the pair, for the indexed format
    owns_folder: bool  # whether the whole folder appears by one rename

    @staticmethod
    def choose(out_root: Path, split: str, format: str, prefix: str | None, key: str) -> "_Target":
        if format == "mds":
            return _Target(out_root / "tokenizer", out_root / f".{split}.partial", out_root / split, None, True)
        place = Path(prefix) if prefix else out_root / split / split
        stem = f"{place.name}_{key}_document"
        tokenizer_folder = (place.parent if prefix else out_root) / "tokenizer"
        return _Target(tokenizer_folder, place.parent / f".{stem}.partial", place.parent, stem, False)

    @property
    def meta(self) -> Path:
        return self.folder / ("meta.json" if self.owns_folder or self.stem is None else f"{self.stem}.meta.json")


class _Preparation:
    """One split on its way: which pieces and shards are done, what comes next."""

    def __init__(
        self,
        target: _Target,
        plan: _Plan,
        files: list[SourceFile],
        tokenizer: Tokenizer | None,
        options: ReadOptions,
        workers: int,
        reporter: Reporter,
    ):
        self.target, self.plan, self.files, self.tokenizer = target, plan, files, tokenizer
        self.options, self.workers, self.reporter = options, workers, reporter
        self.signature = self._signature()
        self.pieces: dict[int, dict[str, Any]] = {}  # finished pieces and what was in them
        self.shards: dict[int, dict[str, Any]] = {}  # finished shards and their index entries
        self.lock = threading.Condition()
        self.error: tuple[int, Exception] | None = None
        self.running = 0
        self.pieces_ended: int | None = None  # number of pieces, once known
        self.prefix = 0  # pieces [0, prefix) are done and in the packer
        self.shard_tasks: deque[tuple[dict[str, Any], bytes]] = deque()
        self.waiting_parts: dict[int, int] = {}  # shards that still need a part; at 0 it is removed
        self.shard_parts: dict[int, list[int]] = {}

    def run(self) -> SplitReport:
        """Do everything that is left, and put the result in place."""
        finished = self._already_finished()
        if finished:
            self.reporter.say(f"{self.target.folder}: already complete")
            return finished
        self._check_tokenizer()
        try:
            self.target.work.mkdir(parents=True, exist_ok=True)
            with (self.target.work / "lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise DataError(f"{self.target.work}: another `prepare` is at work here; wait for it") from None
                return self._run_locked()
        except OSError as error:
            raise disk_error("write to", self.target.work, error) from None

    def _run_locked(self) -> SplitReport:
        job = self._start_or_resume()
        self.packer = _packer(self.plan, job)
        self.reporter.start(sum(f.size for f in self.files), resumed=len(self.pieces))
        try:
            self._work(job)
        finally:
            self.reporter.stop()
        report = self._assemble(job)
        shutil.rmtree(self.target.work, ignore_errors=True)
        return report

    # ---- before ----

    def _signature(self) -> str:
        """A name for this output: the same command on the same input."""
        content = {
            "plan": asdict(self.plan),
            "options": asdict(self.options),
            "files": [[f.path, f.size] for f in self.files],
            "tokenizer": self.tokenizer.fingerprint() if self.tokenizer else None,
            "format": 1,
        }
        del content["plan"]["engine"]  # the ids are the same
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def _already_finished(self) -> SplitReport | None:
        target = self.target
        if target.meta.is_file():
            try:
                meta = json.loads(target.meta.read_text(encoding="utf-8"))
                if meta["prepare"]["signature"] == self.signature:
                    return SplitReport(**{**meta["prepare"]["report"], "folder": str(target.folder)})
            except (ValueError, KeyError, TypeError):
                pass
        taken = target.folder if target.owns_folder else target.folder / f"{target.stem}.idx"
        if taken.exists() and (not target.owns_folder or any(taken.iterdir())):
            raise DataError(
                f"{taken}: already there, and made from other input or with other options; "
                "remove it, or choose another output"
            )
        return None

    def _check_tokenizer(self) -> None:
        folder = self.target.tokenizer_folder
        if self.tokenizer is None or not (folder / "tokenizer.json").is_file():
            return
        if load_tokenizer(folder).fingerprint() != self.tokenizer.fingerprint():
            raise DataError(
                f"{folder}: the data set there was made with another tokenizer; use that one, or choose another output"
            )

    def _start_or_resume(self) -> Job:
        work = self.target.work
        state = work / "state.json"
        inputs = [[f.path, f.size, f.mtime_ns] for f in self.files]
        streams = [f for f in self.files if f.compression or f.format in ("json", "csv")]
        fresh = {"signature": self.signature, "inputs": inputs, "whole_files": len(streams) >= 4 * self.workers}
        old = _read_json(state)
        if old and all(old.get(k) == fresh[k] for k in ("signature", "inputs")):
            self.whole_files = bool(old["whole_files"])
        else:
            if old:
                self.reporter.say(f"{work}: left by another command or other input; starting again")
            _empty(work)
            self.whole_files = fresh["whole_files"]
            write_json(state, fresh)
        for name in ("parts", "shards"):
            (work / name).mkdir(exist_ok=True)
        if self.tokenizer:
            self.tokenizer.save(work / "tokenizer")
        job = Job(
            folder=str(work),
            tokenizer=str(work / "tokenizer") if self.tokenizer else None,
            engine=self.plan.engine,
            dtype=self.plan.dtype,
            before=self.plan.before,
            after=self.plan.after,
            format=self.plan.format,
            concat_tokens=self.plan.concat_tokens,
            compression=self.plan.compression,
            skip_bad=self.plan.skip_bad,
            options=self.options,
        )
        self._read_journal(job)
        self.journal = (work / "journal.jsonl").open("a", encoding="utf-8")
        return job

    def _read_journal(self, job: Job) -> None:
        path = self.target.work / "journal.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):  # killed while it wrote the last one
            path.write_text("".join(whole), encoding="utf-8")
        for line in whole:
            entry = json.loads(line)
            kind, number = entry["task"], entry["number"]
            (self.pieces if kind == "tokenize" else self.shards)[number] = entry["done"]
        for number, done in list(self.pieces.items()):
            data, lengths = part_paths(job, number)
            # A part that is gone has served its shards; one that is damaged (a power cut) must be made again.
            if data.exists() and (not lengths.exists() or _file_hash(data) != done["hash"]):
                del self.pieces[number]

    # ---- the work ----

    def _work(self, job: Job) -> None:
        tasks: queue.Queue[tuple[int, Piece, bytes] | None] = queue.Queue(maxsize=2)
        stop = threading.Event()
        reader = threading.Thread(target=self._read_pieces, args=(tasks, stop), daemon=True)
        reader.start()
        if self.workers == 0:
            self._drive(Worker(job).run, tasks)
        else:
            processes = [_Process(job) for _ in range(self.workers)]
            threads = [threading.Thread(target=self._drive, args=(p.run, tasks), daemon=True) for p in processes]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():  # in slices, so that Ctrl-C is heard
                        thread.join(0.2)
                        self.reporter.refresh()
            finally:
                with self.lock:
                    self.error = self.error or (-1, KeyboardInterrupt())
                    self.lock.notify_all()
                for process in processes:
                    process.end()
        stop.set()
        while reader.is_alive():
            try:
                tasks.get_nowait()
            except queue.Empty:
                reader.join(0.05)
        if self.error and self.error[0] >= 0:
            raise self.error[1]

    def _read_pieces(self, tasks: "queue.Queue[tuple[int, Piece, bytes] | None]", stop: threading.Event) -> None:
        """A thread: the pieces that are not done yet, a few ahead of use."""
        try:
            number = 0
            for number, (piece, handed) in enumerate(plan_pieces(self.files, self.whole_files, self.options), 1):
                if stop.is_set():
                    return
                if number - 1 in self.pieces:
                    self.reporter.skip(piece.size, self.pieces[number - 1])
                else:
                    tasks.put((number - 1, piece, handed))
            with self.lock:
                self.pieces_ended = number if self.pieces_ended is None else self.pieces_ended
        except Exception as error:
            self._fail(1 << 60, error)
        tasks.put(None)

    def _drive(self, run: Callable[..., dict[str, Any]], tasks: "queue.Queue[tuple[int, Piece, bytes] | None]") -> None:
        """Give one worker its tasks until there are none. Shards first: they let parts be removed."""
        try:
            while True:
                with self.lock:
                    self._advance()
                    if self.error:
                        return
                    task = self.shard_tasks.popleft() if self.shard_tasks else None
                    if task is None and self.enough:
                        if self.running == 0:
                            return
                        self.lock.wait(0.5)
                        continue
                    self.running += 1
                piece_size = 0
                if task is None:
                    item = self._next_piece(tasks)
                    if item is None:
                        with self.lock:
                            self.running -= 1
                            self.lock.notify_all()
                            if not self.enough:
                                self.lock.wait(0.02)
                        continue
                    number, piece, handed = item
                    task = {"task": "tokenize", "number": number, "piece": piece_to_json(piece)}, handed
                    piece_size = piece.size
                    del item, handed
                head, blob = task
                del task
                done = run(head, blob, self.reporter.advance)
                del blob
                with self.lock:
                    self._record(head, done)
                    self.running -= 1
                    self.lock.notify_all()
                self.reporter.consumed(piece_size)
        except Exception as error:
            with self.lock:
                self.running -= 1
            self._fail(0, error)

    @property
    def enough(self) -> bool:
        """Whether no further piece is needed."""
        return self.pieces_ended is not None and all(n in self.pieces for n in range(self.prefix, self.pieces_ended))

    def _next_piece(self, tasks: "queue.Queue[tuple[int, Piece, bytes] | None]") -> tuple[int, Piece, bytes] | None:
        try:
            item = tasks.get(timeout=0.02)
        except queue.Empty:
            return None
        if item is None:
            tasks.put(None)  # for the other drivers
            return None
        with self.lock:
            if self.pieces_ended is not None and item[0] >= self.pieces_ended:  # beyond max_samples
                return None
        return item

    def _fail(self, order: int, error: Exception) -> None:
        with self.lock:
            if self.error is None or self.error[0] > order:
                self.error = (order, error)
            self.lock.notify_all()

    def _record(self, head: dict[str, Any], done: dict[str, Any]) -> None:
        """Note a finished task, in memory and in the journal."""
        number = head["number"]
        (self.pieces if head["task"] == "tokenize" else self.shards)[number] = done
        line = json.dumps({"task": head["task"], "number": number, "done": done})
        self.journal.write(line + "\n")
        self.journal.flush()
        if head["task"] == "shard":
            self._release(number)

    def _advance(self) -> None:
        """Give finished pieces, in order, to the packer; it says which shards can be written."""
        while self.prefix in self.pieces and (self.pieces_ended is None or self.prefix < self.pieces_ended):
            self._plan_shards(self.packer.add(self.prefix, int(self.pieces[self.prefix]["units"])))
            self.prefix += 1
            if self.packer.is_full:
                self.pieces_ended = self.prefix
        if self.pieces_ended is not None and self.prefix >= self.pieces_ended and not self.packer.finished:
            self._plan_shards(self.packer.finish())

    def _plan_shards(self, planned: "list[_Shard]") -> None:
        for shard in planned:
            parts = [part for part, _, _ in shard.parts]
            self.shard_parts[shard.number] = parts
            for part in parts:
                self.waiting_parts[part] = self.waiting_parts.get(part, 0) + 1
            if shard.number in self.shards:
                self._release(shard.number)
            else:
                head = {"task": "shard", "number": shard.number, "parts": shard.parts}
                self.shard_tasks.append((head, shard.irregular))

    def _release(self, shard: int) -> None:
        """Remove the parts that no shard needs any more."""
        for part in self.shard_parts.pop(shard):
            self.waiting_parts[part] -= 1
            if self.waiting_parts[part] == 0 and part < self.packer.open_part:
                data, lengths = part_paths(self.packer.job, part)
                data.unlink(missing_ok=True)
                if self.plan.format != "indexed":
                    lengths.unlink(missing_ok=True)

    # ---- after ----

    def _assemble(self, job: Job) -> SplitReport:
        """Index and meta data, then the final name."""
        self.journal.close()
        target, work = self.target, self.target.work
        report = self._summary()
        if not report.tokens and not report.bytes:
            raise DataError(f"no text in {len(self.files)} input files, the first being {self.files[0].path}")
        entries = [self.shards[k] for k in sorted(self.shards)]
        built = work / "shards"
        if self.plan.format == "indexed":
            lengths = [part_paths(job, n)[1] for n in range(self.prefix)]
            with (built / "tokens.bin").open("ab") as file:
                os.fsync(file.fileno())
            indexed.write_idx(built / "tokens.idx", np.dtype(self.plan.dtype), lengths)
            name = f"{target.stem}.bin"
            report.shards = 1
            shards = [{"basename": name, "tokens": report.tokens}]
        else:
            mds.write_index(built, entries)
            report.samples = sum(e["samples"] for e in entries)
            report.shards = len(entries)
            shards = [
                {"basename": e["raw_data"]["basename"], "tokens": t}
                for e, t in zip(entries, self.packer.shard_units, strict=True)
            ]
        meta = {
            "version": 1,
            "format": self.plan.format,
            "tokens": report.tokens,
            "documents": report.documents,
            "bytes": report.bytes,
            "vocab_size": self.tokenizer.vocab_size if self.tokenizer else None,
            "max_token": max((self.pieces[n]["max_token"] for n in range(self.prefix)), default=0),
            "eos_id": self.tokenizer.eos_id if self.tokenizer else None,
            "shards": shards if self.tokenizer else [],
            "prepare": {
                "signature": self.signature,
                "tokenizer": self.tokenizer.fingerprint() if self.tokenizer else None,
                "concat_tokens": self.plan.concat_tokens if self.plan.format == "mds" else None,
                "report": {**asdict(report), "folder": ""},
            },
        }
        if self.tokenizer:
            self.tokenizer.save(target.tokenizer_folder)
        if target.owns_folder:
            write_json(built / "meta.json", meta)
            if target.folder.exists():
                target.folder.rmdir()  # it is empty, or the run would have been refused
            built.replace(target.folder)
        else:
            (built / "tokens.bin").replace(target.folder / f"{target.stem}.bin")
            write_json(target.meta, meta)
            if target.stem and target.folder.name and not self._is_foreign_folder():
                write_json(target.folder / "meta.json", meta)
            (built / "tokens.idx").replace(target.folder / f"{target.stem}.idx")  # last: without it there is no pair
        return report

    def _is_foreign_folder(self) -> bool:
        return self.target.tokenizer_folder.parent == self.target.folder

    def _summary(self) -> SplitReport:
        report = SplitReport(str(self.target.folder))
        report.histogram = [0] * BUCKETS
        for number in range(self.prefix):
            done = self.pieces[number]
            report.documents += done["documents"] - done["empty"]
            report.bytes += done["bytes"]
            report.skipped += done["skipped"]
            report.empty += done["empty"]
            report.tokens += done["units"]
            report.histogram = [a + b for a, b in zip(report.histogram, done["histogram"], strict=True)]
            longest = [*report.longest, *((int(size), str(where)) for size, where in done["longest"])]
            report.longest = sorted(longest, key=lambda pair: -pair[0])[:LONGEST]
            report.bad_records = [*report.bad_records, *done["bad"]][:LONGEST]
        kept = sum(self.packer.shard_units)
        if self.plan.format == "mds" and self.tokenizer and kept != report.tokens:
            # samples were left out: at the end, or by no_wrap. Text counts are scaled to what was kept.
            share = kept / report.tokens if report.tokens else 0.0
            report.bytes, report.documents = round(report.bytes * share), round(report.documents * share)
            report.tokens = kept
        if not self.tokenizer:
            report.tokens = 0
        return report


# ---- packing --------------------------------------------------------------------------------------------------------


@dataclass
class _Shard:
    number: int
    parts: list[list[int]]  # [part, start, end): units of that part; for indexed [part, offset in the whole, 0]
    irregular: bytes = b""


class _Packer:
    """Cuts the stream of all parts, in order, into shards. A unit is a token, or a byte where text stays text."""

    def __init__(self, plan: _Plan, job: Job):
        self.plan, self.job = plan, job
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

    def add(self, part: int, units: int) -> list[_Shard]:
        raise NotImplementedError

    def finish(self) -> list[_Shard]:
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

    def _shard(self, start: int, end: int, units: int, irregular: bytes = b"") -> _Shard:
        shard = _Shard(self.next_shard, self._span(start, end), irregular)
        self.next_shard += 1
        self.shard_units.append(units)
        return shard


class _WrappedPacker(_Packer):
    """Samples of equal length, back to back: sample i is tokens [i * L, (i + 1) * L)."""

    def __init__(self, plan: _Plan, job: Job):
        super().__init__(plan, job)
        self.per_shard = samples_per_shard(plan.dtype, plan.concat_tokens, plan.compression)
        self.start = 0

    def pending_samples(self) -> int:
        return (self.end - self.start) // self.plan.concat_tokens

    def add(self, part: int, units: int) -> list[_Shard]:
        self._append(part, units)
        planned = []
        limit = self.plan.max_samples
        while self.pending_samples() >= self.per_shard and (limit is None or self.samples + self.per_shard <= limit):
            planned.append(self._take(self.per_shard * self.plan.concat_tokens))
        return planned

    def finish(self) -> list[_Shard]:
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

    def _take(self, units: int) -> _Shard:
        shard = self._shard(self.start, self.start + units, units)
        self.start += units
        self.samples += -(-units // self.plan.concat_tokens)
        return shard


class _DocumentPacker(_Packer):
    """Samples that begin with a document; what does not fill its sample is left out, as LLM Foundry's no_wrap does."""

    def __init__(self, plan: _Plan, job: Job):
        super().__init__(plan, job)
        self.per_shard = samples_per_shard(plan.dtype, plan.concat_tokens, plan.compression)
        self.starts: list[int] = []
        self.sample_start = 0

    def pending_samples(self) -> int:
        return len(self.starts)

    def add(self, part: int, units: int) -> list[_Shard]:
        base = self.end
        self._append(part, units)
        ends = np.cumsum(np.fromfile(part_paths(self.job, part)[1], dtype="<i4"), dtype=np.int64) + base
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

    def finish(self) -> list[_Shard]:
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

    def _take(self, count: int) -> _Shard:
        starts, self.starts = self.starts[:count], self.starts[count:]
        relative = np.array(starts, dtype=np.int64) - starts[0]
        length = self.plan.concat_tokens
        self.samples += count
        return self._shard(starts[0], starts[-1] + length, count * length, relative.tobytes())


class _TextPacker(_Packer):
    """Documents as they are, as many in a shard as Streaming would put there."""

    def __init__(self, plan: _Plan, job: Job):
        super().__init__(plan, job)
        self.sizes: list[int] = []
        self.start = 0
        self.base = mds.header_bytes(mds.shard_config(mds.text_column(), plan.compression))
        self.used = self.base

    def pending_samples(self) -> int:
        return len(self.sizes)

    def add(self, part: int, units: int) -> list[_Shard]:
        self._append(part, units)
        planned = []
        for size in np.fromfile(part_paths(self.job, part)[1], dtype="<i4").tolist():
            if self.plan.max_samples is not None and self.samples + len(self.sizes) >= self.plan.max_samples:
                break
            if size == 0:
                continue
            if self.sizes and self.used + size + 8 > mds.SIZE_LIMIT:
                planned.append(self._take())
            self.sizes.append(size)
            self.used += size + 8
        return planned

    def finish(self) -> list[_Shard]:
        self.finished = True
        return [self._take()] if self.sizes else []

    def _take(self) -> _Shard:
        sizes, self.sizes, self.used = self.sizes, [], self.base
        units = sum(sizes)
        shard = self._shard(self.start, self.start + units, units, np.array(sizes, dtype=np.int64).tobytes())
        self.start += units
        self.samples += len(sizes)
        return shard


class _IndexedPacker(_Packer):
    """Every part to its place in one `.bin`."""

    def pending_samples(self) -> int:
        return 0

    def add(self, part: int, units: int) -> list[_Shard]:
        offset = self.end
        self.end += units
        if not units:
            return []
        shard = _Shard(self.next_shard, [[part, offset, 0]])
        self.next_shard += 1
        self.shard_units.append(units)
        return [shard]

    def finish(self) -> list[_Shard]:
        self.finished = True
        return []


def _packer(plan: _Plan, job: Job) -> _Packer:
    if plan.format == "indexed":
        return _IndexedPacker(plan, job)
    if job.tokenizer is None:
        return _TextPacker(plan, job)
    return _DocumentPacker(plan, job) if plan.no_wrap else _WrappedPacker(plan, job)


def samples_per_shard(dtype: str, length: int, compression: str | None) -> int:
    """How many samples Streaming's writer puts into a shard before it begins the next."""
    token = np.dtype(dtype)
    config = mds.shard_config(mds.token_column(token), compression)
    sample = 4 + 4 + len(mds.array_header(length)) + length * token.itemsize
    return max(1, (mds.SIZE_LIMIT - mds.header_bytes(config)) // sample)


# ---- processes ------------------------------------------------------------------------------------------------------


class _Process:
    """A worker process, seen from the parent."""

    def __init__(self, job: Job):
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ingot.data.prepare_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        assert self.process.stdin and self.process.stdout
        self.requests, self.replies = self.process.stdin, self.process.stdout
        send(self.requests, job.to_json())

    def run(self, head: dict[str, Any], blob: bytes, progress: Callable[[dict[str, int]], None]) -> dict[str, Any]:
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
            try:
                pipe.close()
            except OSError:
                pass
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# ---- small things ---------------------------------------------------------------------------------------------------


def _check_choices(
    format: str, compression: str | None, on_error: str, concat_tokens: int, tokenizer: object, no_wrap: bool
) -> None:
    if format not in ("mds", "indexed"):
        raise DataError(f"format={format}: known are mds and indexed")
    kind, _, level = (compression or "zstd").partition(":")
    if kind != "zstd" or (level and not (level.isdigit() and 1 <= int(level) <= 22)):
        raise DataError(f"compression={compression}: known are zstd and zstd:LEVEL with a level from 1 to 22")
    if compression and format == "indexed":
        raise DataError("compression: the indexed format is read in place and cannot be compressed")
    if on_error not in ("stop", "skip"):
        raise DataError(f"on_error={on_error}: known are stop and skip")
    if concat_tokens < 1:
        raise DataError(f"concat_tokens={concat_tokens}: a sample needs at least one token")
    if tokenizer is None and format == "indexed":
        raise DataError("the indexed format holds tokens: give a tokenizer")
    if no_wrap and format == "indexed":
        raise DataError("no_wrap: the indexed format keeps whole documents, nothing is wrapped")


def _token_dtype(tokenizer: Tokenizer | None, format: str, token_type: str) -> str:
    if tokenizer is None:
        return "uint8"
    if token_type == "auto":
        if format == "indexed":
            return indexed.default_dtype(tokenizer.vocab_size)
        return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    known = ("uint16", "uint32", "int32", "int64") if format == "mds" else ("uint16", "int32", "int64")
    if token_type not in known:
        raise DataError(f"token_type={token_type}: known are auto, {', '.join(known)}")
    if np.iinfo(token_type).max < tokenizer.vocab_size - 1:
        raise DataError(f"token_type={token_type} cannot hold the {tokenizer.vocab_size:,} tokens of the vocabulary")
    return token_type


def _eos_ids(tokenizer: Tokenizer, eos_text: str | None) -> list[int]:
    if eos_text is not None:
        return tokenizer.encode(eos_text)
    if tokenizer.eos_id is None:
        raise DataError("the tokenizer names no end of document: give eos_text, or eos_text='' to have none")
    if tokenizer.encode("a", special_tokens=True)[-1] == tokenizer.eos_id:
        return []  # it adds its own
    return [tokenizer.eos_id]


def _worker_count(wanted: int | None, memory: int, input_bytes: int, reporter: Reporter) -> int:
    """How many worker processes; 0 does the work in this one, which is quicker for little input."""
    if wanted is not None and wanted < 0:
        raise DataError(f"num_workers={wanted}: must be 0 (this process) or more")
    if wanted is not None:
        return wanted
    if input_bytes <= PIECE_BYTES:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = max(1, memory // _WORKER_BYTES - 1)
    if fitting < cores:
        reporter.say(f"{fitting} workers on {cores} cores: more would need over {memory / 1e9:.1f} GB (memory=...)")
    return min(cores, fitting)


def _train_command(out_root: Path, split: str) -> str:
    root = shlex.quote(str(out_root))
    if split.startswith("train") and (out_root / "val").is_dir() and split == "train":
        return f"ingot train mpt-125m data={root}"
    if split.startswith("val") and (out_root / "train").is_dir() and split == "val":
        return f"ingot train mpt-125m data={root}"
    return f"ingot train mpt-125m data.train.path={root} data.train.split={shlex.quote(split)} data.eval=null"


def _file_hash(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name == "lock":
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def read_texts(inputs: Sequence[str | Path], key: str = "text") -> Iterator[str]:
    """The documents of some files, one by one, for those who want the text (such as tokenizer training)."""
    from ingot.data.sources import read_piece

    options = ReadOptions(key)
    for piece, handed in plan_pieces(find_files(inputs), True, options):
        for block in read_piece(piece, handed, options, lambda text, low, high: None):
            for record, problem in block.bad:
                raise DataError(f"{block.path}:{record + 1}: {problem}")
            yield from block.texts
