"""The estimated time to the end of a run."""

import json
from pathlib import Path

import pytest
from conftest import TINY

from ingot.api import train
from ingot.config.durations import BatchClock, Duration
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.loading.open_dataset import open_dataset
from ingot.data.prepare.prepare import prepare
from ingot.evaluation.in_run import EvalInputs, RunEvaluation
from ingot.training.runtime.remaining_time import RemainingTime


def clock(total: int) -> BatchClock:
    return BatchClock(8, 32, 1000, Duration(total, "ba"))


def test_one_slow_batch_does_not_move_the_estimate() -> None:
    remaining = RemainingTime(clock(1000), Duration(0, "ba"), lambda batch: 0)
    assert remaining.seconds_after(0) is None
    for seconds in (2.0, 2.0, 60.0, 2.0, 2.0):
        remaining.add_batches(1, seconds)
    assert remaining.seconds_after(100) == pytest.approx(900 * 2.0)


def test_evaluations_and_saves_to_come_are_included() -> None:
    left = {1: 11 * 2560, 100: 2560, 105: 0}  # tokens; 2560 are 10 batches
    remaining = RemainingTime(clock(105), Duration(50, "ba"), left.__getitem__)
    remaining.add_batches(10, 10.0)
    assert remaining.seconds_after(1) == pytest.approx(104 + 11 * 10 / 3)  # 10 batches without a backward pass
    remaining.add_evaluation(2560, 5.0)
    remaining.add_save(2.0)
    assert remaining.seconds_after(1) == pytest.approx(104 + 11 * 5 + 3 * 2)
    assert remaining.seconds_after(100) == pytest.approx(5 + 1 * 5 + 1 * 2)
    assert remaining.seconds_after(105) == 0


def test_an_interval_that_divides_the_run_has_no_extra_event_at_its_end() -> None:
    whole = clock(100)
    assert [whole.events_after(Duration(50, "ba"), batch) for batch in (0, 49, 50, 99, 100)] == [2, 2, 1, 1, 0]
    assert [whole.events_after(Duration(0, "ba"), batch) for batch in (0, 99, 100)] == [1, 1, 0]
    assert [clock(105).events_after(Duration(10, "ba"), batch) for batch in (0, 100, 104, 105)] == [11, 1, 1, 0]


def test_the_tokens_of_evaluations_to_come_are_those_of_the_validation_data(data: Path) -> None:
    config = load_config(RunConfig, [*TINY, f"data={data}", "eval_interval=5ba", "eval_subset_num_batches=1"])
    validation = open_dataset(config.sources.eval, 32)
    inputs = EvalInputs(validation={"": validation})
    evaluation = RunEvaluation(config, clock(12), None, inputs, None, None)  # type: ignore[arg-type]
    assert [evaluation.tokens_after(batch) for batch in (0, 5, 11, 12)] == [3 * 256, 2 * 256, 256, 0]


def test_speed_counts_text_and_not_padding_and_much_padding_is_a_warning(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("The miller sang.\n")
    report = prepare(tmp_path / "short.txt", tmp_path / "short", split="train", tokenizer=data / "tokenizer")
    tokens = report.splits["train"].tokens
    arguments = [*TINY, "max_duration=2ba", "max_seq_len=256", "model.max_seq_len=256",
                 f"data.train.path={tmp_path / 'short'}", "data.train.split=train", f"save_folder={tmp_path / 'run'}"]  # fmt: skip
    train(load_config(RunConfig, arguments))
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    real = row["throughput/samples_per_sec"] * (tokens - 1)
    assert row["throughput/tokens_per_sec"] == pytest.approx(real)
    said = " ".join(capsys.readouterr().out.split())
    share = 1 - (tokens - 1) / 256
    assert f"warning: {share:.1%} of each epoch is padding: the training data has {tokens} tokens" in said
    assert f"a sequence 256; set max_seq_len={tokens - 1}, or train on more text" in said
