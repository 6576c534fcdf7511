"""Saving behind the training loop: it waits for a copy of the state into host memory, and a thread writes the copy.

At most one save is in flight. A failed one (full disk, vanished folder, on any process) is tried again from the same
copy, then given up with a warning; the checkpoints before it are not touched.
"""

import contextlib
import json
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingot.checkpoint.manifest import File, Manifest, file_name, write_manifest
from ingot.checkpoint.plan import Plan, Tensors, plan_save
from ingot.checkpoint.ranks import Ranks
from ingot.checkpoint.remote import Uploader
from ingot.checkpoint.shard import write_shard
from ingot.checkpoint.store import CHECKPOINTS, DRAFT, put_in_place
from ingot.errors import disk_error
from ingot.parallel.weights import local
from ingot.parallel.world import World

PAUSES = (0.5, 3.0)  # seconds before a failed write is tried again
NICENESS = 10  # of the writing thread: where cores are short, the training step comes first


class Saver:
    """Saves the state of a run, together with the other processes of it."""

    def __init__(self, run: Path, world: World | None = None, full: bool = False):
        self.run, self.full = run, full
        self.ranks, self._behind = Ranks(world, "save"), Ranks(world, "write")
        self.after: Callable[[int, bool], bool] = lambda step, final: False
        """Called on the first process, in the thread, when a step has been saved; says whether to upload it."""
        self.uploader: Uploader | None = None
        self.news: list[tuple[str, bool]] = []
        """What to tell the user, oldest first, and whether it is a warning; the loop takes it from here."""
        self.problem: str | None = None
        """Why the last save failed."""
        self.stall_seconds = self.write_seconds = 0.0
        """Of the last save: what the loop waited, and how long the thread took."""
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._planned: tuple[list[str], Plan, Snapshot] | None = None

    def prepare(self, tensors: Tensors) -> None:
        """Plan, and allocate the memory of the copy, behind the loop; else the first save does it."""
        self.wait()
        self._start(lambda: self._plan(tensors, self._behind))

    def save(
        self, step: int, tensors: Tensors, state: dict[str, Any], final: bool = False, problem: str | None = None
    ) -> None:
        """Copy the state and begin to write it. Tensors may change as soon as this returns, those of a GPU after
        `before_update`. All processes must call this; `state` is the first one's, `problem` why this one cannot."""
        began = time.perf_counter()
        self._hurry.set()
        self.wait()
        self._hurry.clear()
        plan, snapshot = self._plan(tensors, self.ranks)
        snapshot.take(tensors)
        self._start(lambda: self._write(step, plan, snapshot, state, final, problem))
        self.stall_seconds = time.perf_counter() - began

    def before_update(self) -> None:
        """To be called before the weights change: on a GPU, the copy goes on beside the next forward pass."""
        if self._planned is not None:
            self._planned[2].hold()

    def wait(self, timeout: float | None = None) -> None:
        """Until nothing is in flight."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _start(self, action: Callable[[], object]) -> None:
        def body() -> None:
            with contextlib.suppress(OSError):  # Linux gives each thread its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            try:
                action()
            except Exception as error:  # nothing that happens here may end the run
                self._fail(f"saving failed: {type(error).__name__}: {error}")

        self._thread = threading.Thread(target=body, name="checkpoint", daemon=True)
        self._thread.start()

    def _plan(self, tensors: Tensors, ranks: Ranks) -> tuple[Plan, "Snapshot"]:
        names = [f"{section}/{name}" for section, content in tensors.items() for name in content]
        if self._planned is None or self._planned[0] != names:
            self._planned = None  # let go of the old copy before the new one is made
            plan = plan_save(tensors, ranks, self.full)
            self._planned = (names, plan, Snapshot(tensors, plan))
        return self._planned[1], self._planned[2]

    # --- in the thread

    def _write(
        self, step: int, plan: Plan, snapshot: "Snapshot", state: dict[str, Any], final: bool, problem: str | None
    ) -> None:
        began = time.perf_counter()
        snapshot.finish()
        for attempt in range(len(PAUSES) + 1):
            draft = self.run / CHECKPOINTS / f"{DRAFT}{step}-{attempt}"
            report = {"problem": problem} if problem else self._write_own(draft, plan, snapshot)
            commit = partial(self._commit, step, plan, state, final, draft, attempt)
            answer = json.loads(self._behind.ask(json.dumps(report), commit))
            if not answer.get("again"):
                break
        self.write_seconds = time.perf_counter() - began
        if "problem" in answer:
            self._fail(answer["problem"])
            return
        self.problem = None
        self.news.append((f"saved {answer['saved']}", False))
        if answer["upload"] and self.uploader is not None:
            self.uploader.start(Path(answer["saved"]))

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self.news.append((problem, True))

    def _write_own(self, draft: Path, plan: Plan, snapshot: "Snapshot") -> dict[str, Any]:
        """Write this process's files; gives their sizes and hashes, or what went wrong."""
        files: dict[str, tuple[int, str]] = {}
        try:
            if snapshot.tensors or self.ranks.first:
                draft.mkdir(parents=True, exist_ok=True)
            for section, tensors in snapshot.tensors.items():
                name = file_name(section, self.ranks.rank, plan.parts)
                file = write_shard(draft / name, tensors)
                files[name] = (file.bytes, file.xxh3)
        except OSError as error:
            return {"problem": str(disk_error("save a checkpoint in", self.run, error))}
        return {"files": files}

    def _commit(
        self, step: int, plan: Plan, state: dict[str, Any], final: bool, draft: Path, attempt: int, said: list[str]
    ) -> str:
        """On the first process, when all have written: make it a checkpoint, or clear it away."""
        reports = [json.loads(text) for text in said]
        problem = next((report["problem"] for report in reports if "problem" in report), None)
        try:
            files = {name: File(*file) for report in reports for name, file in report.get("files", {}).items()}
            if problem is None:
                for name in files:
                    if not (draft / name).is_file():
                        raise OSError(f"{name}, written by another process, is not there; all need one file system")
                manifest = Manifest(draft, step, plan.parts, files, plan.entries, state)
                write_manifest(draft, manifest)
                target = put_in_place(draft, step)
                return json.dumps({"saved": str(target), "upload": self.after(step, final)})
        except OSError as error:
            problem = str(disk_error("save a checkpoint in", self.run, error))
        shutil.rmtree(draft, ignore_errors=True)
        again = attempt < len(PAUSES) and not self._hurry.wait(PAUSES[attempt])
        return json.dumps({"problem": problem, "again": again})


