"""What of a run is saved, when, and how it comes back."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ingot.checkpoint.async_writer import AsyncWriter
from ingot.checkpoint.coordinator import Coordinator
from ingot.checkpoint.hf.folder import TensorReader
from ingot.checkpoint.load import Repadded, fill_parameters, open_weights, read_into
from ingot.checkpoint.location import find_checkpoints
from ingot.checkpoint.manifest import (
    CHECKPOINTS,
    MAX_MANIFEST_BYTES,
    MODEL,
    OPTIMIZER,
    Manifest,
    remove,
    steps_in,
    too_large,
)
from ingot.checkpoint.remote_copy import Uploader, fetch, newest_good
from ingot.checkpoint.safetensors_file import DTYPES
from ingot.checkpoint.save_plan import Tensors
from ingot.checkpoint.store import DRAFT, RNG, CheckpointTensors, to_remove
from ingot.config.durations import BatchClock
from ingot.config.run import RunConfig
from ingot.errors import CheckpointError, DiskError, disk_error
from ingot.parallel.dtensor import local
from ingot.parallel.executors.base import Executor
from ingot.storage.object_store import is_url
from ingot.training.listener import Row, RunListener
from ingot.training.optimizer import Optimizer
from ingot.training.runtime.run_files import FINISHED, METRICS

SAVED_STEP = "checkpoint/step"  # in a row of metrics.jsonl: the newest checkpoint by then
ESTIMATE_MARGIN = 1.25  # of the manifest's size: the write checks the true one
PATIENCE = 30.0  # seconds for a save in flight when a run fails


class Checkpointer:
    """The checkpoints of a run that is going on."""

    def __init__(
        self,
        config: RunConfig,
        clock: BatchClock,
        executor: Executor,
        optimizer: Optimizer,
        reporter: RunListener,
    ):
        self.config, self.executor, self.shapes, self.optimizer = config, executor, executor.parameter_shapes, optimizer
        self.names = {p.tensor: p.name for p in executor.parameters}
        self.reporter = reporter
        world = getattr(executor, "world", None)
        self.folder = Path(config.run_folder)
        self.ranks = Coordinator(world, "resume")
        self.full = config.state_dict_type == "full"
        self.saver = AsyncWriter(self.folder, world, self.full)
        self.saver.after = self._saved
        self.uploader: Uploader | None = None
        if config.remote_folder is not None:
            self.uploader = self.saver.uploader = Uploader(config.remote_folder, self.folder, world, self._outdated)
        self.uploaded, self.uploaded_at, self.clock = 0, time.monotonic(), clock
        self.prepared, self.saved_at = False, time.monotonic()
        optimizer.before_step = self.saver.before_update

    # --- saving

    def is_due(self, batch: int) -> bool:
        """Whether to save after a batch, the same on all ranks."""
        interval = self.config.save_interval
        if interval.is_wall_clock:  # clocks differ; saving is done together
            return self.executor.from_rank_0(time.monotonic() - self.saved_at >= interval.seconds)
        every = self.clock.interval(interval)
        return bool(every) and batch % every == 0

    def metrics(self, saved_since_last_row: bool) -> Row:
        """Of the last save, and where the newest checkpoint is."""
        row: Row = {}
        if saved_since_last_row:
            row["checkpoint/stall_seconds"] = self.saver.stall_seconds
            row["checkpoint/write_seconds"] = self.saver.write_seconds
        if self.saver.saved_step is not None:
            row[SAVED_STEP] = self.saver.saved_step
        return row

    def after_step(self) -> None:
        """Pass on what the writing thread has to say; after the first step, let it get ready."""
        if not self.prepared and not (self.full and self.executor.layout.size > 1):
            self.saver.prepare(self._tensors())
        self.prepared = True
        self._pass_on()

    def _pass_on(self) -> None:
        for news in (self.saver.news, self.uploader.news if self.uploader is not None else []):
            while news:
                text, warning = news.pop(0)
                if warning:
                    self.reporter.warn(f"{text}; the run goes on, and tries again at the next save_interval")
                else:
                    self.reporter.note(text)

    def save(self, step: int, state: Callable[[], dict[str, Any]], final: bool) -> None:
        """Save, behind the loop unless it is the last time; only then is a failure an error."""
        values, problem = {}, None
        try:
            values = state() if self.ranks.first else {}
        except OSError as error:
            problem = str(disk_error("save a checkpoint in", self.folder, error))
        self.saver.save(step, self._tensors(), values, final, problem)
        self.saved_at = time.monotonic()
        if final:
            self._wait()
            if self.saver.problem is not None:
                self.saver.news.clear()
                raise DiskError(self.saver.problem)
            self._remove_outdated()
            if self.uploader is not None and self.uploader.problem and self.config.remote_save_folder is None:
                raise DiskError(f"{self.uploader.problem}; the last checkpoint is in {self.folder} only")
        self._pass_on()

    def close(self) -> None:
        """Give a save in flight a chance to be finished; with others, who may have failed, not for ever."""
        self._wait(None if self.ranks.count == 1 else PATIENCE)

    def _wait(self, timeout: float | None = None) -> None:
        self.saver.wait(timeout)
        if self.uploader is not None:
            self.uploader.wait(timeout)

    def _tensors(self) -> Tensors:
        """Everything that a checkpoint holds, as far as this process has it."""
        model = {p.name: p.tensor for p in self.executor.parameters if not p.is_tied_copy}
        if self.config.save_weights_only:
            return {MODEL: self._whole(model, self.shapes)}
        state = self._whole(self.optimizer.state_tensors(), self.optimizer.state_shapes(self.shapes))
        return {MODEL: self._whole(model, self.shapes), OPTIMIZER: state}

    def _whole(self, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """With state_dict_type=full, what the first process writes: tensors put together from those of all."""
        return dict(self.executor.full_tensors(tensors, shapes)) if self.full else tensors

    def _saved(self, step: int, final: bool) -> bool:
        """In the writing thread, after a save: remove what is no longer wanted; says whether to upload this one."""
        busy = self._remove_outdated()
        if self.uploader is None or not (final or (busy is None and self._upload_due(step))):
            return False
        self.uploaded, self.uploaded_at = step, time.monotonic()
        return True

    def _remove_outdated(self) -> int | None:
        """Here; gives the step of the checkpoint that is being uploaded, which stays."""
        busy = self.uploader.step if self.uploader is not None else None
        steps = steps_in(self.folder / CHECKPOINTS) if self.ranks.first else []
        # where checkpoints live at a URL, the newest here is all that a restart on this machine needs
        elsewhere = self.uploader is not None and self.config.remote_save_folder is None
        for old in steps[:-1] if elsewhere else self._outdated(steps):
            if old != busy:
                remove(self.folder / CHECKPOINTS / str(old))
        return busy

    def _outdated(self, steps: list[int]) -> list[int]:
        return to_remove(
            steps, self.config.save_num_checkpoints_to_keep, self.clock.interval(self.config.save_keep_every)
        )

    def _upload_due(self, step: int) -> bool:
        interval = self.config.remote_save_interval
        if interval.is_wall_clock:
            return time.monotonic() - self.uploaded_at >= interval.seconds
        every = self.clock.interval(interval)
        return not every or step // every > self.uploaded // every

    def check_manifest_size(self) -> None:
        """Fail before step 1 if the manifest would be too large to be read; an estimate from this process's parts."""
        total = 0
        for parameter, name in {} if self.full else self.names.items():
            shape, part = tuple(parameter.shape), local(parameter)
            pieces = -(-parameter.numel() // max(part.numel(), 1))  # each of which some process writes
            slots = [s for s in self.optimizer.state_shapes({name: shape}).values() if s]
            kept = 1 if self.config.save_weights_only else 1 + len(slots)
            total += kept * pieces * len(f"[{self.ranks.count},{list(shape)},{list(part.shape)}],".replace(" ", ""))
        total *= self.executor.layout.pipeline
        if total > ESTIMATE_MARGIN * MAX_MANIFEST_BYTES:
            raise too_large(total)

    # --- coming back

    def find(self) -> Manifest | None:
        """The newest good checkpoint of the run, the same on all processes."""
        self._wait()
        self._pass_on()
        manifest, problems = newest_good(self.folder, self.ranks, self.uploader.remote if self.uploader else None)
        for problem in problems:
            self.reporter.warn(f"{problem}; trying the one before it")
        if self.uploader is not None and self.ranks.first and not (self.folder / METRICS).exists():
            (self.folder / METRICS).write_bytes(self.uploader.remote.read(METRICS) or b"")  # the run has moved here
        if manifest is None and self._has_saved_before():
            raise CheckpointError(
                f"{self.folder} holds a run that has saved checkpoints, and none of them is there; restore "
                f"{self.folder / CHECKPOINTS}, choose another save_folder, or start over with --fresh"
            )
        self.uploaded = manifest.step if manifest is not None else 0
        self.saver.saved_step = manifest.step if manifest is not None else None
        self.saved_at = time.monotonic()
        return manifest

    def _has_saved_before(self) -> bool:
        """Whether the run folder says that a save succeeded; a run that crashed before its first one starts over."""
        metrics = self.folder / METRICS
        return (self.folder / FINISHED).exists() or (
            metrics.is_file() and f'"{SAVED_STEP}"'.encode() in metrics.read_bytes()
        )

    def load_weights(self, path: str) -> None:
        """Start from the weights of another run, checkpoint or Hugging Face folder, which may be at a URL."""
        draft = self.folder / CHECKPOINTS / f"{DRAFT}load"
        if is_url(path):
            places = find_checkpoints(path)
            if not places:
                raise CheckpointError(f"{path} holds no checkpoint")
            tensors: TensorReader = CheckpointTensors(fetch(places[-1], draft, self.ranks, [MODEL]))
        else:
            found, tensors = open_weights(Path(path))
            model = self.config.model
            if found.vocab_size == model.vocab_size and found.vocab_rows != model.vocab_rows:
                tensors = Repadded(tensors, model.vocab_size, model.vocab_rows)
        fill_parameters(self.names, self.shapes, tensors, path)
        self.ranks.agree(lambda: None)  # all have read
        if self.ranks.first:
            shutil.rmtree(draft, ignore_errors=True)
        self.reporter.note(f"weights from {path}")

    def start_over(self) -> None:
        """Forget what an earlier run left at the URL, as it was forgotten here."""
        if self.uploader is not None and self.ranks.first:
            self.uploader.remove([place.step for place in find_checkpoints(self.uploader.remote)])

    def load(self, manifest: Manifest) -> None:
        """Put weights, and where there is one the state of training, back where they belong."""
        source = str(manifest.folder)
        fill_parameters(self.names, self.shapes, CheckpointTensors(manifest), source)
        for part in self.optimizer.parts.values():
            if not manifest.has_training_state:
                part.state.clear()
        stored = CheckpointTensors(manifest, OPTIMIZER)
        described = [(name, DTYPES[entry.dtype], entry.shape) for name, entry in stored.entries.items()]
        for name, _, _ in described:
            parameter = name.partition("/")[2]
            if parameter not in self.shapes and not name.startswith(f"{RNG}/"):
                raise CheckpointError(f"{source} has optimizer state for {parameter}, which the model lacks")
        for name, slot in self.optimizer.state_slots(described):
            read_into(slot, name, stored, source)
