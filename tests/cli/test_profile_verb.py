"""`ingot profile`: a few steps, and nothing of a run is touched."""

import json
from pathlib import Path

import yaml
from conftest import TINY, Ingot


def test_a_recipe_is_profiled_without_data_and_again(ingot_here: Ingot, tmp_path: Path) -> None:
    for steps in ("2-3", "3"):
        out = ingot_here("profile", *TINY, "eval_first=true", "save_interval=1ba", "--steps", steps).stdout
        assert "matrix products" in out and "trace for https://ui.perfetto.dev: runs/run-profile/profile/" in out
    folder = tmp_path / "runs" / "run-profile"
    (table,) = (folder / "profile").glob("*.json")  # of the second time: it starts over
    assert json.loads(table.read_text())["steps"] == [3, 3]
    assert not (folder / "checkpoints").exists() and not (folder / "FINISHED").exists()


def test_a_profile_of_a_real_config_trains_on_its_data_without_its_trackers(
    ingot_here: Ingot, tmp_path: Path, data: Path
) -> None:
    more = ["loggers.tensorboard={}", f"save_folder={tmp_path / 'mine'}", "max_duration=1ba"]
    ingot_here("profile", *TINY, f"data={data}", *more, "profiler.steps=2", "-o", "here")
    config = yaml.safe_load((tmp_path / "here" / "config.yaml").read_text())
    assert config["profiler"]["steps"] == "2-2"
    assert config["data"]["train"]["path"] == str(data) and config["loggers"]["tensorboard"] is None
    assert not (tmp_path / "mine").exists() and not (tmp_path / "here" / "tensorboard").exists()
    assert not list((tmp_path / "here").glob("random-data*"))


def test_a_folder_with_something_else_is_refused_and_left_alone(ingot_here: Ingot, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: a real run\n")
    done = ingot_here("profile", *TINY, "-o", "run", check=False)
    assert done.returncode == 2 and "is not empty and not of `ingot profile`" in done.stderr
    assert [path.name for path in run.iterdir()] == ["config.yaml"]
    done = ingot_here("profile", *TINY, "--steps", "9-1", check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: --steps: '9-1'") and done.stderr.count("\n") == 1


def test_a_mistyped_key_is_not_taken_for_one_of_another_stack(ingot_here: Ingot) -> None:
    done = ingot_here("profile", "demo", "profiler.stepz=1-2", check=False)
    assert done.returncode == 2 and "profiler.steps" in done.stderr and "LLM Foundry" not in done.stderr
