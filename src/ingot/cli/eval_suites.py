"""`ingot eval --harness` and `ingot eval --core`: suites of tasks with rules of their own."""

import json
from collections.abc import Sequence
from pathlib import Path

from ingot.cli.eval_tasks import progress_bar, say_where
from ingot.config.evaluation import EvalOptions


def evaluate_with_harness(paths: Sequence[Path], given: EvalOptions, as_json: bool) -> None:
    """Score models on tasks of lm-evaluation-harness."""
    from ingot.evaluation.lm_eval.run import HarnessRequest, score_with_harness
    from ingot.evaluation.tasks.offline import write_scores

    request = HarnessRequest(given.harness, given.include_path, given.num_fewshot, given.limit, given.questions)
    reports = []
    for path in paths:
        report = score_with_harness(path, request, given.device)
        reports.append(report)
        if not as_json:
            print("\n".join(report.tables()))
        say_where(write_scores(report.to_json(), report.run, f"{report.step}-harness.json", given.out))
    if as_json:
        print(json.dumps([report.to_json() for report in reports]))


def evaluate_core(paths: Sequence[Path], given: EvalOptions, as_json: bool) -> None:
    """Compute CORE of models."""
    from ingot.evaluation.core.run import score_core
    from ingot.evaluation.tasks.offline import write_scores

    assert given.core is not None
    reports = []
    with progress_bar() as (say, progress):
        for path in paths:
            report = score_core(path, given.core, given.core_prompts, given.limit, given.device, say, progress)
            reports.append(report)
            say_where(write_scores(report.to_json(given.questions), report.run, f"{report.step}-core.json", given.out))
    if as_json:
        print(json.dumps([report.to_json(given.questions) for report in reports]))
        return
    for report in reports:
        print("\n".join(report.tables()))
    if len(reports) > 1:
        print(f"\n{'model':48} {'CORE':>8}")
        print("\n".join(f"{str(report.path)[-48:]:48} {report.core:>8.4f}" for report in reports))
