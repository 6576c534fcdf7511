"""A job that Slurm has taken although its launcher could not write that down, and what is left of `jobs.jsonl`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, cluster
from specs import put_on_path, spec

from ingot.errors import ConfigError
from ingot.launch.monitor.status import read_status
from ingot.launch.protocol import LaunchFolder
from ingot.launch.register import register_local
from ingot.launch.slurm.queue import jobs_of_folder
from ingot.launch.submit import spec_to_resume, submit_to_slurm
from ingot.launch.supervisor.records import Launched
from ingot.launch.supervisor.state_file import StateFile, now

__all__ = ["cluster"]


def squeue(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> Path:
    return put_on_path(
        monkeypatch, folder / "bin", "squeue", f"print({chr(10).join(['JOBID|STATE|COMMAND', *lines])!r})"
    )


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchFolder:
    """The folder of a run whose launcher was killed when Slurm had taken the job."""
    launch = LaunchFolder(tmp_path / "run")
    put_on_path(monkeypatch, tmp_path / "bin", "sbatch", "print(7)")

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as until, pytest.raises(KeyboardInterrupt):
        until.setattr(LaunchFolder, "add_job", die)
        submit_to_slurm(spec(run_folder=str(launch.run), workdir=str(tmp_path), image=None))
    return launch


def test_a_job_that_its_launcher_could_not_note_is_seen_and_can_be_stopped(
    killed: LaunchFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(monkeypatch, tmp_path, f"7|PENDING|{killed.path}/job.sh")
    with killed.lock():  # while a launcher is at work, nobody waits for it
        read_status(killed.run)
    assert killed.submitting.exists()
    read_status(killed.run)
    assert [job.id for job in killed.jobs()] == ["7"] and not killed.submitting.exists()


@pytest.mark.parametrize("start", [submit_to_slurm, register_local])
def test_a_job_that_its_launcher_could_not_note_is_found_before_the_next_is_queued(
    killed: LaunchFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Any]
) -> None:
    again = spec(run_folder=str(killed.run), workdir=str(tmp_path), image=None)
    put_on_path(monkeypatch, tmp_path / "bin", "squeue", "sys.exit('cannot reach slurmctld')")
    with pytest.raises(ConfigError, match=f"it does not answer; if its cluster is gone, remove {killed.submitting}"):
        start(again)
    script = f"{killed.path}/job.sh"
    others = ["8|RUNNING|bash", f"9|RUNNING|{tmp_path}/other/launch/job.sh", f"6|COMPLETED|{script}"]
    calls = squeue(monkeypatch, tmp_path, f"7_1|PENDING|{script}", f"7_2|PENDING|{script}", *others)
    with pytest.raises(ConfigError, match=r"already has a job: 7_1: PENDING"):
        start(again)
    assert f"--user={os.getuid()}" in calls.read_text()
    assert [job.id for job in killed.jobs()] == ["7"] and not killed.submitting.exists()


def test_a_submission_that_was_refused_leaves_nothing_in_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = LaunchFolder(tmp_path / "run")
    first = spec(run_folder=str(launch.run), workdir=str(tmp_path), image=None)
    put_on_path(monkeypatch, tmp_path / "bin", "sbatch", "sys.exit('no such partition')")
    for lines, is_in_doubt in (([], False), ([f"7|PENDING|{launch.path}/job.sh"], True)):
        squeue(monkeypatch, tmp_path)
        if is_in_doubt:  # its answer did not arrive
            monkeypatch.setattr("ingot.launch.submit.jobs_of_folder", lambda _, lines=lines: lines)
        with pytest.raises(Exception, match="no such partition"):
            submit_to_slurm(first)
        assert launch.submitting.exists() == is_in_doubt


def test_a_line_cut_off_by_a_power_cut_does_not_swallow_the_next(tmp_path: Path) -> None:
    launch = LaunchFolder(tmp_path)
    launch.path.mkdir()
    path = launch.path / "jobs.jsonl"
    for id in ("1", "2"):
        launch.add_job("slurm", id)
    whole = path.read_bytes()
    for torn, left in ((whole[:-1], ["1", "2"]), (whole[:-9], ["1"]), (whole + b"\0\0\0", ["1", "2"])):
        path.write_bytes(torn)
        assert [job.id for job in launch.jobs()] == left
        launch.add_job("slurm", "3")
        assert [job.id for job in launch.jobs()] == [*left, "3"]


@pytest.mark.parametrize(
    "line", [b'{"id": 5}', b"\xff\0", b"[]", b'{"back_end": "nonsense", "id": "5", "time": ""}',
             b'{"back_end": "slurm", "id": "--all", "time": ""}'],
)  # fmt: skip
def test_a_line_that_is_not_a_job_is_an_error_that_says_what_to_do(
    tmp_path: Path, ingot_here: Callable[..., Any], line: bytes
) -> None:
    launch = LaunchFolder(tmp_path / "run")
    launch.path.mkdir(parents=True)
    path = launch.path / "jobs.jsonl"
    launch.add_job("local", "1")
    path.write_bytes(path.read_bytes() + line + b"\n")
    for command in ("status", "stop"):
        refused = ingot_here(command, str(launch.run), check=False)
        assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1
        assert f"line 2 of {path} is not a job of the launcher" in refused.stderr
        assert f"`mv {path} {path}.damaged`" in refused.stderr


def test_a_run_without_a_job_is_launched_again_on_what_it_was_launched_on(tmp_path: Path) -> None:
    launch = LaunchFolder(tmp_path / "run")
    spec(run_folder=str(launch.run), workdir=str(tmp_path), image=None).write()
    with pytest.raises(ConfigError, match="it names no job; launch it again"):
        spec_to_resume(launch.run)
    for back_end in ("slurm", "local"):
        StateFile(launch.path).append(Launched(time=now(), launch=back_end, back_end=back_end, nodes=1))
        assert spec_to_resume(launch.run)[1] == back_end


def test_a_real_slurm_is_asked_for_the_jobs_of_a_folder(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.env[name])
    jobs = {}
    for run in ("mine", "other"):
        launch = LaunchFolder(tmp_path / run)
        launch.path.mkdir(parents=True)
        script = launch.write_script("job.sh", "#!/bin/bash\nsleep 60\n")
        jobs[run] = cluster.ask(
            "sbatch", "--parsable", "--hold", "--output=/dev/null", "--array=1-2", str(script)
        ).strip()
    try:
        found = jobs_of_folder(tmp_path / "mine" / "launch")
        assert found is not None and {job.id for job in found} == {f"{jobs['mine']}_{number}" for number in (1, 2)}
    finally:
        cluster.ask("scancel", *jobs.values())
