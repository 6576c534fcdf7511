"""How long a run will take is said once it can be known."""

import json
from pathlib import Path

import pytest

from ingot.api import train
from ingot.config.load import load_config
from ingot.config.run import RunConfig


@pytest.mark.parametrize("compiled", [False, True])
def test_a_row_whose_time_was_the_compilers_estimates_nothing(
    compiled: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "ingot.parallel.executors.single.compile_model", lambda root: None
    )  # the estimate is tested, not the compiler
    small = ["model.d_model=16", "model.n_heads=2", "model.n_layers=1", "model.vocab_size=320", "max_seq_len=16",
             "global_train_batch_size=4", "max_duration=6ba", "log_interval=2ba", "save_interval=0ba"]  # fmt: skip
    run = tmp_path / "run"
    train(load_config(RunConfig, [*small, f"compile={compiled}", f"data={data}", f"save_folder={run}"]))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["time/batch"] for row in rows if "time/remaining_estimate" in row] == [2, 4, 6][compiled:]
    assert ("[batch=2/6]" in (said := capsys.readouterr().out)) and ("ETA ?" in said) == compiled


def test_the_time_of_a_row_is_divided_among_what_it_was_spent_on(tiny: list[str], tmp_path: Path) -> None:
    train(load_config(RunConfig, [*tiny, "log_interval=3ba", "save_interval=3ba", "eval_interval=6ba"]))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        shares = {name: row[f"time/{name}"] for name in ("data", "checkpoint", "evaluation", "compute")}
        assert all(0 <= share <= 1 for share in shares.values()) and sum(shares.values()) == pytest.approx(1), shares
        # what follows a row counts in the next one
        assert (shares["checkpoint"] > 0) == (row["time/batch"] > 3)
        assert (shares["evaluation"] > 0) == (row["time/batch"] == 9)
