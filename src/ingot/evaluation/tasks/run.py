"""Tasks, a model and its tokenizer to scores."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingot.config.evaluation import TaskConfig
from ingot.data.tokenizer import Tokenizer
from ingot.errors import ConfigError
from ingot.evaluation.tasks.answering import is_right
from ingot.evaluation.tasks.metrics import (
    Judgment,
    judge_choice,
    judge_continuation,
    metrics_of,
    select_metrics,
    standard_error,
    summarize,
)
from ingot.evaluation.tasks.prompts import PromptRow, Question, build_questions
from ingot.evaluation.tasks.records import by_category, read_records
from ingot.evaluation.tasks.scoring import RowScore


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

    @property
    def cut_rows(self) -> int:
        return sum(row.is_cut for question in self.questions for row in question.rows)

    def describe_cut(self) -> str:
        """A sentence about prompts that do not fit; empty if all do."""
        rows = sum(len(question.rows) for question in self.questions)
        cut = f"{self.cut_rows:,} of {rows:,} prompts are too long for a row and lose their beginning"
        return f"{self.name}: {cut}" if self.cut_rows else ""


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
    accuracy: float
    sha256: str
    settings: dict[str, Any]  # of the prompts
    judged: list[dict[str, Any]] = field(default_factory=list)  # prompt, prediction and score of each question

    @property
    def standard_error(self) -> float:
        return standard_error(self.accuracy, self.questions)

    def named_metrics(self) -> dict[str, float]:
        """The metrics under the names of LLM Foundry's dashboards."""
        category = f"{self.category}/" if self.category else ""
        return {
            f"metrics/{self.label}/{self.shots}-shot/{category}{name}": value for name, value in self.metrics.items()
        }


class QuestionScorer(Protocol):
    """What runs the model: `Scorer` on one device, `RankScorer` on the ranks of a run."""

    def score(
        self, questions: Sequence[Sequence[PromptRow]], progress: Callable[[int], None]
    ) -> list[list[RowScore]]: ...

    def generate(
        self, questions: Sequence[Question], tokenizer: Tokenizer, stops: Sequence[str],
        progress: Callable[[int], None],
    ) -> list[str]: ...  # fmt: skip


def prepare_tasks(
    tasks: Sequence[TaskConfig], tokenizer: Tokenizer, row_length: int, longest: int | None,
    most: Callable[[TaskConfig, int], int | None] = lambda task, rows: None,
) -> list[PreparedTask]:  # fmt: skip
    """Read and tokenize every task, so that whatever is wrong with a file is found before the model runs.

    row_length: tokens of a row where a task does not say; longest: the most that the model's positions allow; most: how
    many of a task's questions are scored, given how many rows each has.
    """
    check_names(tasks)
    return [part for task in tasks for part in prepare_task(task, tokenizer, row_length, longest, most)]


def check_names(tasks: Sequence[TaskConfig]) -> None:
    """Refuse two tasks whose metrics would have the same names."""
    seen: set[tuple[str, int]] = set()
    for task in tasks:
        for shots in task.num_fewshot:
            if (task.label, shots) in seen:
                raise ConfigError(
                    f"two tasks are called {task.label} ({shots}-shot); labels name metrics, so give each its own"
                )
            seen.add((task.label, shots))


def prepare_task(
    task: TaskConfig, tokenizer: Tokenizer, row_length: int, longest: int | None,
    most: Callable[[TaskConfig, int], int | None],
) -> list[PreparedTask]:  # fmt: skip
    """The parts of one task; see `prepare_tasks`."""
    select_metrics(task, metrics_of(task.icl_task_type))
    generates = task.icl_task_type == "generation_task_with_answers"
    length = (None if generates else task.padding_size) or task.max_seq_len or row_length
    if longest is not None and length > longest:
        raise ConfigError(f"task {task.label}: max_seq_len={length}, but the positions of this model end at {longest}")
    file = read_records(task)
    first = most(task, max(len(file.records[0].choices), 1))
    return [
        PreparedTask(
            task, shots, category, build_questions(task, shots, records, tokenizer, length, first), file.sha256
        )
        for category, records in by_category(file.records, task)
        for shots in task.num_fewshot
    ]


def score_task(
    prepared: PreparedTask, scorer: QuestionScorer, tokenizer: Tokenizer,
    progress: Callable[[int], None] = lambda tokens: None,
) -> TaskScore:  # fmt: skip
    """Run a prepared task."""
    started = time.monotonic()
    task, questions = prepared.task, prepared.questions
    if task.icl_task_type == "generation_task_with_answers":
        outputs = scorer.generate(questions, tokenizer, task.early_stopping_criteria, progress)
        judgments = [
            Judgment(is_right(task, output, (q.record.answer, *q.record.aliases)), prediction=output)
            for q, output in zip(questions, outputs, strict=True)
        ]
    else:
        judge = judge_continuation if task.icl_task_type == "language_modeling" else judge_choice
        scores = scorer.score([question.rows for question in questions], progress)
        judgments = [judge(q, found) for q, found in zip(questions, scores, strict=True)]
    metrics = summarize(task.icl_task_type, judgments)
    kept = select_metrics(task, metrics)
    return TaskScore(
        task.label, prepared.shots, prepared.category, {name: metrics[name] for name in kept}, len(questions),
        prepared.cut_rows, time.monotonic() - started, sum(j.is_right for j in judgments) / len(judgments),
        prepared.sha256, task.model_dump(mode="json", exclude_defaults=True, exclude={"label"}),
        [_judged(q, j) for q, j in zip(questions, judgments, strict=True)],
    )  # fmt: skip


def _judged(question: Question, judgment: Judgment) -> dict[str, Any]:
    return {
        "where": question.record.where, "prompt": question.prompt, "prediction": judgment.prediction,
        "answer": question.record.answer, "right": judgment.is_right, "gold_bits_per_byte": judgment.gold_bits,
        "gold_probability": judgment.gold_probability,
    }  # fmt: skip
