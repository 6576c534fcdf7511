"""What a run evaluates, and when: validation sets and downstream tasks, each at its own interval.

Everything about tasks that can be wrong is found before the first step. Later a task that fails costs its own score
and nothing else: a warning, a line in evaluations/failed.jsonl, and the run goes on.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingot.config.durations import BatchClock, Duration
from ingot.config.evaluation import FOLDER, GauntletConfig, TaskConfig
from ingot.config.run import RunConfig
from ingot.data.loading.token_dataset import Dataset
from ingot.data.tokenizer import Tokenizer
from ingot.errors import ConfigError, DataError, IngotError
from ingot.evaluation.tasks.gauntlet import check_gauntlet, composite_scores, named_composites
from ingot.evaluation.tasks.rank_scoring import RankScorer
from ingot.evaluation.tasks.run import PreparedTask, TaskScore, check_names, prepare_task, score_task
from ingot.evaluation.tasks.task_files import load_gauntlet, load_tasks
from ingot.evaluation.validation import Evaluation, evaluate
from ingot.parallel.executors.base import Executor, Messages

FAILED = "failed.jsonl"  # tasks that failed in a run, in FOLDER
Progress = Callable[[str, int, int], None]
"""Receives what is evaluated, and tokens done and in all."""


@dataclass
class EvalInputs:
    """What a run evaluates on."""

    validation: dict[str, Dataset] = field(default_factory=dict)
    """The validation sets by label; a single one has an empty label."""
    tasks: list[PreparedTask] = field(default_factory=list)
    gauntlet: GauntletConfig | None = None
    failed: dict[str, str] = field(default_factory=dict)
    """Why a task cannot be evaluated, by its label: only in a run that has trained already."""


def open_tasks(config: RunConfig, tokenizer: Tokenizer | None, messages: Messages, has_trained: bool) -> EvalInputs:
    """Read, check and tokenize the downstream tasks of a run. In one that `has_trained`, a task that cannot be read is
    left out."""
    folder = Path(config.eval.folder) if config.eval.folder else None
    found = EvalInputs()
    if not config.eval.tasks:
        return found
    if tokenizer is None:
        raise ConfigError("eval.tasks: tasks are text, and the run has no tokenizer; name one with tokenizer=FOLDER")
    tasks: list[TaskConfig] = []
    for given in config.eval.tasks:
        try:
            tasks += load_tasks([given], folder=folder, option="eval.tasks")
        except (ConfigError, DataError) as error:
            _leave_out(found, given if isinstance(given, str) else given.label, error, has_trained)
    check_names(tasks)
    _check_intervals(config, tasks)
    if config.eval.gauntlet is not None and tasks:
        found.gauntlet, origins = load_gauntlet(config.eval.gauntlet, folder)
        check_gauntlet(found.gauntlet, origins, tasks, messages.warn)
    length = config.icl_seq_len or config.max_seq_len
    longest = config.model.context if config.model.positions == "learned" else None
    for task in tasks:
        try:
            found.tasks += prepare_task(task, tokenizer, length, longest, config.task_questions)
        except (ConfigError, DataError) as error:
            _leave_out(found, task.label, error, has_trained)
    for line in filter(None, (part.describe_cut() for part in found.tasks)):
        messages.warn(line)
    questions = sum(len(part.questions) for part in found.tasks)
    labels = ", ".join(dict.fromkeys(part.task.label for part in found.tasks))
    messages.note(f"tasks: {labels} ({questions:,} questions, {sum(p.tokens for p in found.tasks):,} tokens each time)")
    return found


class RunEvaluation:
    """Evaluates a run while it trains."""

    def __init__(
        self, config: RunConfig, clock: BatchClock, executor: Executor, inputs: EvalInputs,
        tokenizer: Tokenizer | None, messages: Messages,
    ):  # fmt: skip
        self.config, self.clock, self.executor, self.inputs = config, clock, executor, inputs
        self.tokenizer, self.messages = tokenizer, messages
        self.last: Evaluation | None = None
        """Of the first validation set."""
        self.metrics: dict[str, float] = {}
        """Of the last evaluation."""
        self.tokens = 0
        """That the last evaluation read."""

    def agree(self, batch: int) -> None:
        """Leave out tasks that not all ranks could read, or read alike: before the first step that is an error."""
        labels = dict.fromkeys([*self.inputs.failed, *(part.task.label for part in self.inputs.tasks)])
        hashes = {part.task.label: float(int(part.sha256[:12], 16)) for part in self.inputs.tasks}
        ranks = self.executor.all_gather([hashes.get(label, 0.0) for label in labels]) if labels else []
        for label, found in zip(labels, zip(*ranks, strict=True), strict=True):
            if len(set(found)) > 1:
                odd = next(rank for rank, value in enumerate(found) if value != found[0])
                reason = f"task {label}: rank {odd} reads another file than rank 0, or none"
                if batch == 0:
                    raise ConfigError(f"{reason}; put the same file on all nodes")
                self.inputs.failed.setdefault(label, reason)
        for label, reason in self.inputs.failed.items():
            self._record(label, reason, batch)
        self.inputs.tasks = [part for part in self.inputs.tasks if part.task.label not in self.inputs.failed]

    def is_due(self, batch: int, is_last: bool) -> bool:
        """Whether there is something to evaluate after this batch."""
        labels = [*self.inputs.validation, *(part.task.label for part in self.inputs.tasks)]
        return any(self._is_due(label, batch, is_last) for label in labels)

    def run(self, batch: int, is_last: bool, report: Progress) -> dict[str, float]:
        """The metrics of everything that is due after this batch; before the first one, everything is."""
        everything = is_last or batch == 0
        sets = [label for label in self.inputs.validation if self._is_due(label, batch, everything)]
        tasks = [part for part in self.inputs.tasks if self._is_due(part.task.label, batch, everything)]
        per_set = [self._set_tokens(label) for label in sets]
        total, done = sum(per_set) + sum(part.tokens for part in tasks), 0
        self.metrics, self.tokens = {}, total
        for label, tokens in zip(sets, per_set, strict=True):
            self._validate(label, _reporter(label or "validation", done, total, report))
            done += tokens
        scores: list[TaskScore] = []
        for part in tasks:
            most = done + part.tokens
            score = self._score(part, batch, _counter(part.name, done, most, total, report))
            scores += [score] if score is not None else []
            done = most
        for score in scores:
            self.metrics |= score.named_metrics()
        if self.inputs.gauntlet is not None and tasks and len(tasks) == len(self.inputs.tasks):
            self.metrics |= named_composites(composite_scores(self.inputs.gauntlet, scores, lambda line: None))
        return self.metrics

    def tokens_after(self, batch: int) -> int:
        """The tokens of all evaluations that follow a batch."""
        sizes = [(label, self._set_tokens(label)) for label in self.inputs.validation]
        sizes += [(part.task.label, part.tokens) for part in self.inputs.tasks]
        return sum(tokens * self.clock.events_after(self._interval(label), batch) for label, tokens in sizes)

    def _interval(self, label: str) -> Duration:
        return self.config.eval.intervals.get(label, self.config.eval_interval)

    def _is_due(self, label: str, batch: int, everything: bool) -> bool:
        every = self.clock.interval(self._interval(label))
        return everything or bool(every and batch % every == 0)

    def _validate(self, label: str, progress: Callable[[int], None]) -> None:
        config, length = self.config, self.config.max_seq_len
        found = evaluate(
            config, self.executor, config.sources.eval_sources[label], self.inputs.validation[label], self.tokenizer,
            lambda samples, total: progress(samples * length),
        )  # fmt: skip
        self.metrics |= found.metrics(label)
        if label == next(iter(self.inputs.validation)):
            self.last = found

    def _score(self, part: PreparedTask, batch: int, progress: Callable[[int], None]) -> TaskScore | None:
        """None if it fails. Where other ranks may wait in a collective, only errors that all ranks meet can pass."""
        assert self.tokenizer is not None
        catchable: type[Exception] = Exception if self.executor.layout.size == 1 else IngotError
        tokens = (self.config.device_eval_batch_size or self.executor.microbatch) * self.config.max_seq_len
        scorer = RankScorer(self.executor, self.config.model, self.config.precision, tokens)
        try:
            return score_task(part, scorer, self.tokenizer, progress)
        except catchable as error:
            if batch == 0:
                raise
            self._record(part.name, f"{type(error).__name__}: {error}".partition("\n")[0], batch)
            return None

    def _record(self, name: str, reason: str, batch: int) -> None:
        """Warn that a task is left out, and keep the reason in the run folder."""
        self.messages.warn(f"evaluation without {name}: {reason}")
        if self.executor.rank_env.rank == 0:
            folder = Path(self.config.run_folder) / FOLDER
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / FAILED).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"batch": batch, "task": name, "reason": reason}) + "\n")
            except OSError as error:
                self.messages.warn(f"cannot write {folder / FAILED}: {error.strerror}")

    def _set_tokens(self, label: str) -> int:
        samples = self.inputs.validation[label].samples
        most = self.config.eval_samples
        return (samples if most is None else min(samples, most)) * self.config.max_seq_len


def _reporter(name: str, start: int, total: int, report: Progress) -> Callable[[int], None]:
    return lambda done: report(name, start + done, total)


def _counter(name: str, start: int, most: int, total: int, report: Progress) -> Callable[[int], None]:
    """Adds up the tokens of a task's passes, whose padding may make them more than expected."""
    done = start

    def advance(tokens: int) -> None:
        nonlocal done
        done = min(done + tokens, most)
        report(name, done, total)

    return advance


def _leave_out(found: EvalInputs, name: str, error: Exception, has_trained: bool) -> None:
    if not has_trained:
        raise error
    found.failed[name] = str(error)


def _check_intervals(config: RunConfig, tasks: Sequence[TaskConfig]) -> None:
    labels = [*filter(None, config.sources.eval_sources), *(task.label for task in tasks)]
    if unknown := next((label for label in config.eval.intervals if label not in labels), None):
        raise ConfigError(f"eval.intervals.{unknown}: is neither a task nor a validation set: {', '.join(labels)}")
