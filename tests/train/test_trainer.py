"""What the training loop leaves behind."""

import threading

import pytest

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.training import testing
from ingot.training.listener import RunListener
from ingot.training.trainer import train


def test_a_step_that_fails_leaves_no_thread_of_the_loader(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(trainer: object, batch: object, step: object) -> None:
        assert any(thread.name == "ingot-loader" for thread in threading.enumerate())
        raise RuntimeError("a failing step")

    monkeypatch.setattr(testing, "_wrapper", fail)
    with pytest.raises(RuntimeError, match="a failing step") as failure:
        train(load_config(RunConfig, tiny), RunListener())
    assert failure.tb is not None  # which holds the loop's frame, and so the iterator
    assert not any(thread.name == "ingot-loader" for thread in threading.enumerate())
