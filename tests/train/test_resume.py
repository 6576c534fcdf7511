"""A run that is killed and started again ends as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY, Ingot
from safetensors.torch import load_file
from warm_process import WarmProcess

from ingot.api import train
from ingot.checkpoint.manifest import read_manifest, steps_in, verify
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import CheckpointError, DataError
from ingot.report.metrics_file import read_rows

# dropout, so that the random state matters; more steps than one checkpoint interval, so that resuming matters
LONG = [*TINY, "max_duration=30ba", "save_interval=4ba", "model.resid_pdrop=0.1", "eval_interval=10ba"]


def run(data: Path, folder: Path, *more: str, fresh: bool = False) -> Path:
    train(load_config(RunConfig, [*LONG, f"data={data}", f"save_folder={folder}", *more]), fresh)
    return folder


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    path = folder / "checkpoints" / str(step)
    return {f"{f}/{k}": v for f in ("model", "optimizer") for k, v in load_file(path / f"{f}.safetensors").items()}


def assert_same_end(a: Path, b: Path, step: int = 30, evals: bool = True) -> None:
    one, two = state(a, step), state(b, step)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name
    rows = [read_rows(folder) for folder in (a, b)]
    for key in (
        "time/batch",
        "loss/train/total",
        "l2_norm/grad/global",
        *(["metrics/eval/LanguageCrossEntropy"] if evals else []),
    ):
        assert [row.get(key) for row in rows[0]] == [row.get(key) for row in rows[1]], key
    assert [row["time/batch"] for row in rows[0]] == list(range(1, step + 1))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    return run(data, tmp_path_factory.mktemp("whole") / "run")


def start(data: Path, folder: Path) -> WarmProcess:
    command = [sys.executable, "-m", "ingot.cli.main", "train", *LONG, f"data={data}", f"save_folder={folder}"]
    return WarmProcess(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_when(process: WarmProcess, seen: object) -> bool:
    """SIGKILL the process as soon as a condition holds; False if it ended before."""
    while process.poll() is None:
        if seen():  # type: ignore[operator]
            process.kill()
            process.wait()
            return True
        time.sleep(0.0005)
    return False


def test_killed_at_many_moments_a_run_ends_bitwise_equal_to_an_uninterrupted_one(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    checkpoints, metrics = folder / "checkpoints", folder / "metrics.jsonl"

    def rows() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    moments = [
        lambda: rows() >= 2,  # before the first checkpoint
        lambda: any(checkpoints.glob(".draft-8*")),  # while a checkpoint is being written
        lambda: (checkpoints / "12").exists(),  # right after one
        lambda: rows() >= 22,  # between two
    ]
    kills = sum(kill_when(start(data, folder), moment) for moment in moments)
    assert kills == len(moments)
    process = start(data, folder)
    assert process.wait(timeout=120) == 0
    assert_same_end(folder, whole)
    assert not list(checkpoints.glob(".*"))


def test_running_a_finished_run_again_changes_nothing(
    data: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in (whole / "checkpoints").rglob("*")} | {"m": read_rows(whole)}
    run(data, whole)
    assert "has finished its 30 batches" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in (whole / "checkpoints").rglob("*")} | {"m": read_rows(whole)}


def test_a_longer_duration_continues_a_finished_run(data: Path, tmp_path: Path) -> None:
    constant = "scheduler.name=constant_with_warmup"
    short = run(data, tmp_path / "grown", "max_duration=18ba", constant)
    run(data, short, constant)
    assert_same_end(short, run(data, tmp_path / "whole", constant), evals=False)  # the short one evaluated at its end


def test_fresh_starts_over_and_spares_other_files(data: Path, whole: Path, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", "max_duration=10ba")
    (folder / "notes.txt").write_text("mine")
    run(data, folder, fresh=True)
    assert_same_end(folder, whole)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_the_microbatch_may_change_at_a_restart(data: Path, whole: Path, tmp_path: Path, micro: int) -> None:
    folder = run(
        data, tmp_path / "run", "max_duration=30ba", "model.resid_pdrop=0.0", f"device_train_microbatch_size={micro}"
    )
    other = run(data, tmp_path / "other", "model.resid_pdrop=0.0")
    one, two = ([r["loss/train/total"] for r in read_rows(f)] for f in (folder, other))
    assert one == pytest.approx(two, rel=1e-4)


def test_only_the_newest_checkpoints_are_kept(data: Path, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", "save_num_checkpoints_to_keep=2")
    assert steps_in(folder / "checkpoints") == [28, 30]


def test_a_checkpoint_is_safetensors_and_a_manifest_with_true_hashes(whole: Path) -> None:
    folder = whole / "checkpoints" / "30"
    assert sorted(p.name for p in folder.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    manifest = read_manifest(folder)
    verify(manifest)
    assert manifest.step == 30 and manifest.state["progress"]["time/batch"] == 30
    assert manifest.state["config"]["model"]["d_model"] == 32
    assert json.loads((folder / "manifest.json").read_text())["format"] == "ingot-checkpoint"


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 1
    elif how == "truncate":
        del content[len(content) // 2 :]
    path.write_bytes(content)
    if how == "remove":
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_a_damaged_newest_checkpoint_is_skipped_for_the_one_before(
    data: Path, whole: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(data, tmp_path / "run", "max_duration=30ba", "save_interval=20ba")
    damage(folder / "checkpoints" / "30" / "model.safetensors", how)
    run(data, folder)
    assert "trying the one before it" in capsys.readouterr().out
    assert_same_end(folder, whole)


def test_when_every_checkpoint_is_damaged_the_run_says_so(data: Path, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", "max_duration=4ba")
    damage(folder / "checkpoints" / "4" / "optimizer.safetensors", "flip")
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors is corrupt.*none was deleted: restore one"):
        run(data, folder)


@pytest.mark.parametrize(
    ("override", "words"),
    [("model.d_model=64", "is of another model"), ("model.positions=alibi", "is of another model"),
     ("seed=3", "seed was 17 and is now 3"), ("global_train_batch_size=4", "cannot be continued"),
     ("optimizer.name=lion", "cannot be continued"), ("max_duration=2ba", "past max_duration")],
)  # fmt: skip
def test_a_change_that_makes_it_another_run_is_refused_and_nothing_is_touched(
    data: Path, whole: Path, override: str, words: str
) -> None:
    config = (whole / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match=words):
        run(data, whole, override)
    assert (whole / "config.yaml").read_text() == config


def test_other_data_is_refused(data: Path, whole: Path) -> None:
    with pytest.raises(DataError, match=r"the training data .* has changed since the checkpoint"):
        run(data, whole, "max_duration=40ba", "data.train.split=val")


def test_changed_settings_are_named_on_resume(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(data, tmp_path / "run", "max_duration=4ba")
    run(data, folder, "max_duration=8ba", "optimizer.lr=0.02")
    assert "since the checkpoint, optimizer.lr was 0.01 and is now 0.02" in capsys.readouterr().out


def test_wall_clock_save_intervals_save(data: Path, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", "save_interval=0.001sec", "max_duration=6ba")
    assert len(steps_in(folder / "checkpoints")) > 2


def test_a_full_disk_costs_a_save_but_not_the_run_and_fails_at_the_end(
    ingot: Ingot, data: Path, tmp_path: Path
) -> None:
    import resource

    def limit() -> None:  # no file of this process may grow beyond 20 kB: what a full disk does, for this process alone
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    folder = tmp_path / "run"
    done = ingot(
        "train", *TINY, "save_interval=5ba", f"data={data}", f"save_folder={folder}", check=False, preexec_fn=limit
    )
    assert done.returncode == 1
    assert "warning: cannot save a checkpoint" in done.stdout and "the run continues" in done.stdout
    assert done.stderr.startswith("error: cannot save a checkpoint in") and "Traceback" not in done.stderr
    assert len(read_rows(folder)) == 12
    assert not os.listdir(folder / "checkpoints")


def test_a_mixture_continues_exactly_and_its_sources_are_counted(data: Path, tmp_path: Path) -> None:
    mix = [f"data.train.mix.one={{path: {data}, split: train, weight: 3}}",
           f"data.train.mix.two={{path: {data}, split: val, weight: 1}}"]  # fmt: skip

    def mixed(folder: Path, *more: str) -> Path:
        train(
            load_config(RunConfig, [*TINY, "scheduler.name=constant_with_warmup", *mix, f"save_folder={folder}", *more])
        )
        return folder

    whole = mixed(tmp_path / "whole")
    cut = mixed(tmp_path / "cut", "max_duration=5ba")
    mixed(cut)
    assert_same_end(cut, whole, step=12, evals=False)
    last = read_rows(whole)[-1]
    assert last["time/token/one"] + last["time/token/two"] == last["time/token"]
    assert last["time/token/one"] / last["time/token"] == pytest.approx(0.75, abs=0.1)

    grown = mixed(cut, "max_duration=20ba", f"data.train.mix.three={{path: {data}, split: train, weight: 4}}")
    later = read_rows(grown)[-1]
    assert later["time/token/three"] > 0 and later["time/token/one"] > last["time/token/one"]


def weights_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*.safetensors")}


def test_a_run_whose_manifests_are_gone_is_refused_and_its_weights_are_kept(data: Path, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", "max_duration=6ba", "save_interval=2ba")
    for manifest in (folder / "checkpoints").glob("*/manifest.json"):
        manifest.unlink()
    before = weights_of(folder)
    with pytest.raises(
        CheckpointError, match=r"(?s)checkpoints/6 .*checkpoints/4 .*checkpoints/2 .*restore one from a copy"
    ):
        run(data, folder, "max_duration=8ba")
    assert weights_of(folder) == before and len(before) == 6
    (folder / "FINISHED").unlink()  # the same for a run that had not finished
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json"):
        run(data, folder, "max_duration=8ba")
    run(data, folder, "max_duration=2ba", fresh=True)
    assert steps_in(folder / "checkpoints") == [2]


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_has_saved_but_lost_all_checkpoints_is_refused(data: Path, tmp_path: Path, finished: bool) -> None:
    folder = run(data, tmp_path / "run", "max_duration=6ba", "save_interval=2ba")
    for checkpoint in (folder / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    if not finished:
        (folder / "FINISHED").unlink()
    metrics = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError, match=r"has saved checkpoints, and none of them is there; restore .*another save_folder"
    ):
        run(data, folder, "max_duration=8ba")
    assert (folder / "metrics.jsonl").read_bytes() == metrics


def test_a_newest_checkpoint_without_manifest_is_named_by_all_verbs(
    data: Path, tmp_path: Path, ingot: Ingot, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(data, tmp_path / "run", "max_duration=6ba", "save_interval=2ba")
    (folder / "checkpoints" / "6" / "manifest.json").unlink()
    verified = ingot("checkpoint", "verify", str(folder), check=False)
    assert verified.returncode == 2 and "checkpoints/6: INCOMPLETE" in verified.stdout
    assert "checkpoints/4: 2 files" in verified.stdout
    said = ingot("generate", str(folder), "--prompt", "The", "--max-new-tokens", "1").stderr
    assert "checkpoints/6 is incomplete" in said and "using" in said
    run(data, folder, "max_duration=6ba")
    assert "checkpoints/6 is not a checkpoint: it has no manifest.json; trying the one" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [{"train_seconds": None}, {"train_seconds": "x"}, {"train_seconds": -1}, {"left_out": None}, {"left_out": [-1]},
     {"guard": -1}, {"reporter": "x"}, {"reporter": {"metrics_bytes": -1}}, {"scaler": []}, {"data": None}],
)  # fmt: skip
def test_state_of_the_wrong_type_is_damage_and_nothing_is_touched(
    data: Path, whole: Path, tmp_path: Path, wrong: dict[str, object]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = folder / "checkpoints" / "30" / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"state": content["state"] | wrong}))
    metrics = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=rf"manifest.json is damaged: .*{next(iter(wrong))}"):
        run(data, folder, "max_duration=34ba", "scheduler.name=constant_with_warmup")
    assert (folder / "metrics.jsonl").read_bytes() == metrics and (folder / "FINISHED").exists()


def test_a_manifest_of_a_negative_step_is_skipped(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(data, tmp_path / "run", "max_duration=4ba", "save_interval=2ba")
    path = folder / "checkpoints" / "4" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": -1}))
    run(data, folder, "max_duration=4ba", "save_interval=2ba")
    said = capsys.readouterr().out
    assert "negative step" in said and "at batch 2 of 4" in said
