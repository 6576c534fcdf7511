"""One split on its way from files to shards: what is done, what comes next, and how the result gets its final name.

Workers turn pieces of the input into parts, and parts into shards; this file only decides who does what, in one loop
over futures. A shard is written as soon as the parts that it spans are there, and those parts are then removed, so
little more than the data set itself is ever on the disk. The split appears under its final name by one rename, when it
is complete.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any

import numpy as np

from ingot.data.formats import indexed_writer as indexed
from ingot.data.formats import mds_writer as mds
from ingot.data.prepare.input_files import SourceFile
from ingot.data.prepare.journal import Journal, SplitReport, Target, is_empty
from ingot.data.prepare.packing import PackingPlan, ShardPlan, make_packer, part_paths
from ingot.data.prepare.pieces import Piece, plan_pieces
from ingot.data.prepare.pool import Pool, TaskRunner
from ingot.data.prepare.progress import PrepareProgress
from ingot.data.prepare.tokenize_engine import Engine
from ingot.data.prepare.worker import BUCKETS, LONGEST, TokenizeWorker
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.errors import DataError, disk_error
from ingot.storage.atomic import write_json

_AHEAD = 2  # tasks that wait for a worker, so that none is ever idle

Task = tuple[dict[str, Any], bytes, int]
"""What a worker shall do, the bytes that it needs for it, and how much of the input that is."""
NumberedPieces = Iterator[tuple[int, tuple[Piece, bytes]]]


class SplitJob:
    """One split on its way: which pieces and shards are done, what comes next."""

    def __init__(
        self,
        target: Target,
        plan: PackingPlan,
        files: list[SourceFile],
        tokenizer: Tokenizer | None,
        workers: Pool | Engine | None,  # the processes that do the work; else it is done in this one, with this engine
        progress: PrepareProgress,
    ):
        self.target, self.plan, self.files, self.tokenizer = target, plan, files, tokenizer
        self.workers, self.progress, self.work = workers, progress, target.work
        self.share = plan.options.share  # of one of several processes, which makes parts and nothing else
        self.journal = Journal(self.work, self.share, progress.say)
        self.packer = make_packer(plan, self.work)
        self.signature = self._signature()
        self.piece_count: int | None = None  # once known
        self.pieces_read = 0
        self.ready: Task | None = None  # a piece that is read and not started
        self.prefix = 0  # pieces [0, prefix) are done and in the packer
        self.shard_tasks: deque[Task] = deque()
        self.first_parts: list[int] = []  # of each planned shard
        self.shards_ended = 0  # shards [0, shards_ended) are done
        self.parts_ended = 0  # parts [0, parts_ended) are removed

    def run(self) -> SplitReport:
        """Do everything that is left, and put the result in place."""
        self.target.check_work()
        if finished := self._already_finished():
            shutil.rmtree(self.work, ignore_errors=True)  # left if it was killed at the very end
            self.progress.say(f"{self.target.meta.parent}: already complete")
            return finished
        self._check_tokenizer()
        if self.share and self.plan.options.sample_limit is not None:
            self.progress.say("a number of samples needs the beginning of the input only: left to the last process")
            return SplitReport(str(self.target.folder))
        inputs = [[f.path, f.size, f.mtime_ns] for f in self.files]
        state = {"signature": self.signature, "inputs": inputs, "whole_files": self._prefers_whole_files()}
        try:
            with self.journal.opened(state):
                pieces = self.journal.pieces
                self.progress.start(sum(f.size for f in self.files) // self.journal.turns, resumed=len(pieces))
                try:
                    self._work()
                finally:
                    self.progress.stop()
                if self.share:
                    sums = (sum(done[key] for done in pieces.values()) for key in ("documents", "units", "bytes"))
                    return SplitReport(str(self.target.folder), *sums)
                report = self._assemble()
                shutil.rmtree(self.work, ignore_errors=True)
                return report
        except OSError as error:
            raise disk_error("write to", self.work, error) from None

    # ---- before ----

    def _signature(self) -> str:
        """A name for this output: the same command on the same input."""
        content: dict[str, Any] = {
            "plan": self.plan.identity,
            "files": [[f.path, f.size] for f in self.files],
            "tokenizer": self.tokenizer.fingerprint() if self.tokenizer else None,
            "format": 2,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def _prefers_whole_files(self) -> bool:
        """Whether there are enough files that only one process can read to give each worker some."""
        streams = [f for f in self.files if f.compression or f.format in ("json", "csv")]
        count = len(self.workers.workers) if isinstance(self.workers, Pool) else 0
        return len(streams) >= 4 * count * self.journal.turns

    def _already_finished(self) -> SplitReport | None:
        target = self.target
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            made = json.loads(target.meta.read_text(encoding="utf-8"))["prepare"]
            if made["signature"] == self.signature:
                return SplitReport(**{**made["report"], "folder": str(target.folder)})
        taken = target.folder if target.stem is None else target.folder / f"{target.stem}.idx"
        if taken.is_symlink() or (taken.exists() and (target.stem or not is_empty(taken))):
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

    # ---- the work ----

    def _work(self) -> None:
        if isinstance(self.workers, Pool):
            runs, ahead = [worker.start(self.plan, self.work) for worker in self.workers.workers], _AHEAD
        else:
            runs, ahead = [TokenizeWorker(self.plan, self.work, self.workers).run], 0
        reader = ThreadPoolExecutor(1, "pieces")
        with contextlib.closing(TaskRunner(runs)) as runner:
            try:
                self._schedule(runner, len(runs) + ahead, reader)
            finally:
                reader.shutdown(cancel_futures=True)

    def _schedule(self, runner: TaskRunner, limit: int, reader: ThreadPoolExecutor) -> None:
        """Keep up to `limit` tasks with the runner until there are none left. After a failure, what is running is
        finished and recorded; of several failures, the first in the input is raised."""
        pieces = enumerate(plan_pieces(self.files, bool(self.journal.state["whole_files"]), self.plan.options))
        running: dict[Future[Any], tuple[dict[str, Any], int]] = {}
        reading: Future[Task | None] | None = None  # the next piece, read ahead of use
        errors: dict[tuple[int, int], BaseException] = {}
        while True:
            self._plan_finished()
            while not errors and len(running) < limit and (task := self._next_task()):
                head, blob, size = task
                running[runner.submit(head, blob, self.progress.advance)] = head, size
                del task, blob
            if not errors and reading is None and self.ready is None and self.piece_count is None:
                reading = reader.submit(self._read_next, pieces)
            pending: list[Future[Any]] = [*running, *([reading] if reading else [])]
            if not pending:
                break
            for future in wait(pending, 0.2, FIRST_COMPLETED).done:
                if future is not reading:
                    head, size = running.pop(future)
                    if not future.cancelled() and (problem := future.exception()):
                        errors[0, head["number"]] = problem
                    elif not future.cancelled():
                        self.journal.record(head, future.result())
                        self._remove_parts()
                        self.progress.consumed(size)
                elif problem := future.exception():
                    errors[1, 0], reading = problem, None
                else:
                    self.ready, reading = future.result(), None
                    if self.ready is None and self.piece_count is None:
                        self.piece_count = self.pieces_read
            for future in running if errors else ():
                future.cancel()  # those that no worker has started
            self.progress.refresh()
        if errors:
            raise errors[min(errors)]

    def _read_next(self, pieces: NumberedPieces) -> Task | None:
        """In a thread of its own: the next piece that is not done; None at the end of the input."""
        for number, (piece, handed) in pieces:
            self.pieces_read = number + 1
            if number in self.journal.pieces:
                self.progress.consumed(piece.size, earlier=True)
            elif self.journal.is_own(number):
                return {"task": "tokenize", "number": number, "piece": asdict(piece)}, handed, piece.size
        return None

    def _next_task(self) -> Task | None:
        """A task that can be done now. Shards first: they let parts be removed."""
        if self.shard_tasks:
            return self.shard_tasks.popleft()
        task, self.ready = self.ready, None
        return task if self.piece_count is None else None  # else the packer has all that it needs

    def _plan_finished(self) -> None:
        """Hand finished pieces, in order, to the packer; it says which shards can be written."""
        if self.share:
            return
        pieces = self.journal.pieces
        while self.prefix in pieces and (self.piece_count is None or self.prefix < self.piece_count):
            self._plan_shards(self.packer.add(self.prefix, int(pieces[self.prefix]["units"])))
            self.prefix += 1
            if self.packer.is_full:
                self.piece_count = self.prefix
        if self.piece_count is not None and self.prefix >= self.piece_count and not self.packer.finished:
            self._plan_shards(self.packer.finish())

    def _plan_shards(self, planned: list[ShardPlan]) -> None:
        for shard in planned:
            self.first_parts.append(shard.parts[0][0])
            if shard.number not in self.journal.shards:
                head = {"task": "shard", "number": shard.number, "parts": shard.parts}
                self.shard_tasks.append((head, shard.irregular, 0))

    def _remove_parts(self) -> None:
        """Remove the parts that no shard needs any more: shards are in the order of the parts."""
        while self.shards_ended in self.journal.shards:
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
        """Index and metadata, then the final name."""
        target, report = self.target, self._summary()
        if not report.tokens and not report.bytes:
            raise DataError(f"no text in {len(self.files)} input files, the first being {self.files[0].path}")
        entries = [self.journal.shards[k] for k in sorted(self.journal.shards)]
        built = self.work / "shards"
        if self.plan.options.format == "indexed":
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
        for left in [*built.glob(".*.tmp"), *target.tokenizer_folder.glob(".*.tmp")]:
            left.unlink(missing_ok=True)  # a run that was killed was writing them
        if self.tokenizer:
            self.tokenizer.save(target.tokenizer_folder)
        write_json(built / "meta.json", self._meta(report, shards))
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

    def _meta(self, report: SplitReport, shards: list[dict[str, Any]]) -> dict[str, Any]:
        tokenizer, options = self.tokenizer, self.plan.options
        return {
            "version": 1,
            "format": options.format,
            "tokens": report.tokens,
            "documents": report.documents,
            "bytes": report.bytes,
            "vocab_size": tokenizer.vocab_size if tokenizer else None,
            "max_token": max((self.journal.pieces[n]["max_token"] for n in range(self.prefix)), default=0),
            "eos_id": tokenizer.eos_id if tokenizer else None,
            "shards": shards if tokenizer else [],
            "prepare": {
                "signature": self.signature,
                "tokenizer": tokenizer.fingerprint() if tokenizer else None,
                "concat_tokens": options.concat_tokens if options.format == "mds" else None,
                "report": {**asdict(report), "folder": ""},
            },
        }

    def _summary(self) -> SplitReport:
        report = SplitReport(str(self.target.folder))
        report.histogram = [0] * BUCKETS
        for number in range(self.prefix):
            done = self.journal.pieces[number]
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
        if self.plan.options.format == "mds" and self.tokenizer and kept != report.tokens:
            # samples were dropped: at the end, or by no_wrap
            report.is_estimate = True
            share = kept / report.tokens if report.tokens else 0.0
            report.bytes, report.documents = round(report.bytes * share), round(report.documents * share)
            report.tokens = kept
        if not self.tokenizer:
            report.tokens = 0
        return report
