"""`ingot launch local`: the spec of a cluster, on this machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.launch.protocol import LaunchFolder
from ingot.launch.spec import read_spec


def test_a_local_launch_trains_and_leaves_spec_job_and_logs(
    tiny: list[str], tmp_path: Path, ingot: Callable[..., Any]
) -> None:
    run = tmp_path / "run"
    command = ["launch", "local", *tiny, "max_duration=3ba", "--profile", "cpu", "--gpus-per-node", "0"]
    printed = ingot(*command, "--dry-run").stdout
    assert not run.exists()
    ingot(*command)
    assert (run / "FINISHED").exists()
    spec = read_spec(run / "launch" / "spec.json")
    assert json.loads(printed) == json.loads(spec.model_dump_json())
    assert (run / "launch" / "spec.json").stat().st_mode & 0o777 == 0o600
    assert [job.back_end for job in LaunchFolder(run).jobs()] == ["local"]
    assert (run / "logs" / "rank-0.log").exists()
    assert ingot("status", str(run)).stdout.startswith("state: finished")


def test_a_local_launch_that_cannot_run_leaves_nothing(tmp_path: Path, ingot: Callable[..., Any]) -> None:
    done = ingot("launch", "local", "no-such-recipe", f"save_folder={tmp_path / 'run'}", check=False)
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_following_the_log_of_a_run_that_was_given_up_ends(tmp_path: Path, ingot: Callable[..., Any]) -> None:
    for name, text in {"launch/HALT": "the same error twice", "logs/train.log": "batch 1\n", "config.yaml": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = ingot("logs", "-f", str(tmp_path)).stdout.splitlines()
    assert lines == ["batch 1", "state: halted: the same error twice"]
