"""The rows of several calls on a card become one table: the newest row of each, and a failure never hides a figure."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_table  # noqa: E402


def timed(section: str, variant: str, at: int, speed: int, **more: Any) -> dict[str, Any]:
    return {"section": section, "variant": variant, "at": at, "tokens_per_second": speed, "causal_rate": 0.9,
            "memory_gib": 1.5, "microbatch": 4, "recompute": None, "host_syncs": ["a.py:1"], "spread": 0.01,
            "command": f"call {at}", "torch": "2.11", "notes": ["long"], **more}  # fmt: skip


def call(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_newest_row_of_each_wins_in_whatever_order_the_calls_are_named(tmp_path: Path) -> None:
    old = call(tmp_path / "old", timed("7b", "plain", 10, 100), timed("7b", "wrapped", 11, 50))
    new = call(tmp_path / "new", timed("7b", "wrapped", 20, 98))
    for folders in ((old, new), (new, old)):
        rows = gpu_table.merge(gpu_table.read_rows(*folders))
        assert [(row["variant"], row["tokens_per_second"]) for row in rows] == [("plain", 100), ("wrapped", 98)]
        assert "7b: wrapped is 0.980 of plain" in gpu_table.table(rows)


def test_a_failure_does_not_hide_what_was_measured_but_a_measurement_replaces_a_failure() -> None:
    good, failed = timed("1b", "plain", 1, 10), {"section": "1b", "variant": "plain", "at": 2, "error": "no memory"}
    assert gpu_table.merge([good], [failed]) == [good]
    assert gpu_table.merge([failed], [good | {"at": 3}]) == [good | {"at": 3}]
    assert gpu_table.merge([failed], [failed | {"at": 3}])[0]["at"] == 3


def test_a_file_of_results_keeps_its_other_rows_and_how_each_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps({"rows": [1], "executions": [timed("125m", "plain", 1, 7, host_syncs=0)]}))
    one = call(tmp_path / "one", timed("7b", "plain", 10, 100))
    other = call(
        tmp_path / "other", {"section": "repeatable", "case": "mpt", "equal": True, "equal_resumed": True, "at": 5}
    )
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--print", str(one), str(other), "--into", str(results)])
    pytest.importorskip("torch")
    import gpu_check

    gpu_check.main()
    found = json.loads(results.read_text())
    assert found["rows"] == [1]
    assert [gpu_table.row_key(row) for row in found["executions"]] == [
        ("125m", "plain"), ("repeatable", "mpt"), ("7b", "plain")
    ]  # fmt: skip
    row = found["executions"][-1]
    assert (row["command"], row["spread"], row["torch"], row["host_syncs"]) == ("call 10", 0.01, "2.11", 1)
    assert "notes" not in row
    printed = capsys.readouterr().out
    assert "equal True, resumed True" in printed and "waits 1" in printed
