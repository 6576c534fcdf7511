"""When a run is saved, what is saved, and how it is loaded again."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.checkpoint.async_writer import AsyncWriter
from ingot.checkpoint.hf.folder import TensorReader
from ingot.checkpoint.load import Repadded, fill_parameters, open_weights, read_into
from ingot.checkpoint.location import find_checkpoints
from ingot.checkpoint.manifest import (
    CHECKPOINTS,
    MODEL,
    OPTIMIZER,
    Manifest,
    remove,
    steps_in,
)
from ingot.checkpoint.remote_copy import Uploader, fetch, newest_good
from ingot.checkpoint.safetensors_file import DTYPES
from ingot.checkpoint.save_plan import Tensors
from ingot.checkpoint.store import DRAFT, OLD_RNG, CheckpointTensors, to_remove
from ingot.config.durations import BatchClock
from ingot.config.run import RunConfig
from ingot.errors import CheckpointError, DiskError, OwnerError, disk_error
from ingot.parallel.executors.base import Executor
from ingot.storage.object_store import is_url
from ingot.training.host_copies import HostCopies
from ingot.training.listener import Row, RunListener
from ingot.training.optimizer import Optimizer
from ingot.training.runtime.run_files import FINISHED, METRICS

SAVED_STEP = "checkpoint/step"  # in a row of metrics.jsonl: the newest checkpoint at that time


class Checkpointer:
    """Saves and loads the checkpoints of a run. All ranks must call its methods together."""

    def __init__(
        self,
        config: RunConfig,
        clock: BatchClock,
        executor: Executor,
        optimizer: Optimizer,
        listener: RunListener,
        confirm_owner: Callable[[], None] = lambda: None,
    ):
        self.config, self.clock, self.executor, self.optimizer = config, clock, executor, optimizer
        self.listener, self.coordinator = listener, executor.coordinator
        self.shapes = executor.parameter_shapes
        self.folder = Path(config.run_folder)
        self.full = config.state_dict_type == "full"
        url = config.remote_folder
        self.uploader = None
        if url is not None:
            self.uploader = Uploader(url, self.folder, self.coordinator, self._outdated, confirm_owner)
        stage = self.coordinator.world_size // executor.layout.pipeline  # ranks that hold the same tensors
        holders = range(self.coordinator.rank // stage * stage, (self.coordinator.rank // stage + 1) * stage)
        self.writer = AsyncWriter(
            self.folder, self.coordinator, self.full, self._after_save, self.uploader, holders, confirm_owner
        )
        self.copies = HostCopies(config, clock, executor, listener)
        self._saved_at = time.monotonic()
        self._uploaded_step, self._uploaded_at = 0, time.monotonic()
        self._prepared = False

    # --- saving

    def is_due(self, batch: int) -> bool:
        """Whether to save after a batch, the same on all ranks."""
        interval = self.config.save_interval
        if interval.is_wall_clock:  # the ranks' clocks differ
            return self.executor.from_rank_0(time.monotonic() - self._saved_at >= interval.seconds)
        every = self.clock.interval(interval)
        return bool(every) and batch % every == 0

    def metrics(self, saved_since_last_row: bool) -> Row:
        """The cost of the last save, and the newest checkpoint."""
        row: Row = {}
        if saved_since_last_row:
            row["checkpoint/stall_seconds"] = self.writer.stall_seconds
            row["checkpoint/write_seconds"] = self.writer.write_seconds
        if self.writer.saved_step is not None:
            row[SAVED_STEP] = self.writer.saved_step
        return row

    def before_update(self) -> None:
        """To be called before each update of the weights: a copy of them may still be in progress."""
        self.writer.before_update()
        self.copies.before_update()

    def copy(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Copy the state to the launcher's memory, in the background."""
        self.copies.begin(step, self._own_tensors(), state)

    def after_step(self) -> None:
        """Forward messages of the background threads. After the first step, prepare the first save."""
        if not self._prepared and not self.full:  # otherwise it would gather all tensors
            self.writer.prepare(self._tensors())
        self._prepared = True
        self.copies.after_step(self._own_tensors)
        self._forward_news()

    def _forward_news(self) -> None:
        if self.writer.disowned:
            raise OwnerError(self.writer.problem)
        for news in (self.writer.news, self.uploader.news if self.uploader is not None else []):
            while news:
                text, is_warning = news.pop(0)
                if is_warning:
                    self.listener.warn(f"{text}; the run continues and tries again at the next save_interval")
                else:
                    self.listener.note(text)

    def save(self, step: int, state: Callable[[], dict[str, Any]], final: bool) -> None:
        """Save in the background; a failure is a warning. The final save is waited for; its failure is an error."""
        values, problem = {}, None
        try:
            values = state() if self.coordinator.is_first else {}
        except OSError as error:
            problem = str(disk_error("save a checkpoint in", self.folder, error))
        self.writer.save(step, self._tensors(), values, final, problem)
        self._saved_at = time.monotonic()
        if final:
            self._wait()
            if self.writer.problem is not None and not self.writer.disowned:
                self.writer.news.clear()
                raise DiskError(self.writer.problem)
            self._forward_news()
            self._remove_outdated()
            if self.uploader is not None and self.uploader.problem and self.config.remote_save_folder is None:
                raise DiskError(f"{self.uploader.problem}; the last checkpoint is in {self.folder} only")
        self._forward_news()

    def close(self) -> None:
        """Let a save in flight finish, unless it may wait forever for ranks that have failed."""
        self._wait(self.coordinator.last_save_seconds)

    def _wait(self, timeout: float | None = None) -> None:
        self.copies.wait(timeout)
        self.writer.wait(timeout)
        if self.uploader is not None:
            self.uploader.wait(timeout)

    def _own_tensors(self) -> Tensors:
        """All that this rank needs to continue."""
        model = {p.name: p.tensor for p in self.executor.parameters}
        return {MODEL: model, OPTIMIZER: self.optimizer.state_tensors()}

    def _tensors(self) -> Tensors:
        """Everything that a checkpoint holds, as far as this rank has it; with state_dict_type=full, rank 0 has all."""
        model = {p.name: p.tensor for p in self.executor.parameters if not p.is_tied_copy}
        tensors, shapes = {MODEL: model}, {MODEL: self.shapes}
        if not self.config.save_weights_only:
            copies = [p.tensor for p in self.executor.parameters if p.is_tied_copy]
            tensors[OPTIMIZER] = self.optimizer.state_tensors(without=copies)
            shapes[OPTIMIZER] = self.optimizer.state_shapes(self.shapes)
        if not self.full:
            return tensors
        return {kind: dict(self.executor.full_tensors(tensors[kind], shapes[kind])) for kind in tensors}

    def _after_save(self, step: int, final: bool) -> bool:
        """In the writing thread: delete outdated checkpoints. Returns whether to upload the new one."""
        uploading = self._remove_outdated()
        if self.uploader is None or not (final or (uploading is None and self._upload_due(step))):
            return False
        self._uploaded_step, self._uploaded_at = step, time.monotonic()
        return True

    def _remove_outdated(self) -> int | None:
        """Delete outdated local checkpoints, except the one that is being uploaded, whose step is returned."""
        uploading = self.uploader.step if self.uploader is not None else None
        steps = steps_in(self.folder / CHECKPOINTS) if self.coordinator.is_first else []
        # if checkpoints are kept at a URL, a restart on this machine needs the newest one only
        elsewhere = self.uploader is not None and self.config.remote_save_folder is None
        for old in steps[:-1] if elsewhere else self._outdated(steps):
            if old != uploading:
                remove(self.folder / CHECKPOINTS / str(old))
        return uploading

    def _outdated(self, steps: list[int]) -> list[int]:
        return to_remove(
            steps, self.config.save_num_checkpoints_to_keep, self.clock.interval(self.config.save_keep_every)
        )

    def _upload_due(self, step: int) -> bool:
        interval = self.config.remote_save_interval
        if interval.is_wall_clock:
            return time.monotonic() - self._uploaded_at >= interval.seconds
        every = self.clock.interval(interval)
        return not every or step // every > self._uploaded_step // every

    # --- loading

    def find(self, with_copies: bool = True) -> Manifest | None:
        """The newest intact checkpoint of the run, or a newer copy in memory, the same on all ranks."""
        self._wait()
        self._forward_news()
        if with_copies:
            steps = steps_in(self.folder / CHECKPOINTS) if self.coordinator.is_first else []
            if (copied := self.copies.find(max(steps, default=0))) is not None:
                self._uploaded_step = max(steps, default=0)
                self.writer.saved_step = max(steps, default=None)
                self._saved_at = time.monotonic()
                return copied
        else:
            self.copies.discard()
        remote = self.uploader.remote if self.uploader is not None else None
        manifest, problems = newest_good(self.folder, self.coordinator, remote)
        for problem in problems:
            self.listener.warn(f"{problem}; trying the one before it")
        if remote is not None and self.coordinator.is_first and not (self.folder / METRICS).exists():
            (self.folder / METRICS).write_bytes(remote.read(METRICS) or b"")  # the run has moved to this machine
        if manifest is None and self._has_saved_before():
            raise CheckpointError(
                f"{self.folder} holds a run that has saved checkpoints, and none of them is there; restore "
                f"{self.folder / CHECKPOINTS}, or choose another save_folder"
            )
        self._uploaded_step = manifest.step if manifest is not None else 0
        self.writer.saved_step = manifest.step if manifest is not None else None
        self._saved_at = time.monotonic()
        return manifest

    def _has_saved_before(self) -> bool:
        """Whether a save has succeeded, according to the run folder. A run that crashed before that starts over."""
        metrics = self.folder / METRICS
        return (self.folder / FINISHED).exists() or (
            metrics.is_file() and f'"{SAVED_STEP}"'.encode() in metrics.read_bytes()
        )

    def load_weights(self, path: str) -> None:
        """Start from the weights of another run, checkpoint or Hugging Face folder, which may be at a URL."""
        draft = self.folder / CHECKPOINTS / f"{DRAFT}load"
        if is_url(path):
            found = find_checkpoints(path)
            if not found:
                raise CheckpointError(f"{path} holds no checkpoint")
            tensors: TensorReader = CheckpointTensors(fetch(found[-1], draft, self.coordinator, [MODEL]))
        else:
            stored, tensors = open_weights(Path(path), self.coordinator)
            model = self.config.model
            if stored.vocab_size == model.vocab_size and stored.vocab_rows != model.vocab_rows:
                tensors = Repadded(tensors, model.vocab_size, model.vocab_rows)
        self._fill(tensors, path)
        self.coordinator.run_on_all_ranks(lambda: None)  # all have read
        if self.coordinator.is_first:
            shutil.rmtree(draft, ignore_errors=True)
        self.listener.note(f"weights from {path}")

    def start_over(self) -> None:
        """Delete the checkpoints of an earlier run at the URL; the local ones are gone already."""
        if self.uploader is not None and self.coordinator.is_first:
            self.uploader.remove([found.step for found in find_checkpoints(self.uploader.remote)])

    def load(self, manifest: Manifest) -> None:
        """Load weights and, where there is one, the optimizer's state."""
        if self.copies.holds(manifest):
            targets = [(p.name, p.tensor) for p in self.executor.parameters]
            self.copies.load([*targets, *self.optimizer.state_slots(self.copies.training_state())])
            return
        source = str(manifest.folder)
        self._fill(CheckpointTensors(manifest), source)
        for part in self.optimizer.parts.values():
            if not manifest.has_training_state:
                part.state.clear()
        stored = CheckpointTensors(manifest, OPTIMIZER)
        entries = {name: entry for name, entry in stored.entries.items() if not name.startswith(OLD_RNG)}
        for name in entries:
            parameter = name.partition("/")[2]
            if parameter not in self.shapes:
                raise CheckpointError(f"{source} has optimizer state for {parameter}, which the model lacks")
        described = ((name, DTYPES[entry.dtype], entry.shape) for name, entry in entries.items())
        for name, slot in self.optimizer.state_slots(described):
            read_into(slot, name, stored, source)

    def _fill(self, tensors: TensorReader, source: str) -> None:
        fill_parameters({p.tensor: p.name for p in self.executor.parameters}, self.shapes, tensors, source)
