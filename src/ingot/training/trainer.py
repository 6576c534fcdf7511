"""A run from start to end: build, resume, step, evaluate, save.

The only mutable progress is the number of finished batches. Learning rate and next samples are functions of it, so a
killed run resumes from its last checkpoint exactly where it would have been.
"""

import json
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.config.durations import Duration
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch, BatchLoader
from ingot.errors import NumericError
from ingot.evaluation.generated import PromptContinuations
from ingot.evaluation.in_run import RunEvaluation
from ingot.evaluation.validation import Evaluation
from ingot.parallel.executors.device import explaining_nondeterminism
from ingot.parallel.rank_env import find_rank_env
from ingot.storage.object_store import is_url
from ingot.training.checkpointer import Checkpointer
from ingot.training.guards import Action, Anomaly, CorruptReplica, Guard
from ingot.training.listener import Row, RunListener
from ingot.training.loss_scale import LossScale
from ingot.training.microbatch_search import choose_microbatch, recording_oom
from ingot.training.optimizer import Optimizer
from ingot.training.profiling.memory_report import MemoryWatch
from ingot.training.profiling.step_profiler import StepProfiler
from ingot.training.progress import Progress
from ingot.training.runtime.gc_control import GcControl
from ingot.training.runtime.heartbeat import EVALUATION, SAVE
from ingot.training.runtime.remaining_time import RemainingTime
from ingot.training.runtime.run_files import GUARDS
from ingot.training.runtime.run_folder import changed_keys, read_state
from ingot.training.runtime.session import RunSession
from ingot.training.runtime.stop import StopRequest
from ingot.training.schedule import lr_multiplier
from ingot.training.setup import build_executor, check_continues, open_inputs, plan_execution
from ingot.training.step import StepResult, train_step
from ingot.training.step_meter import StepMeter
from ingot.training.testing import run_step
from ingot.version import __version__

PROFILED = "its steps are profiled, and profiler.end_run ends it here without saving"


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    batches: int
    loss: float | None
    evaluation: Evaluation | None  # of the last time, on the first validation set
    stopped: str = ""  # why it stopped before its end; empty if it has finished
    metrics: Row = field(default_factory=dict)  # all of the last evaluation


def train(config: RunConfig, listener: RunListener, fresh: bool = False) -> Result:
    """Train a run to its end, continuing it if its folder holds a checkpoint."""
    trainer = None
    try:
        with explaining_nondeterminism(), ExitStack() as cleanup:
            cleanup.callback(listener.end)
            trainer = Trainer(config, listener, cleanup, fresh)
            result = trainer.fit()
            trainer.executor.close()
            return result
    except (NumericError, CorruptReplica):
        if trainer is not None:
            trainer.checkpointer.copies.discard()  # what they hold is in doubt
        raise
    except KeyboardInterrupt:
        if trainer is None:
            raise KeyboardInterrupt("interrupted before the first step") from None
        raise trainer.interrupted() from None  # now that a save in flight has ended


