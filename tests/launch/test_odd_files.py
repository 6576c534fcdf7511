"""Pipes, devices and folders where the launcher expects small files: nothing waits for them or reads for ever, and one
sentence says what to do."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from specs import put_on_path, spec

from ingot.errors import ConfigError, DataError
from ingot.launch.monitor.status import find_run
from ingot.launch.protocol import LaunchFolder
from ingot.launch.register import register_train
from ingot.launch.submit import submit_to_slurm
from ingot.launch.supervisor.failure_log import mark_start
from ingot.launch.supervisor.progress import stop_reason_of
from ingot.launch.supervisor.records import Launched
from ingot.launch.supervisor.state_file import DamagedState, StateFile, now, read_state
from ingot.report.metrics_file import MetricsFile
from ingot.storage.small_files import OddFile, read_bytes

MAKERS: dict[str, Callable[[Path], Any]] = {
    "a pipe or a device": os.mkfifo,
    "a folder": Path.mkdir,
    "a pipe or a device ": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "launch").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    return tmp_path / "run"


@pytest.fixture(params=MAKERS)
def odd(request: pytest.FixtureRequest) -> tuple[str, Callable[[Path], Any]]:
    """What it is, and how it is made."""
    return f"it is {request.param.strip()} and not a file", MAKERS[request.param]


def test_a_state_file_that_is_something_else_is_damaged(
    run: Path, odd: tuple[str, Callable[[Path], Any]], ingot_here: Callable[..., Any]
) -> None:
    state = run / "launch" / "state.jsonl"
    odd[1](state)
    for read in (read_state, lambda path: StateFile(path.parent)):
        with pytest.raises(DamagedState, match=odd[0]):
            read(state)
    said = ingot_here("status", str(run)).stdout
    assert f"command: mv {state} {state}.damaged" in said and odd[0] in said


@pytest.mark.parametrize("time", ["garbage", "2026-01-01T00:00:00", "0001-01-01T00:00:00+00:00", ""])
def test_a_time_that_cannot_be_computed_with_is_damage(run: Path, ingot_here: Callable[..., Any], time: str) -> None:
    state = StateFile(run / "launch")
    state.append(Launched(time=now(), launch="a", back_end="local", nodes=1))
    state.append(Launched(time=time, launch="a", back_end="local", nodes=1))
    with pytest.raises(DamagedState, match=r"line 2 is not a record .* is not a time with a time zone"):
        read_state(state.path)
    assert f"command: mv {state.path}" in ingot_here("status", str(run)).stdout


def test_jobs_and_metrics_that_are_something_else_are_one_sentence(
    run: Path, odd: tuple[str, Callable[[Path], Any]], ingot_here: Callable[..., Any]
) -> None:
    for name in ("metrics.jsonl", "launch/jobs.jsonl"):
        (run / name).unlink(missing_ok=True)
        odd[1](run / name)
        for command in ("status", "stop"):
            refused = ingot_here(command, str(run), check=False)
            assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1
            assert f"cannot read {run / name}: {odd[0]}" in refused.stderr
        path = run / name
        path.rmdir() if path.is_dir() else path.unlink()


def test_halt_and_stop_count_whatever_they_are(
    run: Path, tmp_path: Path, odd: tuple[str, Callable[[Path], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = LaunchFolder(run)
    odd[1](launch.path / "HALT")
    assert odd[0] in (launch.halted() or "")
    odd[1](run / "STOP")
    assert stop_reason_of(run) == ("user", "STOP in the run folder")
    sbatch = put_on_path(monkeypatch, tmp_path / "bin", "sbatch", "print(7)")
    with pytest.raises(ConfigError, match=f"cannot read {run / 'STOP'}: {odd[0]}; move it away"):
        submit_to_slurm(spec(run_folder=str(run), workdir=str(tmp_path), image=None))
    assert not sbatch.exists()


def test_an_owner_that_is_something_else_is_none(
    run: Path, odd: tuple[str, Callable[[Path], Any]], ingot_here: Callable[..., Any]
) -> None:
    odd[1](run / "owner.json")
    assert "state: not running" in ingot_here("status", str(run)).stdout


def test_a_pipe_in_place_of_the_lock_locks(run: Path) -> None:
    os.mkfifo(run / "launch" / ".lock")
    with LaunchFolder(run).lock():
        pass


def test_a_damaged_list_of_jobs_concerns_only_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingot_here: Callable[..., Any]
) -> None:
    for name in ("a", "b", "c"):
        LaunchFolder(tmp_path / "runs" / name).path.mkdir(parents=True)
    LaunchFolder(tmp_path / "runs" / "b").add_job("local", "123")
    for name in ("a", "c"):
        (tmp_path / "runs" / name / "launch" / "jobs.jsonl").write_text("not JSON\n")
    monkeypatch.chdir(tmp_path)
    assert find_run("123") == Path("runs/b")
    with pytest.raises(ConfigError, match="124 is neither a run folder nor a job"):
        find_run("124")


def test_what_a_run_appends_to_does_not_wait_for_a_pipe(run: Path, odd: tuple[str, Callable[[Path], Any]]) -> None:
    for name in ("failures.jsonl", "metrics.jsonl"):
        (run / name).unlink(missing_ok=True)
        odd[1](run / name)
    with pytest.raises(OSError, match=r"it is .* and not a file|Is a directory"):
        mark_start(run)
    with pytest.raises((DataError, IsADirectoryError), match=r"it is .* and not a file; move it away|Is a directory"):
        MetricsFile(str(run)).begin(0, 10, None)


def test_a_launch_spec_that_is_something_else_is_one_sentence(
    run: Path, odd: tuple[str, Callable[[Path], Any]], ingot_here: Callable[..., Any]
) -> None:
    path = run / "launch" / "spec.json"
    odd[1](path)
    refused = ingot_here("launch", "resume", str(run), "--dry-run", check=False)
    assert refused.returncode == 2 and f"{path} is not a launch spec: " in refused.stderr
    assert odd[0] in refused.stderr and f"mv {path} {path}.damaged" in refused.stderr
    ingot_here("status", str(run))


def test_a_state_file_of_another_run_is_refused_but_not_a_run_that_was_copied_or_moved(tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("other", "mine", "copy")}
    (runs["mine"] / "launch").mkdir(parents=True)
    spec(run_folder=str(runs["other"]), workdir=str(tmp_path), image=None).write()
    state = StateFile(runs["other"] / "launch")
    state.append(Launched(time=now(), launch="a", back_end="slurm", nodes=1, run=str(runs["other"])))
    shutil.copytree(runs["other"], runs["copy"])
    shutil.copy(state.path, runs["mine"] / "launch")
    mine = runs["mine"] / "launch" / "state.jsonl"
    with pytest.raises(ConfigError, match=f"{mine} belongs to another run, {runs['other']}; move it away with"):
        register_train(runs["mine"])
    assert [path.name for path in (runs["mine"] / "launch").iterdir()] == ["state.jsonl"]
    for run in (runs["other"], runs["copy"]):
        register_train(run)
    shutil.rmtree(runs["other"])
    register_train(runs["mine"])


def test_a_file_is_read_whole_or_from_its_end_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert (read_bytes(path, 5), read_bytes(path, 5, 2), read_bytes(path, 5, 9)) == (b"12345", b"45", b"12345")
    with pytest.raises(OddFile, match="it has 5 bytes"):
        read_bytes(path, 4)
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OddFile):
            read_bytes(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == opened
