"""Composite scores of several tasks: LLM Foundry's gauntlet."""

import math
from collections.abc import Callable, Sequence

from ingot.config.evaluation import CategoryConfig, GauntletConfig
from ingot.errors import ConfigError
from ingot.evaluation.tasks.run import TaskScore

NAME = "icl/metrics/eval_gauntlet/"


def check_gauntlet(gauntlet: GauntletConfig, labels: Sequence[tuple[str, int]]) -> None:
    """Refuse a gauntlet none of whose categories can be scored by the tasks (label, shots) that will run."""
    missing = [
        f"{b.name} ({b.num_fewshot}-shot)"
        for category in gauntlet.categories
        for b in category.benchmarks
        if (b.name, b.num_fewshot) not in labels
    ]
    if len(missing) == sum(len(category.benchmarks) for category in gauntlet.categories):
        raise ConfigError(f"gauntlet: none of its benchmarks is among the tasks; it names {', '.join(missing[:6])}")


def composite_scores(
    gauntlet: GauntletConfig, scores: Sequence[TaskScore], warn: Callable[[str], None]
) -> dict[str, float]:
    """The score of each category whose benchmarks all have a result, and the averages, by name."""
    found: dict[str, float] = {}
    for category in gauntlet.categories:
        score = _category(gauntlet, category, scores, warn)
        if score is not None:
            found[category.name] = score
    averages = gauntlet.averages or {"default_average": tuple(category.name for category in gauntlet.categories)}
    for name, members in averages.items():
        present = [found[member] for member in members if member in found]
        if len(present) < len(members):
            warn(f"gauntlet: {name} is the mean of {len(present)} of its {len(members)} categories")
        found[name] = sum(present) / len(present) if present else 0.0
    return found


def _category(
    gauntlet: GauntletConfig, category: CategoryConfig, scores: Sequence[TaskScore], warn: Callable[[str], None]
) -> float | None:
    total, weights = 0.0, 0.0
    for benchmark in category.benchmarks:
        own = [s for s in scores if (s.label, s.shots) == (benchmark.name, benchmark.num_fewshot)]
        accuracies = [v for s in own for name, v in s.metrics.items() if "Accuracy" in name]
        if not accuracies:
            warn(
                f"gauntlet: {category.name} is left out: {benchmark.name} ({benchmark.num_fewshot}-shot) has no result"
            )
            return None
        score = sum(accuracies) / len(accuracies)
        if gauntlet.subtract_random_baseline:
            score -= benchmark.random_baseline
            if gauntlet.rescale_accuracy:
                score /= 1 - benchmark.random_baseline
        questions = max(sum(s.questions for s in own), 1)
        weight = {"EQUAL": 1.0, "SAMPLE_SZ": questions, "LOG_SAMPLE_SZ": max(math.log2(questions), 1)}
        total += weight[gauntlet.weighting] * score
        weights += weight[gauntlet.weighting]
    return total / weights if weights else None
