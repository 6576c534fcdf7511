"""The benchmark of restarts by kind of failure: its published figures are complete, and its arithmetic follows from the
inputs that stand next to it."""

import json
import sys
from pathlib import Path

import pytest
from cluster import missing

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import recovery  # noqa: E402

RESULT = json.loads((ROOT / "benchmarks" / "results" / "recovery.json").read_text())


def test_every_kind_of_failure_is_measured_and_copies_save_steps() -> None:
    assert {"ingot", "torch", "python", "slurm"} == set(RESULT["versions"]) and RESULT["commands"]
    measured = RESULT["measured"]
    assert set(measured) == set(recovery.SCENARIOS)
    for failure, run in measured.items():
        assert 0 < run["detected"] < run["back"] and run["runs"] > 0, failure
        assert run["runs"] == sum(found["failure"] == failure for found in RESULT["runs"])
    for failure in ("process killed", "node lost, warm spare"):
        own, without = measured[failure], measured[f"{failure}, no copies"]
        assert own["from_host_memory"] and not without["from_host_memory"]
        assert own["steps_lost"] < recovery.SNAPSHOT_EVERY + recovery.SETTLE_SECONDS / recovery.STEP_SECONDS
        assert own["steps_lost"] < without["steps_lost"]


def test_the_estimate_for_1024_nodes_is_the_published_arithmetic() -> None:
    assert recovery.computed(RESULT["measured"]) == RESULT["computed"]
    now, before = RESULT["computed"]["at_1024_nodes"], RESULT["computed"]["at_1024_nodes_before"]
    assert now.keys() == before.keys()
    assert all(now[failure]["seconds_away"] < before[failure]["seconds_away"] for failure in now)


@pytest.mark.slow
def test_a_lost_node_is_measured_on_a_real_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := missing():
        pytest.skip(why)
    monkeypatch.setattr(sys, "argv", ["recovery.py", "--only", "node lost, warm spare", "--out", str(tmp_path / "out")])
    recovery.main()
    (run,) = json.loads((tmp_path / "out").read_text())["runs"]
    assert run["cause"] == "lost" and run["node"] == "n2" and run["from_host_memory"]
