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
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ingot.checkpoint.coordinator import Coordinator
from ingot.checkpoint.manifest import CHECKPOINTS, File, Manifest, file_name, write_manifest
from ingot.checkpoint.remote_copy import Uploader
from ingot.checkpoint.safetensors_file import blocks_of, bytes_of, header_of, in_order, write_blocks
from ingot.checkpoint.save_plan import SavePlan, Tensors, plan_save
from ingot.checkpoint.store import DRAFT, put_in_place
from ingot.errors import CheckpointError, disk_error
from ingot.parallel.dtensor import local
from ingot.parallel.rendezvous import World

PAUSES = (0.5, 3.0)  # seconds before a failed write is tried again
NICENESS = 10  # of the writing thread: where cores are short, the training step comes first
REST = 3.0  # times as long as it works


class AsyncWriter:
    """Saves the state of a run, together with the other processes of it."""

    def __init__(self, run: Path, world: World | None = None, full: bool = False):
        self.run, self.full = run, full
        self.ranks, self._behind = Coordinator(world, "save"), Coordinator(world, "write")
        self.after: Callable[[int, bool], bool] = lambda step, final: False
        """Called on the first process, in the thread, when a step has been saved; says whether to upload it."""
        self.uploader: Uploader | None = None
        self.news: list[tuple[str, bool]] = []
        """What to tell the user, oldest first, and whether it is a warning; the loop takes it from here."""
        self.problem: str | None = None  # why the last save failed
        self.saved_step: int | None = None  # of the newest checkpoint
        self.stall_seconds = self.write_seconds = 0.0
        """Of the last save: what the loop waited, and how long the thread took."""
        self._thread: threading.Thread | None = None
        self._waited_for = threading.Event()
        self._next_due = threading.Event()
        self._planned: tuple[list[str], SavePlan, Snapshot] | None = None

    def prepare(self, tensors: Tensors) -> None:
        """Plan, and allocate the memory of the copy, behind the loop; else the first save does it."""
        self.wait()
        self._start(lambda: self._plan(tensors, self._behind))

    def save(
        self, step: int, tensors: Tensors, state: dict[str, Any], final: bool = False, problem: str | None = None
    ) -> None:
        """Begin to copy the state and to write the copy. Tensors may change after `before_update`. All processes must
        call this; `state` is the first one's, `problem` why this one cannot."""
        began = time.perf_counter()
        self._next_due.set()
        self.wait()
        self._next_due.clear()
        plan, snapshot = self._plan(tensors, self.ranks)
        snapshot.begin(tensors)
        self._start(lambda: self._write(step, plan, snapshot, state, final, problem))
        self.stall_seconds = time.perf_counter() - began

    def before_update(self) -> None:
        """To be called before the weights change: until then their copy may go on."""
        if self._planned is not None:
            began = time.perf_counter()
            self._planned[2].hold()
            self.stall_seconds += time.perf_counter() - began

    def wait(self, timeout: float | None = None) -> None:
        """Until nothing is in flight."""
        if self._thread is not None:
            self._waited_for.set()
            self._thread.join(timeout)

    def _start(self, action: Callable[[], object]) -> None:
        def body() -> None:
            try:
                action()
            except Exception as error:  # nothing that happens here may end the run
                self._fail(f"saving failed: {type(error).__name__}: {error}")

        self._waited_for.clear()
        self._thread = threading.Thread(target=body, name="checkpoint", daemon=True)
        self._thread.start()

    def _plan(self, tensors: Tensors, ranks: Coordinator) -> tuple[SavePlan, "Snapshot"]:
        names = [f"{section}/{name}" for section, content in tensors.items() for name in content]
        if self._planned is None or self._planned[0] != names:
            self._planned = None  # let go of the old copy before the new one is made
            plan = plan_save(tensors, ranks, self.full)
            self._planned = (names, plan, Snapshot(tensors, plan))
        return self._planned[1], self._planned[2]

    # --- in the thread

    def _write(
        self, step: int, plan: SavePlan, snapshot: "Snapshot", state: dict[str, Any], final: bool, problem: str | None
    ) -> None:
        began = time.perf_counter()
        snapshot.finish()
        with contextlib.suppress(OSError):  # Linux gives each thread its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
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
        self.saved_step = step
        self.news.append((f"saved {answer['saved']}", False))
        if answer["upload"] and self.uploader is not None:
            self.uploader.start(Path(answer["saved"]))

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self.news.append((problem, True))

    def _write_own(self, draft: Path, plan: SavePlan, snapshot: "Snapshot") -> dict[str, Any]:
        """Write this process's files; gives their sizes and hashes, or what went wrong."""
        files: dict[str, tuple[int, str]] = {}
        try:
            if snapshot.files or self.ranks.first:
                draft.mkdir(parents=True, exist_ok=True)
            for section, (header, content) in snapshot.files.items():
                name = file_name(section, self.ranks.rank, plan.parts)
                file = write_blocks(draft / name, self._gently(chain([header], blocks_of(content)), snapshot))
                files[name] = (file.bytes, file.xxh3)
        except OSError as error:
            return {"problem": str(disk_error("save a checkpoint in", self.run, error))}
        return {"files": files}

    def _gently(self, blocks: Iterable[memoryview], snapshot: "Snapshot") -> Iterator[memoryview]:
        """Where training has only the same processors, rest between blocks, unless somebody waits."""
        for block in blocks:
            began = time.perf_counter()
            yield block  # which comes back when it has been hashed and written
            if not snapshot.on_gpu:
                self._waited_for.wait(REST * (time.perf_counter() - began))

    def _commit(
        self, step: int, plan: SavePlan, state: dict[str, Any], final: bool, draft: Path, attempt: int, said: list[str]
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
                write_manifest(Manifest(step, plan.parts, files, plan.entries, state, draft))
                target = put_in_place(draft, step)
                return json.dumps({"saved": str(target), "upload": self.after(step, final)})
        except CheckpointError as error:
            shutil.rmtree(draft, ignore_errors=True)
            return json.dumps({"problem": str(error)})
        except OSError as error:
            problem = str(disk_error("save a checkpoint in", self.run, error))
        shutil.rmtree(draft, ignore_errors=True)
        again = attempt < len(PAUSES) and not self._next_due.wait(PAUSES[attempt])
        return json.dumps({"problem": problem, "again": again})


class Snapshot:
    """A copy of what this process writes, laid out as its files are, in host memory that every save uses again.

    The memory is touched before it is needed, and locked for a GPU's copy engine. The copy is made beside the next
    forward and backward pass: by a GPU's stream, or by the writing thread; only a change of the weights waits for it.
    """

    def __init__(self, tensors: Tensors, plan: SavePlan):
        self.files: dict[str, tuple[memoryview, memoryview]] = {}  # header and content by kind of file
        self._pieces: list[tuple[str, str, Tensor]] = []
        chosen: Tensors = {}
        for section, name in plan.own:
            chosen.setdefault(section, {})[name] = local(tensors[section][name].detach())
        cuda = any(tensor.is_cuda for content in chosen.values() for tensor in content.values())
        for section, content in chosen.items():
            content = in_order(content)
            header, total = header_of(content), sum(tensor.nbytes for tensor in content.values())
            memory = mmap.mmap(-1, len(header) + max(total, 1))
            with contextlib.suppress(OSError, AttributeError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            memory[: len(header)] = header
            buffer = torch.frombuffer(memory, dtype=torch.uint8)[len(header) :].zero_()
            if cuda:
                _lock_for_gpu(self, memory)
            view, begin = memoryview(memory), 0
            self.files[section] = (view[: len(header)], view[len(header) : len(header) + total])
            for name, tensor in content.items():
                piece = buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                self._pieces.append((section, name, piece))
                begin += tensor.nbytes
        self.on_gpu = cuda
        self._stream: Any = torch.cuda.Stream() if cuda else None
        self._todo: list[tuple[Tensor, Tensor]] = []
        self._done = threading.Event()
        self._done.set()

    def begin(self, tensors: Tensors) -> None:
        """Begin to copy."""
        self._done.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        for section, name, piece in self._pieces:
            source = local(tensors[section][name].detach())
            if source.is_cuda:
                with torch.cuda.stream(self._stream):
                    piece.copy_(source, non_blocking=True)
            else:
                self._todo.append((piece, source))

    def finish(self) -> None:
        """In the writing thread: copy the rest, until all is here."""
        try:
            for piece, source in self._todo:
                if source.is_contiguous():  # numpy copies in this thread alone, and lets the others run
                    np.copyto(np.asarray(bytes_of(piece)), np.asarray(bytes_of(source)))
                else:
                    piece.copy_(source)
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._todo.clear()
            self._done.set()

    def hold(self) -> None:
        """Let the next change of the state wait for the copy: a GPU's queue, or the caller."""
        if self._done.is_set():
            return
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if self._todo:
            self._done.wait()


def _lock_for_gpu(owner: Snapshot, memory: mmap.mmap) -> None:
    """Lock memory for a GPU's copy engine while its owner lives.

    It must be unlocked before it is given back: the next mapping may get the same address, and copies into memory that
    the driver holds for another are refused.
    """
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    driver: Any = torch.cuda.cudart()
    torch.cuda.check_error(driver.cudaHostRegister(address, len(memory), 0))
    weakref.finalize(owner, driver.cudaHostUnregister, address).atexit = False
