"""Dropout masks belong to samples and steps, not to ranks or to what ran before."""

from pathlib import Path

import pytest
from conftest import TINY
from harness import losses, train_all, train_here

DROPOUT = [*TINY, "max_duration=4ba", "device_train_microbatch_size=2", "model.resid_pdrop=0.3", "model.emb_pdrop=0.3",
           "data.eval=null"]  # fmt: skip


def test_two_ranks_draw_the_same_masks_as_one_process(data: Path, tmp_path: Path) -> None:
    arguments = [*DROPOUT, f"data={data}"]
    train_here([*arguments, f"save_folder={tmp_path / 'one'}"])
    train_here([*arguments, "model.resid_pdrop=0", "model.emb_pdrop=0", f"save_folder={tmp_path / 'none'}"])
    assert train_all([[*arguments, f"save_folder={tmp_path / 'two'}"]], 2, tmp_path / "notes") == [""]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert losses(tmp_path / "one") != pytest.approx(losses(tmp_path / "none"), rel=1e-3)
