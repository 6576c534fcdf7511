"""`ingot eval --core`: a finished model on the tasks of CORE."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ingot.checkpoint.hf.transfer import tokenizer_of
from ingot.checkpoint.load import load_model
from ingot.data.tokenizer import Tokenizer
from ingot.evaluation.core.bundle import CoreTask, load_bundle
from ingot.evaluation.core.prompts import core_questions, shuffled
from ingot.evaluation.tasks.metrics import standard_error
from ingot.evaluation.tasks.offline import open_report, pick_device
from ingot.evaluation.tasks.prompts import Question
from ingot.evaluation.tasks.records import read_records
from ingot.evaluation.tasks.run import PreparedTask, prepare_task, score_task
from ingot.evaluation.tasks.scoring import RowScore, Scorer
from ingot.version import __version__

Prompts = Literal["nanochat", "dclm"]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CoreScore:
    """The result of a task."""

    label: str
    shots: int
    accuracy: float
    baseline: float
    questions: int
    cut_rows: int
    seconds: float
    judged: list[dict[str, Any]]

    @property
    def centered(self) -> float:
        """0 for a random guess, 1 for all questions right."""
        return (self.accuracy - self.baseline) / (1.0 - self.baseline)


@dataclass
class CoreReport:
    """The scores of one model."""

    path: Path
    step: int | None  # of the checkpoint; None for a Hugging Face folder
    run: Path | None
    prompts: Prompts
    limit: int | None
    scores: list[CoreScore] = field(default_factory=list)

    @property
    def core(self) -> float:
        """CORE: the plain mean of the centered accuracies."""
        return sum(score.centered for score in self.scores) / len(self.scores)

    def metrics(self) -> dict[str, float]:
        """Accuracies, and the two under nanochat's names."""
        found = {f"metrics/{score.label}/{score.shots}-shot/Accuracy": score.accuracy for score in self.scores}
        found |= {f"centered_results/{score.label}": score.centered for score in self.scores}
        return found | {"core_metric": self.core}

    def to_json(self, with_questions: bool = False) -> dict[str, Any]:
        """What is written to RUN/evaluations/STEP-core.json."""
        names = ("label", "shots", "accuracy", "baseline", "centered", "questions", "cut_rows", "seconds")
        tasks = [
            {name: getattr(score, name) for name in names} | ({"judged": score.judged} if with_questions else {})
            for score in self.scores
        ]
        versions = {"ingot": __version__, "torch": torch.__version__}
        about = {"model": str(self.path), "step": self.step, "prompts": self.prompts, "limit": self.limit}
        return about | {"metrics": self.metrics(), "tasks": tasks, "versions": versions}

    def tables(self) -> Iterator[str]:
        """For a terminal of 80 columns."""
        yield f"\n{self.path}{'' if self.step is None else f', step {self.step}'}"
        yield f"\n{'task':32} {'accuracy':>8} {'+-':>6} {'baseline':>8} {'centered':>8} {'questions':>9} {'cut':>4}"
        for score in self.scores:
            error = standard_error(score.accuracy, score.questions)
            name = f"{score.label}/{score.shots}-shot"
            row = f"{name[:32]:32} {score.accuracy:>8.4f} {error:>6.4f} {score.baseline:>8.3f} {score.centered:>8.4f}"
            yield f"{row} {score.questions:>9,} {score.cut_rows:>4}"
        yield f"\nCORE ({self.prompts} prompts, {len(self.scores)} tasks): {self.core:.4f}"


