"""How long a run will take is said once it can be known."""

import json
from pathlib import Path

import pytest

from ingot.api import train
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.model.gpt import GPT


@pytest.mark.parametrize("compiled", [False, True])
def test_a_row_whose_time_was_the_compilers_estimates_nothing(
    compiled: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GPT, "compiled", lambda self: self)  # the estimate is tested, not the compiler
    small = ["model.d_model=16", "model.n_heads=2", "model.n_layers=1", "model.vocab_size=320", "max_seq_len=16",
             "global_train_batch_size=4", "max_duration=6ba", "log_interval=2ba", "save_interval=0ba"]  # fmt: skip
    run = tmp_path / "run"
    train(load_config(RunConfig, [*small, f"compile={compiled}", f"data={data}", f"save_folder={run}"]))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["time/batch"] for row in rows if "time/remaining_estimate" in row] == [2, 4, 6][compiled:]
    assert ("[batch=2/6]" in (said := capsys.readouterr().out)) and ("ETA ?" in said) == compiled
