"""Takes one split from files to shards: what is done, what comes next, and the final name of the result.

Workers turn pieces of the input into parts, and parts into shards; this file only decides who does what, in one loop
over futures. A shard is written as soon as the parts that it spans exist, and these parts are then removed, so little
more than the dataset itself is ever on the disk. The split gets its final name by one rename, when it is complete.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from ingot.data.formats import indexed_writer as indexed
from ingot.data.formats import mds_writer as mds
from ingot.data.prepare.holdout import check_division
from ingot.data.prepare.journal import Journal, SplitReport, Target, is_empty
from ingot.data.prepare.own_tokenizer import discard_tokenizer
from ingot.data.prepare.packing import PackingPlan, ShardPlan, make_packer, part_paths
from ingot.data.prepare.pool import InProcess, WorkerPool
from ingot.data.prepare.progress import PrepareProgress
from ingot.data.prepare.worker import DocumentStats, Task
from ingot.data.sources.input_files import SourceFile
from ingot.data.sources.pieces import Piece, plan_pieces
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.errors import DataError, IngotError, disk_error
from ingot.plurals import count_of
from ingot.storage.atomic import write_json


class SplitJob:
    """One split that is being prepared."""

    def __init__(
        self,
        target: Target,
        plan: PackingPlan,
        files: list[SourceFile],
        tokenizer: Tokenizer | None,
        workers: WorkerPool | InProcess,
        progress: PrepareProgress,
    ):
        self.target, self.plan, self.files, self.tokenizer = target, plan, files, tokenizer
        self.workers, self.progress, self.work = workers, progress, target.work
        self.share = plan.options.share  # of one of several processes, which makes parts and nothing else
        self.journal = Journal(self.work, self.share, progress.say)
        self.packer = make_packer(plan, self.work)
        self.signature = self._signature()
        self.piece_count: int | None = None  # known at the end of the input, or when the packer has enough
        self.pieces_read = 0
        self.pieces_packed = 0  # pieces [0, pieces_packed) are done and in the packer
        self.ready_shards: deque[ShardPlan] = deque()
        self.first_parts: list[int] = []  # of each planned shard
        self.shards_ended = 0  # shards [0, shards_ended) are done
        self.parts_ended = 0  # parts [0, parts_ended) are removed

    def finished(self) -> SplitReport | None:
        """What an earlier run of the same command made, if it is complete."""
        self.target.check_work()
        made = self._already_finished()
        if made:
            shutil.rmtree(self.work, ignore_errors=True)  # left if it was killed at the very end
            self.progress.say(f"{self.target.meta.parent}: already complete")
        return made

    def run(self, threshold: int = 0) -> SplitReport:
        """Do everything that is left, and put the result in place. Documents whose hash is below the threshold are held
        out for validation."""
        if self.plan.holdout:
            self.plan = replace(self.plan, holdout=replace(self.plan.holdout, below=threshold))
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
        one_reader = ("json", "csv", *(["text"] if self.plan.options.documents not in ("file", "line") else []))
        streams = [f for f in self.files if f.compression or f.format in one_reader]
        return len(streams) >= 4 * self.workers.count * self.journal.turns

    def _already_finished(self) -> SplitReport | None:
        target = self.target
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            made = json.loads(target.meta.read_text(encoding="utf-8"))["prepare"]
            if made["signature"] == self.signature:
                return SplitReport(**{**made["report"], "folder": str(target.folder)})
        taken = target.folder if target.stem is None else target.folder / f"{target.stem}.idx"
        if taken.is_symlink() or (taken.exists() and (target.stem or not is_empty(taken))):
            raise DataError(
                f"{taken}: already there, and made from other input or with other options; choose another output, or "
                "remove it with --reprocess"
            )
        return None

    def _check_tokenizer(self) -> None:
        folder = self.target.tokenizer_folder
        if self.tokenizer is None or not (folder / "tokenizer.json").is_file():
            return
        if load_tokenizer(folder).fingerprint() != self.tokenizer.fingerprint():
            raise DataError(
                f"{folder}: the dataset there was made with another tokenizer; use that one, or choose another output"
            )

    # ---- the work ----

    def _work(self) -> None:
        """Keep the workers busy until nothing is left. After a failure, what is running is finished and recorded; of
        several failures, the first in the input is raised."""
        pieces = enumerate(plan_pieces(self.files, bool(self.journal.state["whole_files"]), self.plan.options))
        running: dict[Future[dict[str, Any]], Task] = {}
        errors: dict[float, BaseException] = {}
        try:
            while True:
                try:
                    while not errors and len(running) < self.workers.slots and (task := self._next_task(pieces)):
                        running[self.workers.submit(task, self.progress.advance)] = task
                except IngotError as error:
                    errors[math.inf] = error
                if not running:
                    break
                for future in wait(running, 0.2, FIRST_COMPLETED).done:
                    task = running.pop(future)
                    if future.cancelled():
                        continue
                    if problem := future.exception():
                        errors[task.number] = problem
                    else:
                        self._record(task, future.result())
                for future in running if errors else ():
                    future.cancel()  # those that no worker has started
                self.progress.refresh()
        finally:  # after Ctrl-C
            for future in running:
                future.cancel()
            wait(running)
        if errors:
            raise errors[min(errors)]

    def _next_task(self, pieces: Iterator[tuple[int, Piece]]) -> Task | None:
        """A task that can be done now. Shards first: they let parts be removed."""
        self._plan_shards()
        if not self.ready_shards and self.piece_count is None:
            for number, piece in pieces:
                self.pieces_read = number + 1
                if number in self.journal.pieces:
                    self.progress.consumed(piece.size, earlier=True)
                elif self.journal.is_own(number):
                    return Task(self.plan, self.work, number, piece)
            self.piece_count = self.pieces_read
            self._plan_shards()
        if not self.ready_shards:
            return None
        shard = self.ready_shards.popleft()
        return Task(self.plan, self.work, shard.number, shard)

    def _record(self, task: Task, done: dict[str, Any]) -> None:
        self.journal.record("tokenize" if isinstance(task.work, Piece) else "shard", task.number, done)
        self._remove_parts()
        if isinstance(task.work, Piece):
            self.progress.consumed(task.work.size)

    def _plan_shards(self) -> None:
        """Add finished pieces, in order, to the packer, which says what shards can be written."""
        if self.share:
            return
        pieces, planned = self.journal.pieces, []
        while self.pieces_packed in pieces and self.pieces_packed != self.piece_count:
            planned += self.packer.add(self.pieces_packed, int(pieces[self.pieces_packed]["units"]))
            self.pieces_packed += 1
            if self.packer.is_full:
                self.piece_count = self.pieces_packed
        if self.pieces_packed == self.piece_count and not self.packer.finished:
            planned += self.packer.finish()
        self.first_parts += [shard.parts[0][0] for shard in planned]
        self.ready_shards += [shard for shard in planned if shard.number not in self.journal.shards]

    def _remove_parts(self) -> None:
        """Remove the parts that no shard needs any more: shards are in the order of the parts."""
        while self.shards_ended in self.journal.shards:
            self.shards_ended += 1
        planned = self.shards_ended < len(self.first_parts)
        needed = self.first_parts[self.shards_ended] if planned else self.packer.open_part
        for part in range(self.parts_ended, min(needed, self.pieces_packed)):
            data, lengths = part_paths(self.work, part)
            data.unlink(missing_ok=True)
            if not self.packer.needs_lengths:
                lengths.unlink(missing_ok=True)
            self.parts_ended = part + 1

    # ---- after ----

    def _assemble(self) -> SplitReport:
        """Index and metadata, then the final name."""
        target, total = self.target, self._total()
        report = self._summary(total)
        try:
            self._check_documents(total, report)
        except DataError:  # nothing to continue
            shutil.rmtree(self.work, ignore_errors=True)
            discard_tokenizer(target.tokenizer_folder)
            for folder in (self.work.parent, self.plan.options.folder):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if it is empty
            raise
        entries = [self.journal.shards[k] for k in sorted(self.journal.shards)]
        built = self.work / "shards"
        if self.plan.options.format == "indexed":
            lengths = [part_paths(self.work, n)[1] for n in range(self.pieces_packed)]
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
        write_json(built / "meta.json", self._meta(report, shards, total.max_token))
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

    def _check_documents(self, total: DocumentStats, report: SplitReport) -> None:
        if self.plan.holdout and self.plan.holdout.takes_held_out:
            check_division(self.plan.options, total.documents, total.others, self.files)
        if not report.tokens and not report.bytes:
            first = self.files[0].path
            where = first if len(self.files) == 1 else f"{len(self.files):,} input files, the first being {first}"
            bad = f": {count_of(report.skipped, 'bad record')}, such as {total.bad[0]}" if total.bad else ""
            raise DataError(f"no text in {where}{bad}")

    def _total(self) -> DocumentStats:
        """What was in all pieces that the packer took."""
        total = DocumentStats()
        for number in range(self.pieces_packed):
            done = self.journal.pieces[number]
            total.add(DocumentStats(**{f.name: done[f.name] for f in fields(DocumentStats) if f.name in done}))
        return total

    def _meta(self, report: SplitReport, shards: list[dict[str, Any]], max_token: int) -> dict[str, Any]:
        tokenizer, options = self.tokenizer, self.plan.options
        return {
            "version": 1,
            "format": options.format,
            "tokens": report.tokens,
            "documents": report.documents,
            "bytes": report.bytes,
            "vocab_size": tokenizer.vocab_size if tokenizer else None,
            "max_token": max_token,
            "eos_id": tokenizer.eos_id if tokenizer else None,
            "shards": shards if tokenizer else [],
            "prepare": {
                "signature": self.signature,
                "tokenizer": tokenizer.fingerprint() if tokenizer else None,
                "concat_tokens": options.concat_tokens if options.format == "mds" else None,
                "report": {**asdict(report), "folder": ""},
            },
        }

    def _summary(self, total: DocumentStats) -> SplitReport:
        report = SplitReport(
            str(self.target.folder),
            documents=total.documents - total.empty,
            tokens=total.units if self.tokenizer else 0,
            bytes=total.bytes,
            skipped=total.skipped,
            empty=total.empty,
            histogram=total.histogram,
            longest=total.longest,
            bad_records=total.bad,
        )
        kept = sum(self.packer.shard_units)
        if self.plan.options.format == "mds" and self.tokenizer and kept != report.tokens:
            # samples were dropped: at the end, or by no_wrap
            share = kept / report.tokens if report.tokens else 0.0
            report.is_estimate = True
            report.bytes, report.documents = round(report.bytes * share), round(report.documents * share)
            report.tokens = kept
        return report
