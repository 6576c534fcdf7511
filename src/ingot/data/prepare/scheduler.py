"""One split on its way from files to shards: what is done, what comes next, and how it survives a crash.

Workers turn pieces of the input into parts, and parts into shards; this file only decides who does what. A shard is
written as soon as the parts that it spans are there, and those parts are then removed, so little more than the data
set itself is ever on the disk. Each finished task is a line in a journal; the same command reads it and does the rest.
The split appears under its final name by one rename, when it is complete.

Several processes, on several machines, can divide the pieces of one split: each does its share into the common work
folder, with a journal of its own, and a last one finds the pieces done and does the rest.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from ingot.data.formats import indexed_writer as indexed
from ingot.data.formats import mds_writer as mds
from ingot.data.prepare.input_files import SourceFile
from ingot.data.prepare.packing import PackingPlan, Shard, make_packer, part_paths
from ingot.data.prepare.pieces import plan_pieces
from ingot.data.prepare.pool import Pool
from ingot.data.prepare.progress import Reporter, follow
from ingot.data.prepare.tokenize_engine import Engine
from ingot.data.prepare.worker import BUCKETS, LONGEST, TokenizeWorker
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.errors import DataError, disk_error
from ingot.storage.atomic import file_hash, write_json

_AHEAD = 2  # pieces that are read before a worker asks for them

STATE = "state.json"
# What a run writes into its work folder, and what is left of that when it is killed.
_WORK_NAMES = re.compile(
    r"lock(\.\w+)?|journal(\.\d+)?\.jsonl|parts|shards|state\.json|\.state\.json\.\d+\.tmp|\.nfs\w+"
)

Task = tuple[dict[str, Any], bytes, int]
"""What a worker shall do, the bytes that it needs for it, and how much of the input that is."""


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
    is_estimate: bool = False
    """Samples were left out, so documents and bytes are shares of what was read, by tokens."""
    histogram: list[int] = field(default_factory=list)
    """Documents by length: entry b counts those of 2**(b-1) to 2**b - 1 tokens."""
    longest: list[tuple[int, str]] = field(default_factory=list)
    """(tokens, where) of the longest documents."""
    bad_records: list[str] = field(default_factory=list)
    """The first few records that were skipped, and why."""


@dataclass(frozen=True)
class Target:
    """Where the output goes: a folder of its own, or a pair of files at a prefix."""

    tokenizer_folder: Path
    work: Path  # where it is built
    folder: Path  # final folder
    stem: str | None  # name of the pair, for the indexed format

    @staticmethod
    def choose(out_root: Path, split: str, format: str, prefix: str | None, key: str) -> "Target":
        if format == "mds":
            return Target(out_root / "tokenizer", out_root / f".{split}.partial", out_root / split, None)
        place = Path(prefix) if prefix else out_root / split / split
        stem = f"{place.name}_{key}_document"
        tokenizer_folder = (place.parent if prefix else out_root) / "tokenizer"
        return Target(tokenizer_folder, place.parent / f".{stem}.partial", place.parent, stem)

    def remove(self) -> None:
        """Delete an earlier result, finished or not. What `prepare` did not write is refused and stays."""
        self.check_work()
        try:
            if self.stem is None:
                taken = self.folder.is_symlink() or (self.folder.exists() and not _is_empty(self.folder))
            else:  # a run that was killed at the very end has put the .bin in place and nothing else
                ends = ("idx", "meta.json") if (self.work / STATE).is_file() else ("idx", "meta.json", "bin")
                taken = any(os.path.lexists(self.folder / f"{self.stem}.{end}") for end in ends)
            if taken and not self._is_own():
                place = self.folder / self.stem if self.stem else self.folder
                raise DataError(
                    f"{place}: not removed, because it is a link or no meta.json shows that `prepare` wrote it; "
                    "remove it yourself, or choose another output"
                )
            if self.work.exists():
                shutil.rmtree(self.work)
            if self.stem is not None:
                for suffix in ("idx", "bin", "meta.json"):
                    (self.folder / f"{self.stem}.{suffix}").unlink(missing_ok=True)
            elif self.folder.exists():
                for entry in sorted(self.folder.iterdir()):
                    if entry != self.meta:  # last: a removal that is interrupted can be repeated
                        _remove(entry)
                self.meta.unlink(missing_ok=True)
                self.folder.rmdir()
        except OSError as error:
            raise disk_error("remove", self.folder, error) from None

    def check_work(self) -> None:
        """Refuse a work folder that `prepare` did not make: what is in it would be removed."""
        if self.work.is_symlink() or (self.work.exists() and not self.work.is_dir()):
            raise DataError(f"{self.work}: not a folder that `prepare` made; move it away, or choose another output")
        with contextlib.suppress(FileNotFoundError):
            for entry in self.work.iterdir():
                if entry.is_symlink() or not _WORK_NAMES.fullmatch(entry.name):
                    raise DataError(f"{entry}: `prepare` did not write this; move it away, or choose another output")

    def _is_own(self) -> bool:
        """Whether the meta data of a preparation is with the result."""
        if self.stem is None and self.folder.is_symlink():
            return False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return bool(json.loads(self.meta.read_text(encoding="utf-8"))["prepare"]["signature"])
        return False

    @property
    def meta(self) -> Path:
        return self.folder / (f"{self.stem}.meta.json" if self.stem else "meta.json")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _remove(path: Path) -> None:
    """Delete a file, a link or a folder; what a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@dataclass(eq=False)
