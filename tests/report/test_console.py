"""What ranks print and log."""

import re
from pathlib import Path

import pytest

from ingot.report.console import Console

ROW = {"loss/train/total": 2.5, "lr-AdamW/group0": 0.1, "l2_norm/grad/global": 1.0, "throughput/tokens_per_sec": 1e3,
       "throughput/device/mfu": 0.5, "throughput/device/mfu_causal": 0.4, "time/remaining_estimate": 0.5}  # fmt: skip


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "run" / "logs"


def lines(path: Path) -> list[str]:
    return [line.split(" ", 1)[1] for line in path.read_text().splitlines()]


def test_notes_from_before_the_run_folder_exists_reach_the_log_of_a_rank(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(str(logs.parent), 1)
    console.note("early")
    console.warn("early too")
    assert not logs.exists()
    logs.mkdir(parents=True)  # rank 0 makes it
    console.begin(0, 10, None)
    console.note("late")
    console.row(ROW, 10)  # rank 0 logs the metrics
    console.end()
    assert lines(logs / "rank-1.log") == ["early", "warning: early too", "late"]
    assert capsys.readouterr().out == ""


def test_rank_0_prints_and_logs_notes_and_rows(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(str(logs.parent))
    logs.mkdir(parents=True)
    console.note("a decision")
    console.begin(0, 10, None)
    console.row(ROW | {"metrics/eval/LanguageCrossEntropy": 2.0, "metrics/eval/LanguagePerplexity": 7.39}, 5)
    console.row(ROW, 6)  # within a second of the last line: only logged
    console.row(ROW, 10)
    console.end()
    figures = "loss 2.5000 | grad 1 | lr 1.00e-01 | 1,000 tok/s | MFU 50.0% (causal 40.0%) | ETA 0:30:00"
    evaluated = f"[batch=5/10] {figures} | eval loss 2.0000, perplexity 7.39"
    logged = ["a decision", evaluated, f"[batch=6/10] {figures}", f"[batch=10/10] {figures}"]
    assert lines(logs / "train.log") == logged
    assert capsys.readouterr().out.splitlines() == [line for line in logged if "6/10" not in line]


@pytest.mark.parametrize(("columns", "all_figures"), [("80", False), ("160", True)])
def test_the_live_line_shows_batch_bar_loss_speed_and_eta(
    columns: str, all_figures: bool, logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the output for a terminal
    monkeypatch.setenv("COLUMNS", columns)
    logs.mkdir(parents=True)
    console = Console(str(logs.parent))
    console.begin(0, 143000, None)
    console.row(ROW | {"throughput/tokens_per_sec": 12_345_678.0, "time/remaining_estimate": 200.5}, 123456)
    console.end()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    line = next(line for line in re.split(r"[\r\n]+", plain) if "123456" in line)
    for part in ("batch 123456/143000", "━━", "loss 2.5000 | ", "12,345,678 tok/s", "ETA 8 days, 8:30:00"):
        assert part in line, line
    assert len(line.rstrip()) <= int(columns) and "…" not in line and ("MFU" in line) == all_figures
