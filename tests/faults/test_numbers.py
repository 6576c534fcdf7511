"""Numbers that go wrong (F31, F32): every rank decides alike, by policy, and the samples are written down."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import BATCHES, Run, assert_as_if_nothing_happened, consumed, ranks, weights, whole

from ingot.config.training import GuardsConfig
from ingot.errors import NumericError
from ingot.report.metrics_file import read_rows
from ingot.training.guards import Action, Anomaly, Guard

__all__ = ["ranks", "whole"]


def guards(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.folder / "guards.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_nan_gradient_stops_the_run_and_its_last_checkpoint_is_good(data: Path, whole: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", kind="nan", rank=1, batch=10)
    assert "the gradient norm is nan at batch 10" in run.run(code=2)
    Run(data, run.folder).run()
    assert_as_if_nothing_happened(run.folder, whole)


@pytest.mark.parametrize(
    "policy",
    [
        "skip",
        *(pytest.param(policy, marks=pytest.mark.slow, id=f"{policy}, three ranks") for policy in ("skip", "rollback")),
    ],
)
def test_a_bad_batch_is_skipped_by_all_ranks_and_recorded(data: Path, whole: Path, tmp_path: Path, policy: str) -> None:
    run = Run(data, tmp_path / "run", f"guards.non_finite={policy}", kind="nan", rank=1, batch=10)
    run.run()
    (line,) = guards(run)
    expected = consumed(whole)
    assert line["batch"] == 10 and line["samples"] == expected.pop(10)
    assert consumed(run.folder) == expected
    rows = [row["time/batch"] for row in read_rows(run.folder)]
    assert rows == [n for n in range(1, BATCHES + 1) if policy == "skip" or n != 10]
    assert all(w.isfinite().all() for w in weights(run.folder).values())


@pytest.mark.slow
def test_skipping_and_rolling_back_end_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    ends = []
    for policy in ("skip", "rollback"):
        run = Run(data, tmp_path / policy, f"guards.non_finite={policy}", kind="nan", rank=1, batch=10)
        run.run()
        ends.append(weights(run.folder))
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])


@pytest.mark.slow
def test_a_batch_of_noise_is_a_loss_spike_and_is_skipped(data: Path, tmp_path: Path) -> None:
    common = ["guards.spike=skip", "guards.spike_window=8", "guards.spike_threshold=4"]
    run = Run(data, tmp_path / "run", *common, kind="noise", rank=1, batch=20)
    run.run()
    (line,) = guards(run)
    assert line["batch"] == 20 and "robust deviations above" in line["what"]
    assert 20 not in consumed(run.folder)


@pytest.mark.slow
def test_too_many_bad_batches_stop_the_run(data: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", "guards.non_finite=skip", "guards.max_skips=0", kind="nan", rank=0, batch=5)
    assert "guards.max_skips=0 batches were skipped already" in run.run(code=2)


@pytest.mark.slow
def test_a_flipped_bit_in_one_replica_is_found_and_the_rank_named(data: Path, tmp_path: Path) -> None:
    replicas = ["parallel.replicate=3", "parallel.shard=1", "guards.checksum_interval=3ba"]
    calm = Run(data, tmp_path / "calm", *replicas)
    calm.run()
    run = Run(data, tmp_path / "run", *replicas, kind="flip", rank=1, batch=10)
    assert "after batch 12, weights differ from their replicas on rank 1 (first: " in run.run()
    assert_as_if_nothing_happened(run.folder, calm.folder)


def jump_after(losses: list[float], jump: float, **guards: object) -> Anomaly | None:
    executor: Any = SimpleNamespace(sum_loss=lambda share: share)
    guard = Guard(GuardsConfig.model_validate({"spike": "skip", **guards}), executor, scaled=False)
    for batch, loss in enumerate(losses, 1):
        assert guard.accept(batch, torch.tensor(loss), torch.tensor(1.0)) and guard.find_anomaly(wait=True) is None
    accepted = guard.accept(len(losses) + 1, torch.tensor(jump), torch.tensor(1.0))
    anomaly = guard.find_anomaly(wait=False)
    assert accepted == (anomaly is None)
    return anomaly


def test_an_anomaly_is_handled_once_and_by_its_policy() -> None:
    guard = Guard(GuardsConfig(max_skips=1), SimpleNamespace(), scaled=False)  # type: ignore[arg-type]
    skipped: set[int] = set()
    assert guard.handle(Anomaly(3, "the loss is nan", "skip"), skipped) is Action.SKIP and skipped == {3}
    with pytest.raises(NumericError, match="max_skips=1 batches were skipped already"):
        guard.handle(Anomaly(7, "the loss is nan", "rollback"), skipped)
    with pytest.raises(NumericError, match="the loss is nan at batch 8; lower"):
        guard.handle(Anomaly(8, "the loss is nan", "stop"), skipped)
    assert not guard.accept(9, torch.tensor(float("nan")), torch.tensor(1.0))
    assert guard.find_anomaly(wait=True) == Anomaly(9, "the loss is nan", "stop")
    assert guard.find_anomaly(wait=True) is None


@pytest.mark.parametrize(("window", "needed"), [(40, 10), (8, 8)])
def test_the_spike_guard_wakes_after_a_quarter_of_its_window_and_at_least_eight_losses(
    window: int, needed: int
) -> None:
    assert jump_after([2.0] * (needed - 1), 100.0, spike_window=window) is None
    assert jump_after([2.0] * needed, 100.0, spike_window=window) == Anomaly(
        needed + 1, "the loss jumped to 100.0000, 49000.0 robust deviations above 2.0000,", "skip"
    )


@pytest.mark.parametrize(("score", "found"), [(4.99, False), (5.01, True)])
def test_a_spike_is_a_loss_beyond_the_threshold_in_robust_deviations(score: float, found: bool) -> None:
    losses = [2.0, 4.0] * 5  # median 3; each is 1 away from it, which is 1.4826 robust deviations of a normal variable
    assert bool(jump_after(losses, 3 + 1.4826 * score, spike_threshold=5, spike_window=40)) == found