def score_core(
    path: Path, folder: Path, prompts: Prompts, limit: int | None, device: str, say: Callable[[str], None],
    progress: Progress = lambda what, done, total: None,
) -> CoreReport:  # fmt: skip
    """Load a model and score it on a bundle; of each task only the first `limit` records."""
    tasks = load_bundle(folder)
    opened = open_report(path)
    report = CoreReport(opened.path, opened.step, opened.run, prompts, limit)
    on, precision = pick_device(device)
    tokenizer, model = tokenizer_of(path), load_model(opened.path, on)
    scorer = Scorer(model, on, precision)
    counts = [min(len(read_records(task.config).records), limit or 1 << 62) for task in tasks]  # all files are checked
    work = [count * (task.shots + 1) for task, count in zip(tasks, counts, strict=True)]
    for number, task in enumerate(tasks):  # prompts of one task at a time: with ten examples they are large
        parts = (_prepare_nanochat if prompts == "nanochat" else _prepare_dclm)(
            task, tokenizer, model.config.context, limit
        )
        for line in filter(None, (part.describe_cut() for part in parts)):
            say(line)
        tokens, done = sum(part.tokens for part in parts), 0

        def advance(more: int, at: int = number, most: int = tokens, label: str = task.config.label) -> None:
            nonlocal done
            done = min(done + more, most)
            progress(label, sum(work[:at]) + work[at] * done // most, sum(work))

        score = _score_nanochat if prompts == "nanochat" else _score_dclm
        report.scores.append(score(task, parts, scorer, tokenizer, advance))
    return report


def _prepare_nanochat(task: CoreTask, tokenizer: Tokenizer, row_length: int, limit: int | None) -> list[PreparedTask]:
    config = task.config.model_copy(update={"strip_dataset": False})
    file = read_records(config)
    questions = core_questions(config, task.shots, shuffled(file.records, limit), tokenizer, row_length)
    return [PreparedTask(config, task.shots, "", questions, file.sha256)]


def _prepare_dclm(task: CoreTask, tokenizer: Tokenizer, row_length: int, limit: int | None) -> list[PreparedTask]:
    return prepare_task(task.config, tokenizer, row_length, row_length, lambda config, rows: limit)


def _score_nanochat(
    task: CoreTask, parts: Sequence[PreparedTask], scorer: Scorer, tokenizer: Tokenizer, advance: Callable[[int], None]
) -> CoreScore:
    started = time.monotonic()
    (part,) = parts
    found = scorer.score([question.rows for question in part.questions], advance)
    predictions = [_predict(task, question, scores) for question, scores in zip(part.questions, found, strict=True)]
    judged = [
        {
            "where": q.record.where,
            "prompt": q.prompt,
            "prediction": p,
            "gold": q.record.gold,
            "right": p == q.record.gold,
        }
        for q, p in zip(part.questions, predictions, strict=True)
    ]
    accuracy = sum(p == q.record.gold for q, p in zip(part.questions, predictions, strict=True)) / len(judged)
    seconds = round(time.monotonic() - started, 2)
    return CoreScore(
        task.config.label, task.shots, accuracy, task.baseline, len(judged), part.cut_rows, seconds, judged
    )  # fmt: skip


def _predict(task: CoreTask, question: Question, scores: Sequence[RowScore]) -> int:
    """The choice with the lowest mean loss; for language modeling 0, the gold of such records, if all is predicted.

    A choice that is the beginning of another one has no token of its own. Its mean is not a number, which nanochat's
    comparison takes for the lowest only where it comes first.
    """
    if task.config.icl_task_type == "language_modeling":
        return question.record.gold if scores[0].is_greedy else -1
    losses = [float(np.float32(-score.mean_log_prob)) if score.log_probs else math.nan for score in scores]
    return losses.index(min(losses))


def _score_dclm(
    task: CoreTask, parts: Sequence[PreparedTask], scorer: Scorer, tokenizer: Tokenizer, advance: Callable[[int], None]
) -> CoreScore:
    """LLM Foundry's prompts and metrics, as DCLM's evaluation uses them; categories count alike."""
    scores = [score_task(part, scorer, tokenizer, advance) for part in parts]
    return CoreScore(
        task.config.label, task.shots, sum(score.accuracy for score in scores) / len(scores), task.baseline,
        sum(score.questions for score in scores), sum(score.cut_rows for score in scores),
        round(sum(score.seconds for score in scores), 2), [one for score in scores for one in score.judged],
    )  # fmt: skip
