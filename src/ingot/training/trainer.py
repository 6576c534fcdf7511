"""A run from start to end: build, resume, step, evaluate, save.

Progress is a number of finished batches. Everything else (learning rate, samples of the next batch) follows from it,
so a run that is killed and started again goes on from its last checkpoint as if nothing had happened.
"""

import json
import math
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ingot.checkpoint.location import is_url
from ingot.checkpoint.manifest import write_atomically
from ingot.checkpoint.store import clear_drafts
from ingot.config.durations import BatchClock
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch, BatchLoader
from ingot.data.loading.open_dataset import Dataset, open_dataset
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.errors import CheckpointError, ConfigError
from ingot.evaluation.validation import Evaluation, evaluate
from ingot.model.attention import choose_kernel
from ingot.model.gpt import flops_per_token, parameter_shapes
from ingot.model.init import build_model
from ingot.parallel.coordinator import LocalCoordinator, StoreCoordinator
from ingot.parallel.executors.base import NamedParameter, dropout_seed
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import StepShape, choose_layout
from ingot.parallel.rank_env import find_rank_env
from ingot.parallel.rendezvous import World, join_world, leave_world
from ingot.training import device as devices
from ingot.training.checkpointer import Checkpointer
from ingot.training.cuda_graph import check_graph, choose_graph
from ingot.training.fingerprint import code_hash, config_hash
from ingot.training.guards import Anomaly, CorruptReplica, Guard
from ingot.training.host_memory import check_host_memory
from ingot.training.listener import Row, RunListener
from ingot.training.microbatch_search import choose_microbatch, choose_recompute, remember_too_much
from ingot.training.oom import OutOfMemory, is_out_of_memory
from ingot.training.optimizer import Optimizer
from ingot.training.runtime.gc_control import Garbage
from ingot.training.runtime.heartbeat import Heartbeat
from ingot.training.runtime.lease import Lease
from ingot.training.runtime.run_files import FINISHED, GUARDS, TOKENIZER
from ingot.training.runtime.run_folder import changed_keys, check_disk_space, open_run_folder, read_state, write_config
from ingot.training.runtime.sample_log import SampleLog, cut_back
from ingot.training.runtime.stop import StopRequest, start_compilers
from ingot.training.schedule import lr_multiplier
from ingot.training.step import TrainStep
from ingot.training.throughput import StragglerWatch, Window
from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.parallel.comm_timer import CommTimer
    from ingot.parallel.executors.distributed import Spread


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    batches: int
    loss: float | None
    evaluation: Evaluation | None
    stopped: str = ""  # why it stopped before its end; empty if it has finished


def train(config: RunConfig, reporter: RunListener, fresh: bool = False) -> Result:
    """Train a run to its end, continuing it if its folder holds a checkpoint."""
    with ExitStack() as cleanup:
        cleanup.callback(reporter.end)
        result = Trainer(config, reporter, cleanup, fresh).fit()
        leave_world()
        return result


