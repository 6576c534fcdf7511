"""Saving next to the training loop: the loop waits only for a copy of the state, and a thread writes that copy.

At most one save is in flight. A failed write (full disk, missing folder, on any rank) is retried from the same copy,
then abandoned with a warning; earlier checkpoints are never touched.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from ingot.checkpoint.manifest import CHECKPOINTS, File, Manifest, write_manifest
from ingot.checkpoint.remote_copy import Uploader
from ingot.checkpoint.safetensors_file import blocks_of, write_blocks
from ingot.checkpoint.save_plan import SavePlan, Tensors, plan_save
from ingot.checkpoint.snapshot import FileCopy, Snapshot
from ingot.checkpoint.store import DRAFT, put_in_place
from ingot.errors import DiskError, IngotError, OwnerError, disk_error
from ingot.parallel.coordinator import Coordinator, LocalCoordinator
from ingot.parallel.rank_env import EPOCH

RETRY_PAUSES = (0.5, 3.0)  # seconds before each retry of a failed write
NICENESS = 10  # of the writing thread: where cores are scarce, the training step comes first
REST_RATIO = 3.0  # on a CPU the writing thread rests this many times as long as it works


class _Report(msgspec.Struct):
    """What a rank has written."""

    files: dict[str, File] = {}
    problem: str = ""


class _Answer(msgspec.Struct):
    """What rank 0 made of the reports."""

    folder: str = ""
    upload: bool = False
    problem: str = ""
    retry: bool = False
    disowned: bool = False


@dataclass(frozen=True)
class _Save:
    step: int
    plan: SavePlan
    snapshot: Snapshot
    state: dict[str, Any]
    final: bool
    problem: str


class AsyncWriter:
    """Saves the state of a run, together with the other ranks.

    `after_save(step, final)` is called on rank 0, in the thread, and returns whether to upload the new checkpoint.
    """

    def __init__(
        self,
        run: Path,
        coordinator: Coordinator | None = None,
        full: bool = False,
        after_save: Callable[[int, bool], bool] = lambda step, final: False,
        uploader: Uploader | None = None,
        holders: range | None = None,
        confirm_owner: Callable[[], None] = lambda: None,
    ):
        self.run, self.full, self.uploader, self._after_save = run, full, uploader, after_save
        self._holders = holders  # of the same tensors as this rank; None for all ranks
        self._confirm_owner = confirm_owner  # called before a commit; raises OwnerError
        self._epoch = os.environ.get(EPOCH, "0")  # two attempts of a run never write to the same draft
        self._coordinator = coordinator or LocalCoordinator()
        self._thread_coordinator = self._coordinator.for_topic("write")
        self.news: list[tuple[str, bool]] = []
        """Messages for the user, oldest first, and whether each is a warning; the loop takes them from here."""
        self.problem: str | None = None  # why the last save failed
        self.disowned = False  # whether it failed because another process has taken over the run
        self.saved_step: int | None = None  # of the newest checkpoint
        self.stall_seconds = self.write_seconds = 0.0
        """Of the last save: how long the loop waited, and how long the thread took."""
        self._thread: threading.Thread | None = None
        self._waited_for = threading.Event()
        self._next_due = threading.Event()
        self._planned: tuple[list[str], SavePlan, Snapshot] | None = None

    def prepare(self, tensors: Tensors) -> None:
        """Plan and allocate memory in the background; otherwise the first save does it."""
        self.wait()
        self._start(lambda: self._plan(tensors, self._thread_coordinator))

    def save(
        self, step: int, tensors: Tensors, state: dict[str, Any], final: bool = False, problem: str | None = None
    ) -> None:
        """Start to copy the state and to write the copy. Tensors may change after `before_update`.

        All ranks must call this. `state` is taken from rank 0; a `problem` on any rank makes the save fail.
        """
        began = time.perf_counter()
        self._next_due.set()
        self.wait()
        self._next_due.clear()
        self._make_draft(step, 0)
        plan, snapshot = self._plan(tensors, self._coordinator)
        snapshot.begin(tensors)
        save = _Save(step, plan, snapshot, state, final, problem or "")
        self._start(lambda: self._write(save))
        self.stall_seconds = time.perf_counter() - began

    def before_update(self) -> None:
        """Call this before the weights change: until then the copy may still be in progress."""
        if self._planned is not None:
            began = time.perf_counter()
            self._planned[2].hold()
            self.stall_seconds += time.perf_counter() - began

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is in flight."""
        if self._thread is not None:
            self._waited_for.set()
            self._thread.join(timeout)

    def _start(self, action: Callable[[], object]) -> None:
        def body() -> None:
            try:
                action()
            except Exception as error:  # a failed save must not end the run
                self._fail(f"saving failed: {type(error).__name__}: {error}")

        self._waited_for.clear()
        self._thread = threading.Thread(target=body, name="checkpoint", daemon=True)
        self._thread.start()

    def _plan(self, tensors: Tensors, coordinator: Coordinator) -> tuple[SavePlan, Snapshot]:
        names = [f"{kind}/{name}" for kind, content in tensors.items() for name in content]
        if self._planned is None or self._planned[0] != names:
            self._planned = None  # free the old copy before the new one is allocated
            plan = (
                plan_save(tensors, LocalCoordinator()) if self.full else plan_save(tensors, coordinator, self._holders)
            )
            self._planned = (names, plan, Snapshot(tensors, plan))
        return self._planned[1], self._planned[2]

    # --- in the thread

    def _write(self, save: _Save) -> None:
        began = time.perf_counter()
        save.snapshot.finish()
        with contextlib.suppress(OSError):  # on Linux this applies to the thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        for attempt in range(len(RETRY_PAUSES) + 1):
            draft = self._draft(save.step, attempt)
            if attempt:
                self._make_draft(save.step, attempt)
            report = _Report(problem=save.problem) if save.problem else self._write_own_files(draft, save)
            text = msgspec.json.encode(report).decode()
            commit = partial(self._commit, save, draft, attempt)
            answer = msgspec.json.decode(self._thread_coordinator.gather_and_decide(text, commit), type=_Answer)
            if not answer.retry:
                break
        self.write_seconds = time.perf_counter() - began
        if answer.problem:
            self.disowned = answer.disowned
            self._fail(answer.problem)
            return
        self.problem = None
        self.saved_step = save.step
        self.news.append((f"saved {answer.folder}", False))
        if answer.upload and self.uploader is not None:
            self.uploader.start(Path(answer.folder))

    def _draft(self, step: int, attempt: int) -> Path:
        return self.run / CHECKPOINTS / f"{DRAFT}{step}-{attempt}-{self._epoch}"

    def _make_draft(self, step: int, attempt: int) -> None:
        """Rank 0 makes the folder for all ranks, if it can."""
        if self._coordinator.is_first:
            with contextlib.suppress(OSError):  # writing will fail, and say why
                self._draft(step, attempt).mkdir(parents=True, exist_ok=True)

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self.news.append((problem, True))

    def _write_own_files(self, draft: Path, save: _Save) -> _Report:
        report = _Report()
        try:
            for name, file in save.snapshot.files.items():
                try:
                    report.files[name] = self._write_file(draft / name, file, save.snapshot)
                except FileNotFoundError:  # rank 0 has not made the folder yet, or has another disk
                    draft.mkdir(parents=True, exist_ok=True)
                    report.files[name] = self._write_file(draft / name, file, save.snapshot)
        except OSError as error:
            return _Report(problem=str(disk_error("save a checkpoint in", self.run, error)))
        return report

    def _write_file(self, path: Path, file: FileCopy, snapshot: Snapshot) -> File:
        blocks = self._throttled(chain([file.header], blocks_of(file.content)), snapshot)
        return write_blocks(path, blocks, file.weights_bytes)

    def _throttled(self, blocks: Iterable[memoryview], snapshot: Snapshot) -> Iterator[memoryview]:
        """Where training runs on the same cores, rest after each block unless the loop waits for the save."""
        for block in blocks:
            began = time.perf_counter()
            yield block  # the generator continues once the block is hashed and written
            if not snapshot.on_gpu:
                self._waited_for.wait(REST_RATIO * (time.perf_counter() - began))

    def _commit(self, save: _Save, draft: Path, attempt: int, texts: list[str]) -> list[str]:
        """On rank 0, when all ranks have written: turn the draft into a checkpoint, or remove it."""
        reports = [msgspec.json.decode(text, type=_Report) for text in texts]
        problem = next((report.problem for report in reports if report.problem), "")
        retry, disowned = True, False
        try:
            if not problem:
                answer = self._put_in_place(save, draft, reports)
        except IngotError as error:
            problem, retry, disowned = str(error), isinstance(error, DiskError), isinstance(error, OwnerError)
        except OSError as error:
            problem = str(disk_error("save a checkpoint in", self.run, error))
        if problem:
            shutil.rmtree(draft, ignore_errors=True)
            retry = retry and attempt < len(RETRY_PAUSES) and not self._next_due.wait(RETRY_PAUSES[attempt])
            answer = _Answer(problem=problem, retry=retry, disowned=disowned)
        return [msgspec.json.encode(answer).decode()] * len(texts)

    def _put_in_place(self, save: _Save, draft: Path, reports: list[_Report]) -> _Answer:
        files = {name: file for report in reports for name, file in report.files.items()}
        listed = set(os.listdir(draft))  # one operation, where a call for each file would be one for each rank
        for name in files:  # a client of a network file system may list what it knew some seconds ago
            if name not in listed and not (draft / name).is_file():
                raise OSError(f"{name}, written by another rank, is not there; all ranks need the same file system")
        write_manifest(Manifest(save.step, save.plan.parts, files, save.plan.entries, save.state, draft))
        folder = put_in_place(draft, save.step, self._confirm_owner)
        return _Answer(str(folder), upload=self._after_save(save.step, save.final))
