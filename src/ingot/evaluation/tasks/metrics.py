"""Scores of rows to metrics of a task, with LLM Foundry's formulas under LLM Foundry's names.

Accuracies of small models are noise: choice tasks also report how many bits per byte the right answer costs, which
moves with every change of the model, and the probability of the right choice among the choices.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.config.evaluation import TaskConfig
from ingot.errors import ConfigError
from ingot.evaluation.tasks.prompts import Question
from ingot.evaluation.tasks.scoring import RowScore

PREFIX = "InContextLearning"
LM_ACCURACY = f"{PREFIX}LMAccuracy"
"""Share of questions whose continuation is, token by token, what the model finds most likely."""
CHOICE_ACCURACY = f"{PREFIX}MultipleChoiceAccuracy"
"""Share of questions whose right choice has the lowest perplexity (mean over its tokens)."""
EXACT_MATCH = f"{PREFIX}GenerationExactMatchAccuracy"
"""Share of questions whose generated answer starts with a right answer."""
LM_CALIBRATION = f"{PREFIX}LMExpectedCalibrationError"
"""Expected calibration error of LMAccuracy, over 10 buckets of confidence."""
CHOICE_CALIBRATION = f"{PREFIX}MCExpectedCalibrationError"
"""Expected calibration error of MultipleChoiceAccuracy, over 10 buckets of confidence."""
GOLD_BITS = "GoldBitsPerByte"
"""Bits per byte of the right answer, its leading space included: mean over questions."""
GOLD_PROBABILITY = "GoldProbability"
"""Probability of the right choice among the choices: softmax of their log-likelihoods, mean."""

_OLD_NAMES = {"InContextLearningQAAccuracy": EXACT_MATCH}  # of question_answering, until LLM Foundry v0.8


@dataclass(frozen=True)
class Judgment:
    """One question, judged."""

    is_right: bool
    confidence: float = 0.0  # for the calibration error
    is_confident_right: bool = False  # the same prediction by probabilities, which can differ
    gold_bits: float = 0.0
    gold_probability: float = 0.0
    prediction: str = ""


def judge_continuation(question: Question, scores: Sequence[RowScore]) -> Judgment:
    """language_modeling: every token of the continuation must be the most likely one."""
    score = scores[0]
    return Judgment(
        score.is_greedy, min(score.confidences), score.is_greedy, _bits_per_byte(question, 0, score),
        math.exp(score.log_likelihood), "",
    )  # fmt: skip


def judge_choice(question: Question, scores: Sequence[RowScore]) -> Judgment:
    """multiple_choice and schema: the first of the choices with the lowest perplexity is the prediction."""
    gold = question.record.gold
    # fp32 as LLM Foundry compares them, so that equal choices tie there and here
    perplexities = np.exp(-np.array([s.mean_log_prob for s in scores], np.float32))
    prediction = int(perplexities.argmin())
    means = np.array([np.mean(np.exp(s.log_probs)) for s in scores])
    likelihoods = np.array([s.log_likelihood for s in scores])
    shares = np.exp(likelihoods - likelihoods.max())
    return Judgment(
        prediction == gold, float(means.max() / means.sum()), int(means.argmax()) == gold,
        _bits_per_byte(question, gold, scores[gold]), float(shares[gold] / shares.sum()),
        question.record.choices[prediction],
    )  # fmt: skip


def metrics_of(task_type: str) -> tuple[str, ...]:
    """The metrics of a task type."""
    if task_type == "generation_task_with_answers":
        return (EXACT_MATCH,)
    if task_type == "language_modeling":
        return LM_ACCURACY, LM_CALIBRATION, GOLD_BITS
    return CHOICE_ACCURACY, CHOICE_CALIBRATION, GOLD_BITS, GOLD_PROBABILITY


def select_metrics(task: TaskConfig, names: Iterable[str]) -> list[str]:
    """The metrics that a task asks for, by regular expressions as in LLM Foundry, and our own."""
    patterns = [_OLD_NAMES.get(pattern, pattern) for pattern in task.metric_names]
    kept = []
    for name in names:
        try:
            found = any(re.search(pattern, name, re.IGNORECASE) for pattern in patterns)
        except re.error as error:
            raise ConfigError(f"task {task.label}: metric_names: not a regular expression: {error}") from None
        kept += [name] if found or not patterns or not name.startswith(PREFIX) else []
    if not any(name.startswith(PREFIX) for name in kept):
        raise ConfigError(
            f"task {task.label}: no metric of {task.icl_task_type} is called {task.metric_names[0]}; there are "
            f"{', '.join(metrics_of(task.icl_task_type))}"
        )
    return kept


def summarize(task_type: str, judgments: Sequence[Judgment]) -> dict[str, float]:
    """The metrics of a task."""
    accuracy = _mean(judgments, lambda j: j.is_right)
    if task_type == "generation_task_with_answers":
        return {EXACT_MATCH: accuracy}
    is_choice = task_type != "language_modeling"
    found = {
        CHOICE_ACCURACY if is_choice else LM_ACCURACY: accuracy,
        CHOICE_CALIBRATION if is_choice else LM_CALIBRATION: calibration_error(
            [j.confidence for j in judgments], [j.is_confident_right for j in judgments]
        ),
        GOLD_BITS: _mean(judgments, lambda j: j.gold_bits),
    }
    return found | ({GOLD_PROBABILITY: _mean(judgments, lambda j: j.gold_probability)} if is_choice else {})


def calibration_error(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """Ten equal buckets of confidence, each compared with its midpoint."""
    buckets = np.minimum((np.array(confidences) * 10).astype(int), 9)
    error = 0.0
    for bucket in range(10):
        inside = np.array(right)[buckets == bucket]
        if len(inside):
            error += len(inside) / len(confidences) * abs(inside.mean() - (bucket + 0.5) / 10)
    return float(error)


def standard_error(accuracy: float, count: int) -> float:
    """Of a share of `count` independent questions."""
    return math.sqrt(accuracy * (1 - accuracy) / max(count, 1))


def _bits_per_byte(question: Question, row: int, score: RowScore) -> float:
    return -score.log_likelihood / math.log(2) / len(question.rows[row].text.encode())


def _mean(judgments: Sequence[Judgment], value: Callable[[Judgment], float]) -> float:
    return float(np.mean([value(judgment) for judgment in judgments]))
