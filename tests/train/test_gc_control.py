"""The garbage collector runs between steps only."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.training import testing
from ingot.training.runtime.gc_control import COLLECT_EVERY, GcControl


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_cycles_are_collected_after_the_first_and_every_hundredth_step() -> None:
    gone = weakref.ref(Cycle())
    control = GcControl()
    control.after_step()  # the first collects everything
    assert gone() is None and gc.get_freeze_count() > 0
    gone = weakref.ref(Cycle())
    for _ in range(COLLECT_EVERY - 2):
        control.after_step()
    assert gone() is not None
    control.after_step()
    assert gone() is None
    control.close()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_no_step_of_a_run_is_interrupted_by_the_collector(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ingot.api import train
    from ingot.config.load import load_config
    from ingot.config.run import RunConfig

    seen = []
    monkeypatch.setattr(testing, "_wrapper", lambda trainer, batch, step: (seen.append(gc.isenabled()), step(batch))[1])
    small = ["model.d_model=16", "model.n_heads=2", "model.n_layers=1", "model.vocab_size=320", "max_seq_len=16",
             "global_train_batch_size=4", "max_duration=3ba", "scheduler.t_warmup=0ba"]  # fmt: skip
    train(load_config(RunConfig, [*small, f"data={data}", f"save_folder={tmp_path / 'run'}"]))
    assert seen == [False] * 3 and gc.isenabled()