class Trainer:
    """Everything that a run needs, built and checked before the first step."""

    def __init__(self, config: RunConfig, listener: RunListener, cleanup: ExitStack, fresh: bool = False):
        self.config, self.listener, self.cleanup = config, listener, cleanup
        env = find_rank_env()
        self.run = RunSession(config, env.rank)
        cleanup.callback(self.run.close)
        limit = config.max_wall_time.seconds if config.max_wall_time else None
        self.stop = StopRequest(self.run.folder, limit, env.rank, is_alone=env.world == 1)
        cleanup.callback(self.stop.close)
        plan = plan_execution(config, env, listener)
        self.inputs = open_inputs(config, listener)
        self.progress = Progress(self.inputs.clock.total_batches)
        self.executor = executor = build_executor(config, plan, self.inputs, listener)
        self.optimizer = Optimizer(config.optimizer, {p.tensor: p.name for p in executor.parameters})
        self.scaler = LossScale(executor.device, enabled=config.precision == "fp16")
        self.checkpointer = Checkpointer(
            config, self.inputs.clock, executor, self.optimizer, listener, self.run.confirm_owner
        )
        cleanup.callback(self.checkpointer.close)
        if config.load_path is not None and not is_url(config.load_path):
            self.checkpointer.load_weights(config.load_path)
        executor.weights_changed()
        with recording_oom(self.run.folder, executor, "before the first step"):
            decisions = choose_microbatch(config, executor, self.run.folder, fresh)
        for decision in decisions:
            listener.note(decision)
        self.evaluation = RunEvaluation(
            config, self.inputs.clock, executor, self.inputs.evaluated, self.inputs.tokenizer, listener
        )
        self.prompts = PromptContinuations(config, executor, self.inputs.prompts, self.inputs.tokenizer, listener)
        self.remaining = RemainingTime(self.inputs.clock, config.save_interval, self.evaluation.tokens_after)
        self.meter = StepMeter(config, executor, self.inputs.train, plan.compiled, self.remaining)
        cleanup.callback(self.meter.close)
        if self.meter.peak is not None:
            listener.note(f"peak: {self.meter.peak / 1e12:.3g} TFLOP/s, for MFU ({self.meter.peak_source})")
        self.guard = Guard(config.guards, executor, scaled=self.scaler.enabled)
        self.run.open(fresh)
        executor.check_same("folder", {})  # no rank looks for checkpoints before rank 0 has cleared the folder
        if fresh:
            self.checkpointer.start_over()
        self.memory = MemoryWatch(config.profiler, self.run.folder, executor, self.optimizer, listener)
        cleanup.callback(self.memory.close)
        self.profiler = StepProfiler(config.profiler, self.run.folder, env, listener, self._pausing)
        cleanup.callback(self.profiler.close)
        state = self._resume()
        self.profiler.begin(self.progress.batch, self.progress.total)
        self.prompts.forget_after(self.progress.batch)
        self.evaluation.agree(self.progress.batch)
        self.run.begin(self.progress.batch, self.progress.total, self.inputs.tokenizer)
        listener.begin(self.progress.batch, self.progress.total, state)

    def fit(self) -> Result:
        """Run the remaining steps."""
        progress, run, meter = self.progress, self.run, self.meter
        if progress.batch >= progress.total:
            self.listener.note(
                f"{run.folder} has finished its {progress.total} batches; ask for more with max_duration=..., or start "
                "over with --fresh"
            )
            return Result(run.folder, progress.batch, None, None)
        reason = self.stop.before_first_step(self.executor)
        if self.config.eval_first and progress.batch == 0 and not reason:
            self.listener.row(meter.position(0) | self.evaluate(), 0)
        batches = self._open_batches()
        self.memory.doing = lambda: self.stop.doing
        meter.restart()
        with closing(GcControl()) as garbage:
            while progress.batch < progress.total and not (reason or self.profiler.has_ended_run):
                with self.profiler.step(progress.batch + 1):
                    run.heartbeat.step(progress.batch)
                    self.stop.doing = f"step {progress.batch + 1}"
                    batch = meter.next_batch(batches)
                    progress.batch += 1
                    save_due, copy_due = self._is_save_due(), self.checkpointer.copies.is_due(progress.batch)
                    result = None if progress.is_skipped else run_step(self, batch, self._step)
                    anomaly = self.guard.find_anomaly(wait=save_due or copy_due)  # nothing is kept unjudged
                    if anomaly is not None and self._handle(anomaly) is Action.ROLLBACK:
                        batches.close()
                        batches = self._open_batches()
                        continue
                    self._report(batch, result)
                    reason = "" if progress.is_last else self.stop.after_step(self.executor)
                    self._check_health()
                    garbage.after_step()
                    if reason and not save_due and (anomaly := self.guard.find_anomaly(wait=True)) is not None:
                        self._handle(anomaly)
                    self._keep(reason, save_due, copy_due)
        return self._end(reason)

    def _report(self, batch: Batch, result: StepResult | None) -> None:
        """Write down what the step has read and measured, and evaluate if it is time to."""
        progress, row = self.progress, Row()
        if result is not None:
            if not progress.is_skipped:
                self.run.samples.write(progress.batch, batch.samples)
            if self._is_due(self.config.log_interval):
                row = self._measure(result)
        if self.evaluation.is_due(progress.batch, progress.is_last):
            row = (row or self.meter.position(progress.batch)) | self.evaluate()
        if row:
            self.listener.row(row, progress.batch)
            self.meter.restart()

    def _keep(self, reason: str, save_due: bool, copy_due: bool) -> None:
        """Save or copy the state after a step, and continue the prompts that show what it has learned."""
        if not reason and self._is_generation_due(save_due):
            self._continue_prompts()
        if save_due or (reason and not self.config.profiler.end_run):
            self._save(final=bool(reason) or self.progress.is_last)
        elif copy_due:
            self.checkpointer.copy(self.progress.batch, self._state)

    def _end(self, reason: str) -> Result:
        progress, run = self.progress, self.run
        self.profiler.finish()
        if why := reason or (PROFILED if self.profiler.has_ended_run else ""):
            run.record_stop(why, progress.batch if reason else 0, progress.total)
            self.listener.note(f"stopped after batch {progress.batch} of {progress.total}: {why}")
        else:
            run.finish(progress.batch)
        return Result(
            run.folder, progress.batch, self.meter.loss, self.evaluation.last, reason, self.evaluation.metrics
        )

    def evaluate(self) -> Row:
        """The losses on the validation data and the scores of the tasks that are due."""

        def report(what: str, done: int, total: int) -> None:
            self.run.heartbeat.alive()
            self.listener.evaluating(what, done, total)

        self.stop.doing = f"the evaluation after step {self.progress.batch}"
        with self._pausing("evaluation"):
            began = time.perf_counter()
            metrics = self.evaluation.run(self.progress.batch, self.progress.is_last, report)
            self.remaining.add_evaluation(self.evaluation.tokens, time.perf_counter() - began)
        return metrics

    def interrupted(self) -> KeyboardInterrupt:
        """What a second Ctrl-C leaves behind."""
        saved = self.checkpointer.writer.saved_step
        self.run.record_stop("SIGINT", saved or 0, self.progress.total)
        then = "starts over, since nothing was saved yet" if saved is None else f"continues from step {saved}"
        return KeyboardInterrupt(f"stopped now, during {self.stop.doing or 'start-up'}; the same command {then}")

    def _open_batches(self) -> Generator[Batch, None, None]:
        """This rank's part of the batches that are still to come."""
        config, source, size = self.config, self.config.sources.train, self.config.global_train_batch_size
        loader = BatchLoader(
            self.inputs.train, size, seed=config.order_seed(source), shuffle=source.shuffle,
            prefetch=config.sources.prefetch_batches, part=self.executor.batch_part(size),
        )  # fmt: skip
        batches = loader.batches(self.progress.batch)
        self.cleanup.callback(batches.close)  # ends its thread
        return batches

    def _step(self, batch: Batch) -> StepResult:
        """Train on a batch."""
        number, clock = self.progress.batch, self.inputs.clock
        self.optimizer.set_lr(lr_multiplier(self.config.scheduler, clock, number - 1))
        self.executor.begin_step(number - 1)
        with recording_oom(self.run.folder, self.executor, f"at batch {number}"):
            return train_step(
                self.executor, self.optimizer, self.scaler, batch, self.config.gradient_clipping, self._accept
            )

    def _accept(self, loss_share: torch.Tensor, grad_norm: torch.Tensor) -> bool:
        """Whether a step may change the weights. If so, a save in flight copies them first."""
        accepted = self.guard.accept(self.progress.batch, loss_share, grad_norm)
        if accepted:
            self.checkpointer.before_update()
        return accepted

    def _is_due(self, interval: Duration) -> bool:
        """Whether something that happens every so often happens after this batch; everything does after the last."""
        every = self.inputs.clock.interval(interval)
        return self.progress.is_last or bool(every and self.progress.batch % every == 0)

    def _measure(self, result: StepResult) -> Row:
        row = self.meter.row(self.progress, result) | self.optimizer.learning_rates()
        row |= self.checkpointer.metrics(saved_since_last_row=self.meter.has_checkpoint_wait)
        if self.scaler.enabled:
            row["trainer/loss_scale"] = self.scaler.get_scale()
        self.run.heartbeat.own_seconds = self.meter.own_seconds
        if self.meter.warning:
            self.listener.warn(self.meter.warning)
        self.memory.tell()
        return row

    def _handle(self, anomaly: Anomaly) -> Action:
        """Skip the batch of an anomaly, after going back to the checkpoint before it where the policy says so."""
        progress, run, size = self.progress, self.run, self.config.global_train_batch_size
        action, done = self.guard.handle(anomaly, progress.skipped_batches), "skipped"
        if action is Action.ROLLBACK:
            run.samples.close()
            run.heartbeat.begin(SAVE)  # reading a checkpoint may take longer than a step
            progress.batch = -1
            state = self._resume(with_copies=False)  # they may be later than the fault
            if progress.batch < 0:
                raise anomaly.error(" and there is no checkpoint yet to go back to")
            self.listener.rewind(progress.batch, state)
            self.prompts.forget_after(progress.batch)
            done = f"back to batch {progress.batch}, to skip it from there on"
        self.executor.barrier()  # no rank writes samples before they are cut back
        if run.is_owner:
            if action is Action.ROLLBACK:
                run.roll_back(progress.batch)
            order = self.inputs.train.order(
                self.config.order_seed(self.config.sources.train), self.config.sources.train.shuffle
            )
            samples = np.sort(order.take(np.arange((anomaly.batch - 1) * size, anomaly.batch * size))).tolist()
            back_to = {"back_to": progress.batch} if action is Action.ROLLBACK else {}
            line = {"batch": anomaly.batch, "what": anomaly.what, "action": done, "samples": samples}
            run.record_anomaly(line | back_to)
            self.listener.warn(f"{anomaly.what} at batch {anomaly.batch}: {done}; its samples are in {GUARDS}")
        self.executor.barrier()
        return action

    def _check_health(self) -> None:
        """Everything that may end the run between two steps."""
        every = self.inputs.clock.interval(self.config.guards.checksum_interval)
        if every and self.progress.batch % every == 0:
            self.guard.check_replicas(self.progress.batch)
        self.checkpointer.after_step()
        self.run.check()

    def _is_save_due(self) -> bool:
        """Whether to save after this batch, the same on all ranks."""
        batch = self.progress.batch
        return not self.profiler.ends_run_at(batch) and (self.progress.is_last or self.checkpointer.is_due(batch))

    def _is_generation_due(self, save_due: bool) -> bool:
        """Whether to continue the prompts after this batch, the same on all ranks."""
        interval = self.config.generate.interval
        return bool(self.inputs.prompts) and (save_due if interval is None else self._is_due(interval))

    def _continue_prompts(self) -> None:
        self.stop.doing = f"the texts of step {self.progress.batch}"
        with self._pausing("evaluation"):
            self.prompts.write(self.progress.batch, self.run.heartbeat.alive)

    @contextmanager
    def _pausing(self, what: str) -> Iterator[None]:
        """Around what does not belong to a step: its time is counted on its own, and may be longer than a step's."""
        self.run.heartbeat.begin(EVALUATION if what == "evaluation" else SAVE)
        with self.meter.waiting(what):
            yield

    def _save(self, final: bool) -> None:
        with self._pausing("checkpoint"):
            self.checkpointer.save(self.progress.batch, self._state, final)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds next to tensors."""
        batch, tokenizer = self.progress.batch, self.inputs.tokenizer
        return self.progress.to_state() | {
            "config": json.loads(self.config.model_dump_json()),
            "progress": self.meter.position(batch),
            "scaler": self.scaler.state_dict(),
            "data": self.inputs.train.state(batch * self.config.global_train_batch_size),
            "guard": self.guard.state(),
            "tokenizer": tokenizer.fingerprint() if tokenizer is not None else None,
            "versions": {"ingot": __version__, "torch": torch.__version__},
            "reporter": self.listener.state(),
            "execution": self._execution(),
        }

    def _execution(self) -> dict[str, str]:
        """What decides the order of floating-point sums: with other values, results agree but not to the last bit."""
        executor = self.executor
        return {
            "layout": str(executor.layout), "microbatch": str(executor.microbatch),
            "recomputed": str(executor.recompute),
        }  # fmt: skip

    def _resume(self, with_copies: bool = True) -> dict[str, Any] | None:
        """Continue from the newest good checkpoint or copy, if there is one. Return the listener's state in it."""
        manifest, config = self.checkpointer.find(with_copies), self.config
        if manifest is None:
            if config.load_path is not None and is_url(config.load_path) and self.progress.batch == 0:
                self.checkpointer.load_weights(config.load_path)
                self.executor.weights_changed()
            return None
        if not manifest.has_training_state and manifest.step == 0:  # imported
            self.checkpointer.load(manifest)
            self.executor.weights_changed()
            self.listener.note(f"starting from the weights in {manifest.folder}")
            return None
        state = read_state(manifest)
        for text in changed_keys(config, manifest):
            self.listener.note(f"since the checkpoint, {text}")
        check_continues(manifest, state, config, self.inputs)
        self.inputs.train.resume(state.data, manifest.step * config.global_train_batch_size)
        self.checkpointer.load(manifest)
        self.executor.weights_changed()
        self.scaler.load_state_dict(state.scaler)
        self.guard.restore(state.guard)
        self.progress.restore(manifest.step, state)
        changed = [f"{key} was {state.execution[key]} and is now {now}" for key, now in self._execution().items()
                   if state.execution.get(key, now) != now]  # fmt: skip
        if config.deterministic is True and changed:
            self.listener.warn(
                f"{'; '.join(changed)}: results will not be bitwise those of an uninterrupted run, which "
                "deterministic=true asks for; for that, continue with the values of the checkpoint"
            )
        self.listener.note(f"resumed from {manifest.folder} at batch {manifest.step} of {self.progress.total}")
        return state.reporter