class Snapshot:
    """A copy of what this process writes, in one piece of host memory that every save uses again.

    The memory is touched before it is needed (and locked for a GPU's copy engine), so that a save costs the training
    loop a copy and nothing else.
    """

    def __init__(self, tensors: Tensors, plan: Plan):
        self.keys = plan.own
        sources = self._sources(tensors)
        ends = [0]
        for source in sources:
            ends.append(ends[-1] + -(-source.nbytes // 64) * 64)
        memory = mmap.mmap(-1, max(ends[-1], 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).zero_()
        self.stream: Any = None
        self.copied: Any = None
        if any(source.is_cuda for source in sources):
            torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
            self.stream = torch.cuda.Stream()
        self.tensors: Tensors = {}
        for (section, name), source, begin in zip(self.keys, sources, ends, strict=False):
            piece = buffer[begin : begin + source.nbytes].view(source.dtype).view(source.shape)
            self.tensors.setdefault(section, {})[name] = piece

    def _sources(self, tensors: Tensors) -> list[torch.Tensor]:
        return [local(tensors[section][name].detach()) for section, name in self.keys]

    def take(self, tensors: Tensors) -> None:
        """Copy. What is on a GPU is copied by a stream of its own, beside what comes next."""
        sources = self._sources(tensors)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for (section, name), source in zip(self.keys, sources, strict=True):
                self.tensors[section][name].copy_(source, non_blocking=True)
        if self.stream is not None:
            self.copied = self.stream.record_event()

    def hold(self) -> None:
        """Let the GPU's next change of the state wait for the copy."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None

    def finish(self) -> None:
        """Wait for the copy."""
        if self.stream is not None:
            self.stream.synchronize()
