"""What a real Slurm says about jobs that neither run nor have ended, and what follows for their run folder."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from specs import spec

from ingot.errors import ConfigError
from ingot.launch.monitor.job_states import JobState, job_states
from ingot.launch.monitor.status import read_status
from ingot.launch.protocol import LaunchFolder
from ingot.launch.register import register_local
from ingot.launch.submit import submit_to_slurm

__all__ = ["cluster"]


@pytest.fixture
def queue(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Queues a job of the run folder; whatever it has queued is ended with the test."""
    launch = LaunchFolder(tmp_path / "run")
    launch.path.mkdir(parents=True)
    script = launch.write_script("job.sh", "#!/bin/bash\nsleep 60\n")
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.env[name])

    def add(*options: str) -> str:
        job = cluster.ask("sbatch", "--parsable", "--output=/dev/null", *options, str(script)).strip()
        assert job
        launch.add_job("slurm", job)
        return job

    yield add  # type: ignore[misc]
    cluster.ask("scancel", *(job.id for job in launch.jobs()))


def wait_for(run: Path, state: str) -> JobState:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        found = [each for each in job_states(run) or () if each.state == state]
        if found:
            return found[0]
        time.sleep(0.05)
    raise AssertionError(job_states(run))


def test_held_requeued_and_suspended_jobs_keep_their_run_folder(
    cluster: Cluster, queue: Callable[..., str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    held = queue("--hold")
    assert wait_for(run, "PENDING").reason == (
        f"JobHeldUser: its user holds it: `scontrol release {held}` lets it start"
    )
    suspended = queue()
    wait_for(run, "RUNNING")
    cluster.ask("scontrol", "suspend", suspended)
    wait_for(run, "SUSPENDED")
    special = queue()
    wait_for(run, "RUNNING")
    cluster.ask("scontrol", "requeuehold", "State=SpecialExit", special)
    assert "requeued in held state" in wait_for(run, "SPECIAL_EXIT").reason
    cancelled = queue()
    cluster.ask("scancel", cancelled)
    wait_for(run, "CANCELLED")

    status = read_status(run)
    assert status.state == "suspended" and f"job {suspended} is SUSPENDED" in status.next
    assert {status.jobs[job] for job in (held, suspended, special)} == {"PENDING", "SUSPENDED", "SPECIAL_EXIT"}
    shown = spec(run_folder=str(run), workdir=str(tmp_path), image=None)
    for launch in (submit_to_slurm, register_local):
        with pytest.raises(ConfigError, match="already has a job"):
            launch(shown)
    assert not (run / "launch" / "spec.json").exists()  # nothing was changed
    cluster.ask("scancel", held, suspended, special)
    end = time.monotonic() + 30
    while any(job.is_living for job in job_states(run) or ()) and time.monotonic() < end:
        time.sleep(0.05)
    register_local(shown)
    assert [job.back_end for job in LaunchFolder(run).jobs()][-1] == "local"
