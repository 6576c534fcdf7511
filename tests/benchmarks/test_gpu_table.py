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
            "full_rate": 0.95, "memory_gib": 1.5, "microbatch": 4, "recompute": None, "host_syncs": ["a.py:1"], "spread": 0.01,
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
        assert "wrapped is" not in gpu_table.table(rows)  # two calls, perhaps on two cards


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


def test_a_failed_process_is_forgotten_once_its_section_has_a_newer_figure() -> None:
    failed = {"section": "trees", "variant": "process", "at": 5, "error": "out of time"}
    assert gpu_table.merge([timed("trees", "1b", 4, 10), failed])[-1] == failed
    assert gpu_table.merge([failed], [timed("trees", "1b", 6, 10)]) == [timed("trees", "1b", 6, 10)]
    assert failed in gpu_table.merge([failed], [timed("7b", "plain", 6, 10)])


def test_ratios_are_of_variants_of_one_call() -> None:
    rows = [timed("7b", "plain", 1, 100, command="a"), timed("7b", "wrapped", 2, 99, command="a"),
            timed("7b", "wrapped fp8", 3, 198, command="a"), timed("7b", "plain fp8", 4, 150, command="b"),
            timed("1b", "plain", 5, 10, command="a"), timed("1b", "wrapped", 9000, 10, command="a")]  # fmt: skip
    assert gpu_table.conclusions(rows) == ["7b: wrapped is 0.990 of plain", "7b: wrapped fp8 is 2.000 of wrapped"]


def test_results_name_no_folder_of_the_machine_that_measured() -> None:
    row = timed("7b", "plain", 1, 100, command="python benchmarks/gpu_check.py --out /somewhere/out --only 7b")
    assert gpu_table.short(row)["command"] == "python benchmarks/gpu_check.py --out OUT --only 7b"


def test_a_row_without_the_full_rate_gets_that_of_its_shape() -> None:
    """6 N + 12 L d S, from the rate that counts half of the attention; the table of `gpu.py` counts in the same way."""
    found = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())
    for published in (row for row in found["rows"] if "product_flops" in row):
        peak = 989.5e12
        row = {"model": f"mpt-{published['model']}", "seq_len": 2048, "matmul_tflops": published["product_flops"] / 1e12,
               "tokens_per_second": published["tokens_per_second"],
               "causal_rate": published["mfu_causal"] * peak / published["product_flops"]}  # fmt: skip
        expected = published["mfu_full"] * peak / published["product_flops"]
        assert gpu_table.with_full_rate(row)["full_rate"] == pytest.approx(expected, abs=3e-4)
    assert gpu_table.with_full_rate({"section": "tests"}) == {"section": "tests"}
    assert gpu_table.with_full_rate({"causal_rate": 0.5, "full_rate": 0.6})["full_rate"] == 0.6
