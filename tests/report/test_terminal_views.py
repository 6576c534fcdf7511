"""`ingot runs`, `compare` and `watch`: what they show of run folders, at 80 columns."""

import json
from pathlib import Path

import pytest
from conftest import Ingot
from terminal import Terminal

from ingot.report.terminal.curve import BLANK, draw_curve
from ingot.report.terminal.run_table import age_text
from ingot.training.runtime.lease import Lease

LOSS = "loss/train/total"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, seed, losses, done in (("a", 1, [3.0, 2.0], True), ("a-run-with-a-long-name", 2, [4.0, 1.0, 1.5], False)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        rows = [{"time/batch": n, LOSS: x, "throughput/tokens_per_sec": 1e6 * n} for n, x in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yaml").write_text(f"name: {name}\nseed: {seed}\nprecision: bf16\n")
        if done:
            (folder / "FINISHED").write_text("2\n")
    (tmp_path / "runs" / "not-a-run").mkdir()
    return tmp_path / "runs"


def test_runs_lists_each_run_within_80_columns(ingot_here: Ingot, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = ingot_here("runs", str(runs)).stdout.splitlines()
    assert len(lines) == 3 and all(len(line) <= 80 for line in lines)
    assert lines[0].split() == ["run", "state", "step", "loss", "tok/s", "checkpoint", "age"]
    assert lines[1].split()[:5] == ["a", "finished", "2", "2.0000", "2,000,000"]


def test_runs_filters_by_state_and_name_and_prints_json(ingot_here: Ingot, runs: Path) -> None:
    (line,) = json.loads(ingot_here("runs", str(runs), "--state", "finished", "--json").stdout)
    assert (line["name"], line["step"], line["loss"]) == ("a", 2, 2.0)
    (line,) = json.loads(ingot_here("runs", str(runs), "--name", "long", "--json").stdout)
    assert line["name"] == "a-run-with-a-long-name"
    assert "no such runs" in ingot_here("runs", str(runs), "--state", "queued").stdout
    done = ingot_here("runs", "nothing", check=False)
    assert done.returncode == 2 and "nothing is not a folder" in done.stderr


def test_compare_shows_only_keys_that_differ_and_the_best_value(ingot_here: Ingot, runs: Path) -> None:
    folders = [str(runs / "a"), str(runs / "a-run-with-a-long-name")]
    found = json.loads(ingot_here("compare", *folders, "--json").stdout)
    assert found["config"] == {"name": ["a", "a-run-with-a-long-name"], "seed": ["1", "2"]}
    assert found["metrics"][f"{LOSS} (last)"] == [2.0, 1.5] and found["metrics"][f"{LOSS} (best)"] == [2.0, 1.0]
    text = ingot_here("compare", *folders).stdout
    assert "seed" in text and "precision" not in text
    assert "two runs or more" in ingot_here("compare", folders[0], check=False).stderr


def test_a_curve_falls_from_the_top_left_to_the_bottom_right() -> None:
    lines = draw_curve([10.0 - n for n in range(10)], 40, 5)
    assert len(lines) == 5 and all(len(line) == 40 for line in lines)
    assert lines[0].split()[0] == "10" and lines[-1].split()[0] == "1"
    inked = [[i for i, sign in enumerate(line) if ord(sign) > BLANK] for line in lines]
    assert max(inked[0]) < 20 and min(inked[-1]) > 20


def test_a_curve_of_one_value_or_none_is_drawn() -> None:
    assert len(draw_curve([1.0], 30, 4)) == 4 and draw_curve([], 30, 4) == []


def test_watch_shows_curve_and_state_once_where_there_is_no_terminal(ingot_here: Ingot, runs: Path) -> None:
    text = ingot_here("watch", str(runs / "a")).stdout
    assert "state: finished" in text and any(ord(sign) > BLANK for sign in text)
    assert ingot_here("watch", str(runs / "not-a-run"), check=False).returncode == 2


def test_watch_follows_a_run_on_a_terminal_and_ends_with_it(runs: Path) -> None:
    run = runs / "a-run-with-a-long-name"
    owner = Lease(run)
    terminal = Terminal("watch", str(run), "--seconds", "0.2")
    terminal.wait_for("state: running")
    assert "step 77" not in terminal.plain
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"time/batch": 77, LOSS: 0.5}) + "\n")
    terminal.wait_for(r"\b77\b")
    (run / "FINISHED").write_text("77\n")
    owner.release()
    assert terminal.end() == 0 and "state: finished" in terminal.plain


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59.9, "59 s"), (7200, "2 h"), (90000, "1 d"), (None, "")])
def test_an_age_has_one_unit(seconds: float | None, text: str) -> None:
    assert age_text(seconds) == text