class SplitJob:
    """One split on its way: which pieces and shards are done, what comes next."""

    target: Target
    plan: PackingPlan
    files: list[SourceFile]
    tokenizer: Tokenizer | None
    workers: Pool | Engine | None  # the processes that do the work; else it is done in this one, with this engine
    reporter: Reporter
    share: tuple[int, int] | None = None  # (turn, turns) of one of several processes, which makes parts and no more

    def __post_init__(self) -> None:
        self.turn, self.turns = self.share or (0, 1)  # its pieces: those whose number is `turn` modulo `turns`
        self.work, self.packer = self.target.work, make_packer(self.plan, self.target.work)
        self.signature = self._signature()
        self.pieces: dict[int, dict[str, Any]] = {}  # finished pieces and what was in them
        self.shards: dict[int, dict[str, Any]] = {}  # finished shards and their index entries
        self.lock = threading.Condition()
        self.error: tuple[int, Exception] | None = None
        self.stopped = False
        self.running = 0
        self.pieces_ended: int | None = None  # number of pieces, once known
        self.prefix = 0  # pieces [0, prefix) are done and in the packer
        self.shard_tasks: deque[Task] = deque()
        self.piece_tasks: deque[Task] = deque()
        self.first_parts: list[int] = []  # of each planned shard
        self.shards_ended = 0  # shards [0, shards_ended) are done
        self.parts_ended = 0  # parts [0, parts_ended) are removed

    def run(self) -> SplitReport:
        """Do everything that is left, and put the result in place."""
        self.target.check_work()
        if finished := self._already_finished():
            shutil.rmtree(self.work, ignore_errors=True)  # left if it was killed at the very end
            self.reporter.say(f"{self.target.meta.parent}: already complete")
            return finished
        self._check_tokenizer()
        if self.share and self.plan.max_samples is not None:
            self.reporter.say("a number of samples needs the beginning of the input alone: left to the last process")
            return SplitReport(str(self.target.folder))
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as locks:
                if self.share:
                    with (self.work / "lock.start").open("w") as start:
                        fcntl.flock(start, fcntl.LOCK_EX)  # one after another: the first makes the folder ready
                        locks.enter_context(self._lock(f"lock.{self.turn}", fcntl.LOCK_EX))
                        self._start_or_resume(locks.enter_context(self._lock("lock", fcntl.LOCK_SH)))
                else:
                    self._start_or_resume(locks.enter_context(self._lock("lock", fcntl.LOCK_EX)))
                self.reporter.start(sum(f.size for f in self.files) // self.turns, resumed=len(self.pieces))
                try:
                    self._work()
                finally:
                    self.reporter.stop()
                self.journal.close()
                if self.share:
                    sums = (sum(done[key] for done in self.pieces.values()) for key in ("documents", "units", "bytes"))
                    return SplitReport(str(self.target.folder), *sums)
                report = self._assemble()
                shutil.rmtree(self.work, ignore_errors=True)
                return report
        except OSError as error:
            raise disk_error("write to", self.work, error) from None

    def _lock(self, name: str, how: int) -> IO[str]:
        """Held while the file is open."""
        file = (self.work / name).open("w+")
        self._take(file, how)
        return file

    def _take(self, file: IO[str], how: int) -> None:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise DataError(f"{self.work}: another `prepare` is at work here; wait for it") from None

    # ---- before ----

    def _signature(self) -> str:
        """A name for this output: the same command on the same input."""
        content: dict[str, Any] = {
            "plan": asdict(self.plan),
            "files": [[f.path, f.size] for f in self.files],
            "tokenizer": self.tokenizer.fingerprint() if self.tokenizer else None,
            "format": 2,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def _already_finished(self) -> SplitReport | None:
        target = self.target
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            made = json.loads(target.meta.read_text(encoding="utf-8"))["prepare"]
            if made["signature"] == self.signature:
                return SplitReport(**{**made["report"], "folder": str(target.folder)})
        taken = target.folder if target.stem is None else target.folder / f"{target.stem}.idx"
        if taken.is_symlink() or (taken.exists() and (target.stem or not _is_empty(taken))):
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

    def _start_or_resume(self, lock: IO[str]) -> None:
        work, state_file = self.work, self.work / STATE
        inputs = [[f.path, f.size, f.mtime_ns] for f in self.files]
        streams = [f for f in self.files if f.compression or f.format in ("json", "csv")]
        count = len(self.workers.workers) if isinstance(self.workers, Pool) else 0
        state = {"signature": self.signature, "inputs": inputs, "whole_files": len(streams) >= 4 * count * self.turns}
        old: Any = None
        with contextlib.suppress(OSError, ValueError):
            old = json.loads(state_file.read_text(encoding="utf-8"))
        if isinstance(old, dict) and all(old.get(k) == state[k] for k in ("signature", "inputs")):
            state = old
        else:
            if old:
                self._take(lock, fcntl.LOCK_EX)  # not while another command's processes are at work
                self.reporter.say(f"{work}: left by another command or other input; starting again")
            for entry in work.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif not entry.name.startswith("lock"):
                    entry.unlink()
            write_json(state_file, state)
            if self.share:
                self._take(lock, fcntl.LOCK_SH)
        self.whole_files = bool(state["whole_files"])
        for name in ("parts", "shards"):
            (work / name).mkdir(exist_ok=True)
        own = work / (f"journal.{self.turn}.jsonl" if self.share else "journal.jsonl")
        for path in sorted(work.glob("journal*.jsonl")):
            self._read_journal(path, mend=path == own)
        self._verify_parts()
        self.journal = own.open("a", encoding="utf-8")

    def _read_journal(self, path: Path, mend: bool) -> None:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        if mend and len(whole) < len(lines):  # killed while it wrote the last one
            path.write_text("".join(whole), encoding="utf-8")
        for line in whole:
            entry = json.loads(line)
            kind, number = entry["task"], entry["number"]
            if kind != "tokenize":
                self.shards[number] = entry["done"]
            elif number % self.turns == self.turn:
                self.pieces[number] = entry["done"]

    def _verify_parts(self) -> None:
        for number, done in follow("verifying what an earlier run left", list(self.pieces.items())):
            data, lengths = part_paths(self.work, number)
            # A part that is gone has served its shards; one that is damaged (a power cut) must be made again.
            if data.exists() and (not lengths.exists() or file_hash(data, xxhash.xxh3_64) != done["hash"]):
                del self.pieces[number]

    # ---- the work ----

    def _work(self) -> None:
        reader = threading.Thread(target=self._read_pieces, daemon=True)
        reader.start()
        try:
            if isinstance(self.workers, Pool):
                runs = [worker.start(self.plan, self.work) for worker in self.workers.workers]
                threads = [threading.Thread(target=self._drive, args=(run,), daemon=True) for run in runs]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():  # in slices, so that Ctrl-C is heard
                        thread.join(0.2)
                        self.reporter.refresh()
            else:
                self._drive(TokenizeWorker(self.plan, self.work, self.workers).run)
        finally:
            with self.lock:
                self.stopped = True
                self.lock.notify_all()
            while reader.is_alive():
                reader.join(0.2)
        if self.error:
            raise self.error[1]

    def _read_pieces(self) -> None:
        """A thread: the pieces that are not done yet, a few ahead of use."""
        count = 0
        try:
            for number, (piece, handed) in enumerate(plan_pieces(self.files, self.whole_files, self.plan.options)):
                count = number + 1
                with self.lock:
                    if number in self.pieces:
                        self.reporter.skip(piece.size)
                    elif number % self.turns == self.turn:
                        self.lock.wait_for(lambda: self.stopped or len(self.piece_tasks) < _AHEAD)
                        head = {"task": "tokenize", "number": number, "piece": asdict(piece)}
                        self.piece_tasks.append((head, handed, piece.size))
                        self.lock.notify_all()
                    if self.stopped:
                        return
            with self.lock:
                self.pieces_ended = count if self.pieces_ended is None else self.pieces_ended
                self.lock.notify_all()
        except Exception as error:
            self._fail(1 << 60, error)

    def _drive(self, run: Callable[..., dict[str, Any]]) -> None:
        """Give one worker its tasks until there are none."""
        try:
            while task := self._next_task():
                head, blob, size = task
                del task
                done = run(head, blob, self.reporter.advance)
                del blob
                with self.lock:
                    self._record(head, done)
                    self.running -= 1
                    self.lock.notify_all()
                self.reporter.consumed(size)
        except Exception as error:
            self._fail(0, error)

    def _next_task(self) -> Task | None:
        """Waits for a task; None if there will be no more. Shards first: they let parts be removed."""
        with self.lock:
            while True:
                self._advance()
                if self.error or self.stopped:
                    return None
                enough = self.enough
                if tasks := self.shard_tasks or (None if enough else self.piece_tasks):
                    self.running += 1
                    self.lock.notify_all()  # the reader, for which there may be room
                    return tasks.popleft()
                if enough and self.running == 0:
                    return None
                self.lock.wait(0.5)

    @property
    def enough(self) -> bool:
        """Whether no further piece is needed."""
        if self.pieces_ended is None:
            return False
        return all(n in self.pieces for n in range(self.prefix + self.turn, self.pieces_ended, self.turns))

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
        self._remove_parts()

    def _advance(self) -> None:
        """Give finished pieces, in order, to the packer; it says which shards can be written."""
        if self.share:
            return
        while self.prefix in self.pieces and (self.pieces_ended is None or self.prefix < self.pieces_ended):
            self._plan_shards(self.packer.add(self.prefix, int(self.pieces[self.prefix]["units"])))
            self.prefix += 1
            if self.packer.is_full:
                self.pieces_ended = self.prefix
        if self.pieces_ended is not None and self.prefix >= self.pieces_ended and not self.packer.finished:
            self._plan_shards(self.packer.finish())

    def _plan_shards(self, planned: list[Shard]) -> None:
        for shard in planned:
            self.first_parts.append(shard.parts[0][0])
            if shard.number not in self.shards:
                head = {"task": "shard", "number": shard.number, "parts": shard.parts}
                self.shard_tasks.append((head, shard.irregular, 0))

    def _remove_parts(self) -> None:
        """Remove the parts that no shard needs any more: shards lie in the parts in order."""
        while self.shards_ended in self.shards:
            self.shards_ended += 1
        planned = self.shards_ended < len(self.first_parts)
        needed = self.first_parts[self.shards_ended] if planned else self.packer.open_part
        for part in range(self.parts_ended, min(needed, self.prefix)):
            data, lengths = part_paths(self.work, part)
            data.unlink(missing_ok=True)
            if not self.packer.needs_lengths:
                lengths.unlink(missing_ok=True)
            self.parts_ended = part + 1

    # ---- after ----

    def _assemble(self) -> SplitReport:
        """Index and meta data, then the final name."""
        target, report = self.target, self._summary()
        if not report.tokens and not report.bytes:
            raise DataError(f"no text in {len(self.files)} input files, the first being {self.files[0].path}")
        entries = [self.shards[k] for k in sorted(self.shards)]
        built = self.work / "shards"
        if self.plan.format == "indexed":
            lengths = [part_paths(self.work, n)[1] for n in range(self.prefix)]
            if (built / "tokens.bin").exists():
                with (built / "tokens.bin").open("ab") as file:
                    os.fsync(file.fileno())
            indexed.write_idx(built / "tokens.idx", np.dtype(self.plan.dtype), lengths)
            report.shards = 1
            shards = [{"basename": f"{target.stem}.bin", "tokens": report.tokens}]
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
        for left in [*built.glob(".*.tmp"), *target.tokenizer_folder.glob(".*.tmp")]:
            left.unlink(missing_ok=True)  # a run that was killed was writing them
        if self.tokenizer:
            self.tokenizer.save(target.tokenizer_folder)
        write_json(built / "meta.json", meta)
        if target.stem is None:
            if target.folder.exists():
                target.folder.rmdir()  # it is empty, or the run would have been refused
            built.replace(target.folder)
        else:
            if (built / "tokens.bin").exists():  # not if an earlier run got this far
                (built / "tokens.bin").replace(target.folder / f"{target.stem}.bin")
            (built / "meta.json").replace(target.meta)
            (built / "tokens.idx").replace(target.folder / f"{target.stem}.idx")  # last: without it there is no pair
        return report

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
            # samples were left out: at the end, or by no_wrap
            report.is_estimate = True
            share = kept / report.tokens if report.tokens else 0.0
            report.bytes, report.documents = round(report.bytes * share), round(report.documents * share)
            report.tokens = kept
        if not self.tokenizer:
            report.tokens = 0
        return report
