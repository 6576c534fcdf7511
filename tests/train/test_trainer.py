"""The training loop when a step goes wrong, and what it leaves behind."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import NumericError
from ingot.training import testing
from ingot.training.guards import CorruptReplica
from ingot.training.listener import RunListener
from ingot.training.trainer import Trainer, train


def test_a_step_that_fails_leaves_no_thread_of_the_loader(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(trainer: object, batch: object, step: object) -> None:
        assert any(thread.name == "ingot-loader" for thread in threading.enumerate())
        raise RuntimeError("a failing step")

    monkeypatch.setattr(testing, "_wrapper", fail)
    with pytest.raises(RuntimeError, match="a failing step") as failure:
        train(load_config(RunConfig, tiny), RunListener())
    assert failure.tb is not None  # which holds the loop's frame, and so the iterator
    assert not any(thread.name == "ingot-loader" for thread in threading.enumerate())


def strike(batch_number: int) -> Callable[..., Any]:
    """A wrapper of steps that makes a gradient NaN, the first time that the batch is trained on."""
    left = [1]

    def wrapper(trainer: Trainer, batch: Any, step: Callable[[Any], Any]) -> Any:
        executor = cast(Any, trainer.executor)
        if trainer.progress.batch == batch_number and left and left.pop():
            plain = executor.accumulate

            def accumulate(*arguments: Any) -> Any:
                executor.accumulate = plain
                loss = plain(*arguments)
                executor.parameters[0].tensor.grad.fill_(float("nan"))
                return loss

            executor.accumulate = accumulate
        return step(batch)

    return wrapper


def test_a_rollback_goes_on_from_the_last_checkpoint_without_the_bad_batch(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "_wrapper", strike(6))
    more = ["guards.non_finite=rollback", "save_interval=4ba", "max_duration=8ba"]
    result = train(load_config(RunConfig, [*tiny, *more]), RunListener())
    (line,) = (json.loads(line) for line in (tmp_path / "run" / "guards.jsonl").read_text().splitlines())
    assert (line["batch"], line["action"]) == (6, "back to batch 4, to skip it from there on")
    assert result.batches == 8 and result.loss is not None and math.isfinite(result.loss)


def test_a_rollback_before_the_first_checkpoint_ends_the_run(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_wrapper", strike(2))
    with pytest.raises(NumericError, match="at batch 2 and there is no checkpoint yet to go back to"):
        train(load_config(RunConfig, [*tiny, "guards.non_finite=rollback"]), RunListener())


def test_replicas_are_compared_at_the_interval_and_a_difference_ends_the_run(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That real replicas are compared is in tests/faults."""

    def wrapper(trainer: Trainer, batch: Any, step: Callable[[Any], Any]) -> Any:
        cast(Any, trainer.executor).differing_replicas = lambda: ([1], "wte.weight")
        return step(batch)

    monkeypatch.setattr(testing, "_wrapper", wrapper)
    assert train(load_config(RunConfig, [*tiny, "max_duration=4ba"]), RunListener()).batches == 4
    with pytest.raises(CorruptReplica, match="after batch 3, weights differ from their replicas on rank 1"):
        train(
            load_config(RunConfig, [*tiny, f"save_folder={tmp_path}/again", "guards.checksum_interval=3ba"]),
            RunListener(),
        )