class Trainer:
    """Everything that a run needs, built and checked before the first step."""

    def __init__(self, config: RunConfig, reporter: RunListener, cleanup: ExitStack, fresh: bool = False):
        self.config, self.reporter = config, reporter
        self.heartbeat = Heartbeat(config.hang_timeout)
        self.folder = Path(config.run_folder)
        self.stop = StopRequest(self.folder, config.max_wall_time.seconds if config.max_wall_time else None)
        cleanup.callback(self.stop.close)
        # Whatever can be wrong with the input is found before the run folder is touched.
        place = find_rank_env()
        self.device, why = devices.choose_device(config, place.local_rank)
        self.layout, layout_why = choose_layout(
            config.parallel, place.world, config.model, config.global_train_batch_size, StepShape.of(config),
            devices.device_memory(self.device), place.local_world,
        )  # fmt: skip
        if self.device.type == "cpu":  # before the processes meet, so before any of them takes memory
            check_host_memory(config, self.layout, place.local_world)
        spread = place.world > 1 or config.parallel.shard == 1
        if spread:
            devices.check_spread(config, self.layout)
        check_graph(config, self.device, spread)
        self.world = join_world(place, self.device, config.parallel.join_timeout) if spread else None
        self.first = place.rank == 0  # the process that writes
        asked = (config.max_seq_len, config.model.vocab_size, config.unscored)
        self.data = open_dataset(config.sources.train, *asked)
        self.eval_data = open_dataset(config.sources.eval, *asked) if config.sources.eval else None
        self.tokenizer = _find_tokenizer(config, self.data)
        self.clock = BatchClock(
            config.global_train_batch_size, config.max_seq_len, self.data.samples, config.max_duration
        )
        self.total = self.clock.total_batches
        self.batch = 0
        self.train_seconds = 0.0
        reporter.note(f"device {self.device.type}: {why}; precision {config.precision}, weights and optimizer in fp32")
        reporter.note(f"data {self.data.describe()}")
        if self.eval_data is None:
            reporter.note("no validation data, so no evaluation; name some with data.eval.path=...")
        if self.world is not None:
            count = f"{place.world} processes" if place.world > 1 else "one process, wrapped by FSDP2"
            reporter.note(f"{count}, {self.layout}: {layout_why}" if place.world > 1 else count)
            recompute, why = choose_recompute(config, self.layout, devices.device_memory(self.device))
            reporter.note(f"recomputed in the backward pass: {recompute or 'nothing'} ({why})")
            self.world.agree("start", {
                "config": config_hash(config), "layout": str(self.layout), "code": code_hash(),
                "data": json.dumps(self.data.fingerprint()), "recompute": str(recompute),
            })  # fmt: skip

        compiled, compile_why = devices.choose_compile(config, self.device, self.layout)
        deterministic = devices.make_deterministic(config, self.device, compiled)
        torch.manual_seed(config.seed)
        kernel, why = choose_kernel(config.model, self.device)
        if compiled and self.device.type == "cuda":  # on a CPU threads compile
            start_compilers()
        if isinstance(config.activation_checkpointing, float):
            devices.set_memory_budget(config.activation_checkpointing, compiled)
        self.spread: Spread | None = None
        if self.world is None:
            model: Any = build_model(config.model, config.seed, self.device)
            model.recompute = config.recompute  # what "auto" comes to is tried with the microbatch
            model.use_kernel(kernel, config.max_seq_len, self.device)
            if note := model.use_precision(config.precision, self.device):
                reporter.note(note)
            self.names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
        else:
            from ingot.parallel.parallelize import spread_model  # a second of imports that one process has no use for

            self.spread = spread_model(
                config.model, config.parallel, self.layout, self.device, seq_len=config.max_seq_len,
                precision=config.precision, kernel=kernel, recompute=recompute, compiled=compiled,
            )  # fmt: skip
            self.spread.init_weights(config.seed)
            model, self.names = self.spread.roots[0], self.spread.names
        self.shapes = parameter_shapes(config.model)
        parameters = config.model.parameters
        reporter.note(f"model {config.model.family}, {parameters:,} parameters; attention {kernel}: {why}")
        self.optimizer = Optimizer(config.optimizer, self.names)
        executor: Any = _Parts(self.names, self.shapes, self.layout, self.world, self.spread)
        self.saving = Checkpointer(config, self.clock, executor, self.optimizer, reporter)
        cleanup.callback(self.saving.close)
        if config.load_path is not None and not is_url(config.load_path):
            self.saving.load_weights(config.load_path)
        micro, why = choose_microbatch(config, model, self.device, self.spread, self.folder, fresh)
        reporter.note(f"microbatch {micro} of a global batch of {config.global_train_batch_size}: {why}")
        self.flops = flops_per_token(config.model, config.max_seq_len)
        self.causal_flops = flops_per_token(config.model, config.max_seq_len, causal=True)
        self.peak, source = devices.peak_flops(self.device, config.precision)
        reporter.note(f"peak {self.peak / 1e12:.3g} TFLOP/s for utilisation ({source})")
        self.runnable: Any = model.compiled() if compiled and self.spread is None else model
        reporter.note(f"torch.compile {compile_why}; deterministic kernels {'on' if deterministic else 'off'}")
        self.step = TrainStep(config, self.runnable, self.optimizer, self.device, micro, self.spread, self._accept)
        self.settled = False  # what can be decided only after a step
        self.compiling = compiled  # until the first row, whose time says nothing of the rest
        total_loss = self.spread.total_loss if self.spread is not None else None
        self.guard = Guard(config.guards, total_loss, scaled=config.precision == "fp16")
        self.finding: Anomaly | None = None
        self.left_out: set[int] = set()  # batches that a guard decided not to train on
        self.communication: CommTimer | None = None
        self.stragglers = StragglerWatch()
        if self.spread is not None:
            from ingot.parallel import comm_timer as clock

            self.communication = clock.CommTimer(self.device)
            cleanup.callback(self.communication.stop)
        self.samples = SampleLog(self.folder, place.rank, config.loggers.samples)

        self.lease: Lease | None = None
        if self.first:
            self.lease = open_run_folder(config, fresh)
            cleanup.callback(self.lease.release)
            check_disk_space(self.folder, (4 if config.save_weights_only else 12) * parameters)  # weights, moments
            self.saving.check_manifest_size()
            clear_drafts(self.folder)
        if self.world is not None:
            self.world.agree("folder", {})  # nobody looks for checkpoints before rank 0 has cleared the folder
        if fresh:
            self.saving.start_over()
        reporter_state = self._resume()
        if self.first:
            cut_back(self.folder, self.batch)
            if self.batch < self.total:
                (self.folder / FINISHED).unlink(missing_ok=True)
            write_config(self.folder, config)
            if self.tokenizer is not None:
                self.tokenizer.save(self.folder / TOKENIZER)
        reporter.begin(self.batch, self.total, reporter_state)

    def fit(self) -> Result:
        """Run the remaining steps."""
        config = self.config
        if self.batch >= self.total:
            self.reporter.note(
                f"{self.folder} has finished its {self.total} batches; ask for more with max_duration=..., or start "
                "over with --fresh"
            )
            return Result(self.folder, self.batch, None, None)
        log_every = self.clock.interval(config.log_interval) or self.total
        eval_every = self.clock.interval(config.eval_interval)
        loss: float | None = None
        evaluation: Evaluation | None = None
        reason = self.stop.before_first_step()
        batches = self._open_batches()
        window = self._open_window()
        garbage = Garbage()
        try:
            while self.batch < self.total and not reason:
                self.heartbeat.step(self.batch)
                with window.waiting("data"):
                    batch = next(batches)
                self.batch += 1
                window.batches += 1
                last = self.batch == self.total
                save_due = last or self.saving.is_due(self.batch)
                row: Row | None = None
                if self.batch not in self.left_out:
                    step_loss, norm = self._step(batch)
                    self._settle(batch)
                    if save_due:
                        self.finding = self.finding or self.guard.settle()  # what is saved has been judged
                    if self.finding is not None and self._back_after(self.finding):
                        batches.close()
                        batches = self._open_batches()
                        continue
                    if self.batch not in self.left_out:
                        self.samples.write(self.batch, batch.samples)
                    if last or self.batch % log_every == 0:
                        loss, row = self._measure(step_loss, norm, window)
                if self.eval_data is not None and (last or (eval_every and self.batch % eval_every == 0)):
                    self.heartbeat.pause()
                    evaluation = self.evaluate()
                    row = (row or self._position()) | evaluation.metrics()
                if row is not None:
                    self.reporter.row(row, self.batch)
                    window = self._open_window()
                reason = self.stop.after_step() if not last else ""
                self._check_replicas()
                self.saving.after_step()
                garbage.after_step()
                if self.lease is not None:
                    self.lease.check()
                if reason or save_due:
                    self.heartbeat.pause()
                    with window.waiting("checkpoint"):
                        self.saving.save(self.batch, self._state, final=last or bool(reason))
        finally:
            garbage.close()
            batches.close()
            self.samples.close()
        if reason:
            self.reporter.note(f"stopped after batch {self.batch} of {self.total}: {reason}")
        elif self.first:
            write_atomically(self.folder / FINISHED, f"{self.batch}\n")
        return Result(self.folder, self.batch, loss, evaluation, reason)

    def _open_window(self) -> Window:
        """Begin to measure anew."""
        if self.communication is not None:
            self.communication.start()
        return Window()

    def _open_batches(self) -> Generator[Batch, None, None]:
        """The batches that are still to come, of each the slice that is this process's."""
        config, source, size = self.config, self.config.sources.train, self.config.global_train_batch_size
        part = self.layout.part(self.spread.mesh.data_rank, size) if self.spread is not None else None
        loader = BatchLoader(
            self.data, size, seed=config.order_seed(source), shuffle=source.shuffle,
            prefetch=config.sources.prefetch_batches, part=part,
        )  # fmt: skip
        return loader.batches(self.batch)

    def _accept(self, loss: torch.Tensor, norm: torch.Tensor) -> bool:
        """Whether a step may change the weights."""
        self.finding = self.guard.look(self.batch, loss, norm)
        if self.finding is None:
            self.saving.before_update()
        return self.finding is None

    def _back_after(self, finding: Anomaly) -> bool:
        """Deal with a finding by its policy; says whether the run has gone back to a checkpoint."""
        self.finding = None
        if finding.policy == "stop":
            raise finding.error()
        self.left_out.add(finding.batch)
        if len(self.left_out) > self.config.guards.max_skips:
            raise finding.error(f", and guards.max_skips={self.config.guards.max_skips} batches were left out already")
        back = finding.policy == "rollback"
        if back:
            self.samples.close()
            self.batch = -1
            state = self._resume()
            if self.batch < 0:
                raise finding.error(" and there is no checkpoint yet to go back to")
            self.reporter.rewind(self.batch, state)
        if self.world is not None:
            dist.barrier()  # nobody writes samples before they are cut back
        if self.first:
            if back:
                cut_back(self.folder, self.batch)
            action = f"back to batch {self.batch}, and without it from there" if back else "left out"
            source, size = self.config.sources.train, self.config.global_train_batch_size
            order = self.data.order(self.config.order_seed(source), source.shuffle)
            ids = np.sort(order.take(np.arange((finding.batch - 1) * size, finding.batch * size))).tolist()
            line = {"batch": finding.batch, "what": finding.what, "action": action, "samples": ids}
            with (self.folder / GUARDS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self.reporter.warn(f"{finding.what} at batch {finding.batch}: {action}; its samples are in {GUARDS}")
        if self.world is not None:
            dist.barrier()
        return back

    def _check_replicas(self) -> None:
        """Compare weights that should be the same on several processes; a corrupted one ends the run."""
        every = self.clock.interval(self.config.guards.checksum_interval)
        if self.spread is None or not every or self.batch % every:
            return
        if odd := self.spread.differing_replicas():
            ranks, name = odd
            raise CorruptReplica(
                f"after batch {self.batch}, rank {', '.join(map(str, ranks))} holds other weights than its replicas "
                f"({name}): memory or arithmetic there is faulty; run again without that machine"
            )

    def _step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on a batch. If it does not fit into memory, the same batch again, in microbatches half as large."""
        self.optimizer.set_lr(lr_multiplier(self.config.scheduler, self.clock, self.batch - 1))
        model = self.config.model
        if max(model.emb_pdrop, model.resid_pdrop, model.attn_pdrop) > 0:  # nothing to save, whatever the layout
            rank = dist.get_rank() if self.spread is not None else 0
            torch.manual_seed(dropout_seed(self.config.seed, self.batch - 1, rank))
        while True:
            try:
                return self.step.run(batch)
            except (RuntimeError, MemoryError) as error:  # torch's own out-of-memory error is a RuntimeError too
                if not is_out_of_memory(error):
                    raise
                place = f"in the optimizer at batch {self.batch}" if self.step.updating else f"at batch {self.batch}"
                problem = OutOfMemory(place, self.step.micro, str(error).partition("\n")[0])
            # here the failed attempt's tensors are gone: the error that held them has been let go
            if problem.fits is None or self.step.updating or self.spread is not None:
                if problem.fits is not None:
                    remember_too_much(self.folder, self.step.micro, self.layout)
                raise problem
            self.step.retry_with(problem.fits)
            self.reporter.warn(f"out of memory at batch {self.batch}; again with microbatches of {problem.fits}")

    def _settle(self, batch: Batch) -> None:
        """After the first step: decide whether to record the passes of the others."""
        if self.settled:
            return
        self.settled = True
        least = self.step.micro * self.config.max_seq_len * self.flops / self.peak
        recompute = self.runnable.recompute if self.spread is None else None
        if note := choose_graph(self.step, batch, recompute, least):
            self.reporter.note(note)

    def evaluate(self) -> Evaluation:
        """The loss on the validation data."""
        assert self.eval_data is not None
        batch = self.config.device_eval_batch_size or self.step.micro
        return evaluate(
            self.config, self.runnable, self.eval_data, self.device, batch, self.tokenizer,
            self.spread, self.heartbeat.alive,
        )  # fmt: skip

    def _measure(self, step_loss: torch.Tensor, norm: torch.Tensor, window: Window) -> tuple[float, Row]:
        """The row of this step. Reading the loss is the only place where the loop waits for the device."""
        loss = float(self.spread.total_loss(step_loss) if self.spread is not None else step_loss)
        grad_norm = float(norm)
        elapsed = window.seconds
        self.train_seconds += elapsed
        rate = window.batches / (elapsed - window.checkpoint)
        samples, tokens = self.config.global_train_batch_size, self._batch_tokens
        row = self._position() | {
            "loss/train/total": loss,
            "metrics/train/LanguageCrossEntropy": loss,
            "metrics/train/LanguagePerplexity": math.exp(min(loss, 700.0)),
            "l2_norm/grad/global": grad_norm,
            **self.optimizer.learning_rates(),
            "throughput/batches_per_sec": rate,
            "throughput/samples_per_sec": rate * samples,
            "throughput/tokens_per_sec": rate * tokens,
            "throughput/device/tokens_per_sec": rate * tokens / self.layout.size,
            "throughput/device/mfu": rate * tokens * self.flops / self.peak / self.layout.size,
            "throughput/device/mfu_causal": rate * tokens * self.causal_flops / self.peak / self.layout.size,
            "time/data": window.data / elapsed,
            "time/checkpoint": window.checkpoint / elapsed,
            "time/train": self.train_seconds / 3600,
            "trainer/device_train_microbatch_size": self.step.micro,
            **devices.memory_metrics(self.device),
        }
        if self.spread is not None:
            assert self.communication is not None
            waited = self.communication.seconds
            row["time/communication"] = waited / elapsed
            row |= self._over_ranks(row, (elapsed - waited - window.checkpoint) / window.batches)
        row["time/compute"] = 1 - row["time/data"] - row["time/checkpoint"] - row.get("time/communication", 0.0)
        if not self.compiling or self.batch == self.total:
            row["time/remaining_estimate"] = (self.total - self.batch) / rate / 3600
        self.compiling = False
        row |= self.saving.metrics(saved_since_last_row=bool(window.checkpoint))
        if self.config.precision == "fp16":
            row["trainer/loss_scale"] = self.step.scaler.get_scale()
        return loss, row

    def _over_ranks(self, row: Row, own_seconds: float) -> Row:
        """What differs between processes: who needs most memory, and who takes longest for his own part of a batch."""
        assert self.spread is not None
        memory = next(name for name in ("memory/peak_reserved_mem", "memory/peak_resident_mem") if name in row)
        ranks = self.spread.per_rank([row[memory], row["time/data"], own_seconds])
        used, waited, own = ([values[i] for values in ranks] for i in range(3))
        if text := self.stragglers.look(own):
            self.reporter.warn(text)
        return {
            f"{memory}/min": min(used),
            f"{memory}/max": max(used),
            "time/data/max": max(waited),
            "time/own_seconds/min": min(own),
            "time/own_seconds/max": max(own),
            "time/own_seconds/slowest_rank": own.index(max(own)),
        }

    def _position(self) -> Row:
        samples = self.batch * self.config.global_train_batch_size
        return {
            "time/batch": self.batch,
            "time/sample": samples,
            "time/token": self.batch * self._batch_tokens,
            "time/epoch": samples / self.data.samples,
            **{f"time/token/{name}": n * self.config.max_seq_len for name, n in self.data.taken(samples).items()},
        }

    @property
    def _batch_tokens(self) -> int:
        return self.config.global_train_batch_size * self.config.max_seq_len

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        return {
            "config": json.loads(self.config.model_dump_json()),
            "progress": self._position(),
            "train_seconds": self.train_seconds,
            "scaler": self.step.scaler.state_dict(),
            "data": self.data.state(self.batch * self.config.global_train_batch_size),
            "left_out": sorted(self.left_out),
            "guard": self.guard.state(),
            "tokenizer": self.tokenizer.fingerprint() if self.tokenizer is not None else None,
            "versions": {"ingot": __version__, "torch": torch.__version__},
            "reporter": self.reporter.state(),
        }

    def _resume(self) -> dict[str, Any] | None:
        """Continue from the newest good checkpoint, if there is one; gives the reporter's state in it."""
        manifest = self.saving.find()
        if manifest is None:
            if self.config.load_path is not None and is_url(self.config.load_path) and self.batch == 0:
                self.saving.load_weights(self.config.load_path)
            return None
        if not manifest.has_training_state and manifest.step == 0:  # imported
            self.saving.load(manifest)
            self.reporter.note(f"starting from the weights in {manifest.folder}")
            return None
        state = read_state(manifest)
        for text in changed_keys(self.config, manifest):
            self.reporter.note(f"since the checkpoint, {text}")
        if manifest.step > self.total:
            raise CheckpointError(
                f"{manifest.folder} is past max_duration={self.config.max_duration} ({self.total} batches); ask for "
                "more, or start over with --fresh"
            )
        if not manifest.has_training_state and manifest.step < self.total:
            raise CheckpointError(
                f"{manifest.folder} was saved with save_weights_only and cannot be continued; train on from its "
                f"weights in another folder with load_path={manifest.folder}, or start over with --fresh"
            )
        tokenizer = self.tokenizer.fingerprint() if self.tokenizer is not None else None
        if None not in (tokenizer, state.tokenizer) and tokenizer != state.tokenizer:
            raise CheckpointError(f"{manifest.folder} was trained with another tokenizer; put it back, or use --fresh")
        self.data.resume(state.data, manifest.step * self.config.global_train_batch_size)
        self.saving.load(manifest)
        self.step.scaler.load_state_dict(state.scaler)
        self.left_out |= set(state.left_out)
        self.guard.restore(state.guard)
        self.batch = manifest.step
        self.train_seconds = state.train_seconds
        self.reporter.note(f"resumed from {manifest.folder} at batch {self.batch} of {self.total}")
        return state.reporter


class _Parts:
    """What checkpoints need of an executor."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        shapes: dict[str, tuple[int, ...]],
        layout: Layout,
        world: World | None,
        spread: "Spread | None",
    ):
        copy = spread.twin if spread is not None else None
        self.parameters = [NamedParameter(name, p, is_tied_copy=p is copy) for p, name in names.items()]
        self.parameter_shapes, self.layout = shapes, layout
        self.coordinator = StoreCoordinator(world) if world is not None else LocalCoordinator()
        self.full_tensors = spread.collect if spread is not None else lambda tensors, shapes: tensors.items()
        self.from_rank_0 = spread.first_says if spread is not None else bool


def _find_tokenizer(config: RunConfig, data: Dataset) -> Tokenizer | None:
    """The tokenizer of the run, checked against the model. Training does not need one; text in and out does."""
    path = config.tokenizer or data.tokenizer_folder
    if path is None:
        return None
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {path} has {tokenizer.vocab_size} tokens, model.vocab_size is {config.model.vocab_size}; "
            f"set model.vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer
