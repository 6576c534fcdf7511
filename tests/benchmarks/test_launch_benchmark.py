"""The benchmark of launching measures each rung of the ladder, and its published figures say how they were made."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
from cluster import missing  # noqa: E402

TIMES = {
    "command",
    "submit_to_first_step",
    "of_which_preflight",
    "rank_death_to_detected",
    "rank_death_to_stepping_inside_the_allocation",
    "job_death_to_stepping_in_the_next_of_the_chain",
    "requeue_to_stepping",
}


def check(result: dict) -> None:
    assert result["command"].startswith("python benchmarks/launch.py")
    assert {"ingot", "torch", "python", "slurm"} == set(result["versions"])
    seconds = result["seconds"]
    assert set(seconds) == TIMES and all(value > 0 for value in seconds.values())
    assert seconds["command"] < seconds["submit_to_first_step"]
    assert seconds["rank_death_to_detected"] < seconds["rank_death_to_stepping_inside_the_allocation"]


def test_the_published_times_name_their_command_and_versions() -> None:
    check(json.loads((ROOT / "benchmarks" / "results" / "launch.json").read_text()))


@pytest.mark.slow
def test_every_rung_is_measured_on_a_real_slurm(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    out = tmp_path / "launch.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "launch.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(out.read_text()))
