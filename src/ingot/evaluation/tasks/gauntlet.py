"""Composite scores of several tasks: LLM Foundry's gauntlet."""

import math
from collections.abc import Callable, Sequence

from ingot.config.error_messages import Origins
from ingot.config.evaluation import CategoryConfig, GauntletConfig, TaskConfig
from ingot.errors import ConfigError
from ingot.evaluation.tasks.run import TaskScore


def named_composites(composites: dict[str, float]) -> dict[str, float]:
    """Composite scores under the names of LLM Foundry's dashboards."""
    return {f"icl/metrics/eval_gauntlet/{name}": value for name, value in composites.items()}


def check_gauntlet(
    gauntlet: GauntletConfig, origins: Origins, tasks: Sequence[TaskConfig], warn: Callable[[str], None]
) -> None:
    """Refuse a gauntlet none of whose categories can be scored by the tasks, and warn of each that cannot."""
    known = {(task.label, shots) for task in tasks for shots in task.num_fewshot}
    problems = []
    for number, category in enumerate(gauntlet.categories):
        for index, benchmark in enumerate(category.benchmarks):
            if (benchmark.name, benchmark.num_fewshot) in known:
                continue
            where = origins.of(f"categories.{number}.benchmarks.{index}.name") or "eval.gauntlet"
            others = sorted(f"{shots}-shot" for label, shots in known if label == benchmark.name)
            what = f"with {', '.join(others)} only" if others else "not"
            problems.append(
                f"{where}: {benchmark.name} ({benchmark.num_fewshot}-shot) is {what} among the tasks, so there is no "
                f"score of {category.name}"
            )
            break
    if len(problems) == len(gauntlet.categories):
        raise ConfigError(f"{problems[0]}, nor of any other category" if problems else "the gauntlet has no categories")
    for problem in problems:
        warn(problem)


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
