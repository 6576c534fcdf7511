"""Tasks, a model and its tokenizer to scores."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ingot.config.evaluation import TaskConfig
from ingot.data.tokenizer import Tokenizer
from ingot.errors import ConfigError
from ingot.evaluation.tasks.answering import generate_answers, is_right
from ingot.evaluation.tasks.metrics import Judgment, judge_choice, judge_continuation, standard_error, summarize
from ingot.evaluation.tasks.prompts import Question, build_questions
from ingot.evaluation.tasks.records import RecordFile, by_category, read_records
from ingot.evaluation.tasks.scoring import Scorer
from ingot.model.gpt import GPT


@dataclass
class PreparedTask:
    """One category of a task with one number of examples: everything but the model's part."""

    task: TaskConfig
    shots: int
    category: str
    questions: list[Question]
    sha256: str

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.task.label, f"{self.shots}-shot", self.category)))

    @property
    def tokens(self) -> int:
        """About the work: tokens of all rows."""
        return sum(len(row.context) + len(row.continuation) for q in self.questions for row in q.rows)


@dataclass
class TaskScore:
    """The result of a prepared task."""

    label: str
    shots: int
    category: str
    metrics: dict[str, float]
    questions: int
    cut_rows: int  # rows whose prompt lost its beginning
    seconds: float
    sha256: str
    settings: dict[str, Any]  # of the prompts
    judged: list[dict[str, Any]] = field(default_factory=list)  # prompt, prediction and score of each question

    @property
    def accuracy(self) -> float:
        return next(value for name, value in self.metrics.items() if "Accuracy" in name)

    @property
    def standard_error(self) -> float:
        return standard_error(self.accuracy, self.questions)

    def named_metrics(self) -> dict[str, float]:
        """The metrics under the names of LLM Foundry's dashboards."""
        parts = ("metrics", self.label, f"{self.shots}-shot", self.category)
        return {"/".join((*filter(None, parts), name)): value for name, value in self.metrics.items()}


def prepare_tasks(
    tasks: Sequence[TaskConfig], tokenizer: Tokenizer, row_length: int, longest: int | None, limit: int | None = None
) -> list[PreparedTask]:
    """Read and tokenize every task, so that whatever is wrong with a file is found before the model runs.

    row_length: tokens of a row where a task does not say; longest: the most that the model's positions allow; limit:
    only the first questions of each task, whose examples are drawn from the whole file all the same.
    """
    seen: set[str] = set()
    prepared = []
    for task in tasks:
        if task.label in seen:
            raise ConfigError(f"two tasks are called {task.label}; labels name metrics, so give each its own")
        seen.add(task.label)
        generates = task.icl_task_type == "generation_task_with_answers"
        length = (None if generates else task.padding_size) or task.max_seq_len or row_length
        if longest is not None and length > longest:
            raise ConfigError(
                f"task {task.label}: max_seq_len={length}, but the positions of this model end at {longest}"
            )
        file = read_records(task)
        prepared += list(_categories(task, file, tokenizer, length, limit))
    return prepared


def _categories(
    task: TaskConfig, file: RecordFile, tokenizer: Tokenizer, length: int, limit: int | None
) -> Iterator[PreparedTask]:
    for category, records in by_category(file.records, task):
        for shots in task.num_fewshot:
            questions = build_questions(task, shots, records, tokenizer, length)
            yield PreparedTask(task, shots, category, questions[:limit], file.sha256)


def score_task(
    prepared: PreparedTask, model: GPT, tokenizer: Tokenizer, device: torch.device, precision: str,
    progress: Callable[[int], None] = lambda tokens: None,
) -> TaskScore:  # fmt: skip
    """Run a prepared task."""
    started = time.monotonic()
    task, questions = prepared.task, prepared.questions
    scorer = Scorer(model, device, precision)
    if task.icl_task_type == "generation_task_with_answers":
        stops = task.early_stopping_criteria
        outputs = generate_answers(model, questions, tokenizer, stops, precision, scorer.batch_tokens, progress)
        judgments = [
            Judgment(is_right(task, output, (q.record.answer, *q.record.aliases)), prediction=output)
            for q, output in zip(questions, outputs, strict=True)
        ]
    else:
        judge = judge_continuation if task.icl_task_type == "language_modeling" else judge_choice
        scores = scorer.score([question.rows for question in questions], progress)
        judgments = [judge(q, found) for q, found in zip(questions, scores, strict=True)]
    metrics = summarize(task.icl_task_type, judgments)
    if wanted := [name.lower() for name in task.metric_names]:
        kept = {name: value for name, value in metrics.items() if any(w in name.lower() for w in wanted)}
        if not kept:
            raise ConfigError(
                f"task {task.label}: no metric is called {task.metric_names[0]}; there are {', '.join(metrics)}"
            )
        metrics = kept
    return TaskScore(
        task.label, prepared.shots, prepared.category, metrics, len(questions),
        sum(row.is_cut for q in questions for row in q.rows), time.monotonic() - started, prepared.sha256,
        task.model_dump(mode="json", exclude_defaults=True, exclude={"label"}),
        [_judged(q, j) for q, j in zip(questions, judgments, strict=True)],
    )  # fmt: skip


def _judged(question: Question, judgment: Judgment) -> dict[str, Any]:
    return {
        "where": question.record.where, "prompt": question.prompt, "prediction": judgment.prediction,
        "answer": question.record.answer, "right": judgment.is_right, "gold_bits_per_byte": judgment.gold_bits,
        "gold_probability": judgment.gold_probability,
    }  # fmt: skip
