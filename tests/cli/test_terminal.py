"""What a run shows in a real terminal, and how it answers Ctrl-C, a pipe that closes, and NO_COLOR."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY
from terminal import COLOR, Terminal
from warm_process import WarmProcess, run_warm

from ingot.checkpoint.manifest import steps_in
from ingot.launch.monitor.status import read_status

ENDLESS = [*TINY, "max_duration=100000ba", "scheduler.name=constant_with_warmup"]
SLOW = [*ENDLESS, "global_train_batch_size=40000"]  # a step takes a minute


def test_the_live_line_fits_80_columns_and_a_finished_run_has_no_utilization(data: Path, tmp_path: Path) -> None:
    terminal = Terminal("train", *TINY, "max_duration=30ba", f"data={data}", "save_folder=run", cwd=tmp_path)
    assert terminal.end() == 0
    live = [line for line in terminal.lines if line.startswith("batch ") and "loss" in line]
    for line in live:
        assert len(line) <= 80 and re.fullmatch(
            r"batch \d+/30 [━╸╺ ]+ loss \d+\.\d{4} \|( .* \|)? [\d,]+ tok/s ETA \d+:\d\d:\d\d", line
        ), line
    assert live and COLOR.search(terminal.text) and "MFU" not in terminal.plain
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert not [key for row in rows for key in row if "mfu" in key]


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (30, ["loss"]),
        (45, ["loss", "tok/s"]),
        (62, ["loss", "tok/s", "ETA"]),
        (110, ["loss", "grad", "lr", "tok/s", "ETA"]),
    ],
)
def test_figures_are_dropped_in_order_of_importance(
    columns: int, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ingot.report.console import Console

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    (tmp_path / "logs").mkdir()
    console = Console(str(tmp_path))
    console.begin(0, 500, None)
    console.row({"loss/train/total": 2.5, "lr-AdamW/group0": 0.1, "l2_norm/grad/global": 1.0,
                 "throughput/tokens_per_sec": 12345.0, "time/remaining_estimate": 0.5}, 123)  # fmt: skip
    console.end()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    line = next(line for line in re.split(r"[\r\n]+", shown) if "123/500" in line).rstrip()
    assert len(line) <= columns and "━━━" in line
    assert [part for part in ("loss", "grad", "lr", "tok/s", "ETA") if part in line] == parts, line


def test_ctrl_c_is_answered_at_once_and_the_run_is_saved(data: Path, tmp_path: Path) -> None:
    terminal = Terminal("train", *ENDLESS, f"data={data}", "save_folder=run", cwd=tmp_path, NO_COLOR="1")
    terminal.wait_for(r"batch [5-9]\d*/100000")
    terminal.type("\x03")
    step = int(terminal.wait_for(r"finishing step (\d+), then saving; press Ctrl-C again to stop now")[1])
    assert terminal.end() == 75
    assert steps_in(tmp_path / "run" / "checkpoints") == [step]
    status = read_status(tmp_path / "run")
    then = f"the same command continues from batch {step} of 100000"
    assert status.state == "not running" and status.over
    assert status.lines()[0] == f"state: not running: stopped by Ctrl-C; {then}"
    assert not COLOR.search(terminal.text)


def test_a_second_ctrl_c_stops_now_and_says_what_is_lost(data: Path, tmp_path: Path) -> None:
    terminal = Terminal("train", *SLOW, f"data={data}", "save_folder=run", cwd=tmp_path)
    terminal.wait_for(r"batch 0/100000")
    time.sleep(0.5)
    terminal.type("\x03")
    terminal.wait_for("finishing step 1, then saving")
    began = time.monotonic()
    terminal.type("\x03")
    assert terminal.end() == 130 and time.monotonic() - began < 30  # a step takes a minute
    said = "stopped now, during step 1; the same command starts over, since nothing was saved yet"
    assert terminal.lines[-2:] == [said, ""]
    assert steps_in(tmp_path / "run" / "checkpoints") == []
    assert read_status(tmp_path / "run").stopped == "stopped by Ctrl-C; the same command starts over"


def test_ctrl_c_during_start_up_ends_the_command_in_one_line(data: Path, tmp_path: Path) -> None:
    terminal = Terminal("train", *TINY, f"data={data}", "save_folder=run", cwd=tmp_path, fresh=True)
    terminal.wait_for("torch.compile")
    terminal.type("\x03")
    assert terminal.end() in (130, 75)  # 75 if the first step had begun
    assert "Traceback" not in terminal.plain and "internal error" not in terminal.plain


def test_ctrl_c_in_front_of_a_pipe_saves_although_the_reader_is_gone(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ingot.cli.main", "train", *ENDLESS, f"data={data}", "save_folder=run"]
    process = WarmProcess(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    while "[batch=" not in process.stdout.readline():
        pass
    process.stdout.close()  # as `tee` does, which gets the same signal
    rows = tmp_path / "run" / "metrics.jsonl"
    seen = rows.read_text().count("\n")
    while rows.read_text().count("\n") < seen + 2:  # it goes on without a reader
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 75 and "finishing step" in process.stderr.read()
    assert steps_in(tmp_path / "run" / "checkpoints")


def test_a_listing_into_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    command = f"{sys.executable} -m ingot.cli.main config keys | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["name=run", "0"] and done.stderr == ""


def test_a_reader_that_left_before_the_last_line_is_not_a_failure(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "ingot.cli.main", "config", "keys", "optimizer"]  # less than a buffer holds
    done = run_warm(command, cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("listing", ["recipes list", "checkpoint list RUN"])
def test_listings_fit_80_columns_of_a_terminal(listing: str, data: Path, tmp_path: Path) -> None:
    from ingot.api import train
    from ingot.config.load import load_config
    from ingot.config.run import RunConfig

    run = tmp_path / "a-rather-long-name-of-a-folder" / "with-a-run"
    if "RUN" in listing:
        train(load_config(RunConfig, [*TINY, "save_interval=6ba", f"data={data}", f"save_folder={run}"]))
    terminal = Terminal(*listing.replace("RUN", str(run)).split())
    assert terminal.end() == 0
    assert max(map(len, terminal.lines)) <= 80 and "…" not in terminal.plain
    if "list RUN" in listing:
        assert all(f"{step}" in terminal.plain for step in (6, 12))
