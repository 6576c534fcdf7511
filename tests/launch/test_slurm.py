"""Runs on a real Slurm (F9-F14, F30, F33, F35, F36): they end as the uninterrupted local run does, each sample once."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from runs import ARGUMENTS, HOOK, Run, assert_as_if_nothing_happened

from ingot.launch.supervisor.failure_log import read_failures
from ingot.launch.supervisor.records import Closed
from ingot.launch.supervisor.state_file import read_state

__all__ = ["cluster"]
slow = pytest.mark.slow
WHOLE: dict[Path, Path] = {}


@pytest.fixture
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on two local processes, undisturbed."""
    if data not in WHOLE:
        WHOLE[data] = tmp_path_factory.mktemp("whole") / "run"
        Run(data, WHOLE[data], nproc=2).run()
    return WHOLE[data]


def closed_attempts(run: Path) -> list[Closed]:
    return [record for record in read_state(run / "launch" / "state.jsonl") if isinstance(record, Closed)]


class Launched:
    """A run that was given to the cluster."""

    def __init__(self, cluster: Cluster, data: Path, folder: Path, *options: str, **fault: object):
        self.cluster, self.data, self.folder = cluster, data, folder
        self.options = [
            f"data={data}",
            f"save_folder={folder}",
            "-N",
            "2",
            "--profile",
            "cpu",
            "--time",
            "10",
            *options,
        ]
        path = os.pathsep.join(filter(None, [HOOK, os.environ.get("PYTHONPATH")]))
        self.env = cluster.env | {"PYTHONPATH": path, "INGOT_TEST_FAULT": json.dumps(fault or None)}

    def ingot(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run([sys.executable, "-m", "ingot.cli.main", *arguments], env=self.env, capture_output=True,
                              text=True, cwd=self.folder.parent, timeout=120)  # fmt: skip
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def submit(self, code: int = 0) -> "Launched":
        self.said = self.ingot("launch", "slurm", *ARGUMENTS, *self.options, code=code)
        return self

    @property
    def job(self) -> str:
        return json.loads((self.folder / "launch" / "jobs.jsonl").read_text().splitlines()[-1])["id"]

    def states(self) -> list[str]:
        return self.cluster.ask("squeue", "-h", "-r", "-t", "all", "-j", self.job, "-o", "%T").split()

    def wait(self, seen: Callable[[], object], seconds: float = 150) -> None:
        end = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < end, (self.states(), self.output())
            time.sleep(0.05)

    def wait_for_batch(self, batch: int) -> None:
        path = self.folder / "metrics.jsonl"
        self.wait(lambda: path.exists() and path.read_bytes().count(b"\n") >= batch)

    def wait_for_end(self) -> None:
        living = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"}
        self.wait(lambda: not living & set(self.states()))

    def output(self) -> str:
        return "".join(p.read_text() for p in sorted((self.folder / "launch").rglob("*.out")))


def test_a_run_on_two_nodes_is_the_run_on_two_local_processes(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    run = Launched(cluster, data, tmp_path / "run").submit()
    assert "2 nodes x 1 process," in run.said
    run.wait_for_end()
    assert run.states() == ["COMPLETED"], run.output()
    assert_as_if_nothing_happened(run.folder, whole)
    status = run.ingot("status", run.job)
    assert "state: finished" in status and "attempts: 1, failures: 0" in status
    assert "on n1,n2" in run.ingot("logs", str(run.folder))
    assert oct((run.folder / "launch" / "spec.json").stat().st_mode)[-3:] == "600"


@slow
def test_a_killed_rank_is_started_again_inside_the_allocation(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    run = Launched(
        cluster, data, tmp_path / "run", kind="kill", rank=1, batch=11, once=str(tmp_path / "struck")
    ).submit()
    run.wait_for_end()
    assert run.states() == ["COMPLETED"], run.output()
    (failure,) = read_failures(run.folder)
    assert failure["host"] in ("n1", "n2") and failure["rank"] == 1 and "signal 9" in failure["message"]
    assert failure["message"] in run.ingot("logs", str(run.folder), "--errors")
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_a_killed_node_agent_is_a_failure_and_not_a_request_to_stop(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """As by the OOM killer. Without a spare, a new agent starts on the same node."""
    run = Launched(cluster, data, tmp_path / "run", kind="slow", rank=0, batch=1, attempts="all").submit()
    run.wait_for_batch(10)
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process that has just ended
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"ingot.launch.agent.cluster_agent" in words and b"SLURMD_NODENAME=n2" in (
                path / "environ"
            ).read_bytes().split(b"\0"):
                os.kill(int(path.name), signal.SIGKILL)
    run.wait_for_end()
    assert run.states() == ["COMPLETED"], run.output()
    assert f"attempt {run.job}.0.2 on n1,n2" in run.output()
    assert [(failure["kind"], failure["host"]) for failure in read_failures(run.folder)] == [("lost", "n2")]
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_a_user_error_ends_the_chain(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    run = Launched(cluster, data, tmp_path / "run", "data.train.path=/nowhere", "--chain", "3").submit()
    run.wait_for_end()
    assert (run.folder / "launch" / "HALT").read_text().startswith("/nowhere")
    assert len(read_failures(run.folder)) == 1
    assert "state: halted" in run.ingot("status", str(run.folder))


@slow
def test_scancel_saves_and_nothing_starts_again(cluster: Cluster, data: Path, whole: Path, tmp_path: Path) -> None:
    run = Launched(cluster, data, tmp_path / "run", kind="slow", rank=0, batch=1, attempts="all").submit()
    run.wait_for_batch(6)
    cluster.ask("scancel", run.job)
    run.wait_for_end()
    assert run.states() == ["CANCELLED"]
    steps = sorted(int(p.name) for p in (run.folder / "checkpoints").iterdir())
    assert steps[-1] >= 6 and not (run.folder / "FINISHED").exists()
    run.env["INGOT_TEST_FAULT"] = "null"
    run.ingot("launch", "resume", str(run.folder))
    run.wait_for_end()
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_the_time_limit_is_passed_on_by_a_chain(cluster: Cluster, data: Path, whole: Path, tmp_path: Path) -> None:
    """Asked after 100 s, of a limit of two minutes; the steps take 108 s, so that one job cannot finish."""
    limits = ["--time", "2", "--signal-seconds", "20", "--chain", "6"]
    run = Launched(
        cluster, data, tmp_path / "run", *limits, kind="slow", rank=0, batch=1, attempts="all", seconds=4.5
    ).submit()
    run.wait(lambda: (run.folder / "FINISHED").exists(), 400)
    run.wait_for_end()
    assert "requeue: the time limit of the job was reached" in run.output()
    assert_as_if_nothing_happened(run.folder, whole)
    assert not read_failures(run.folder)


@slow
def test_nodes_that_can_never_be_given_the_image_halt_the_run(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    image = tmp_path / "ingot.sqsh"
    image.write_bytes(b"an image")
    (tmp_path / "ingot.sqsh.sha256").write_text(f"{hashlib.sha256(b'an image').hexdigest()}  ingot.sqsh\n")
    run = Launched(cluster, data, tmp_path / "run", "--image", str(image), "--stage", "/proc/nowhere").submit()
    run.wait_for_end()
    assert run.states() == ["FAILED"] and run.output().count("attempt ") == 2, run.output()  # it began, and ended
    said = run.ingot("status", str(run.folder))
    assert "state: halted" in said and f"cannot copy {image} to /proc/nowhere on any node" in said


@slow
def test_the_second_of_a_chain_of_four_finishes_and_the_rest_ends_at_once(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    run = Launched(
        cluster, data, tmp_path / "run", "--chain", "4", kind="slow", rank=0, batch=1, attempts="all"
    ).submit()
    run.wait_for_batch(10)
    cluster.ask("scancel", "--signal=KILL", "--full", f"{run.job}_1")  # all at once, as by a power cut
    run.wait_for_end()
    assert sorted(run.states()) == ["CANCELLED", *["COMPLETED"] * 3]
    assert run.output().count("nothing to do") == 2 and run.output().count("finish: the run is complete") == 1
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_requeueing_appends_to_the_log_and_continues(cluster: Cluster, data: Path, whole: Path, tmp_path: Path) -> None:
    run = Launched(cluster, data, tmp_path / "run", kind="slow", rank=0, batch=1, attempts="all").submit()
    run.wait_for_batch(10)
    cluster.ask("scontrol", "requeue", run.job)
    run.wait(lambda: (run.folder / "FINISHED").exists())
    run.wait_for_end()
    assert f"attempt {run.job}.0.1 on" in run.output() and f"attempt {run.job}.1.1 on" in run.output()
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_a_dead_node_is_replaced_by_a_spare(cluster: Cluster, data: Path, whole: Path, tmp_path: Path) -> None:
    run = Launched(
        cluster, data, tmp_path / "run", "--spares", "1", kind="slow", rank=0, batch=1, attempts="all"
    ).submit()
    run.wait_for_batch(10)
    cluster.kill_node("n2")
    try:
        run.wait(lambda: (run.folder / "FINISHED").exists())
        run.wait_for_end()
    finally:
        cluster.start_node("n2")
    assert "on n1,n3" in run.output()
    assert "n2" in run.ingot("status", str(run.folder))
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_when_the_first_node_dies_the_job_is_requeued_and_meets_elsewhere(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """F30: with it go the store, rank 0 and the job script."""
    run = Launched(cluster, data, tmp_path / "run", kind="slow", rank=0, batch=1, attempts="all").submit()
    run.wait_for_batch(10)
    cluster.kill_node("n1")
    try:
        run.wait(lambda: (run.folder / "FINISHED").exists())
        run.wait_for_end()
    finally:
        cluster.start_node("n1")
    assert f"attempt {run.job}.1.1 on n2,n3" in run.output()
    assert "n1" in [closed.cause.node for closed in closed_attempts(run.folder)]
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_two_launches_of_one_folder_a_silent_controller_and_a_refusal_are_told_apart(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    run = Launched(cluster, data, tmp_path / "run", kind="slow", rank=0, batch=1, attempts="all", seconds=3.0).submit()
    run.wait_for_batch(2)
    second = Launched(cluster, data, run.folder).submit(code=2)
    assert "already has a job" in second.said
    cluster.stop_controller()
    try:
        assert "state: running" in run.ingot("status", str(run.folder))  # the folder knows more than Slurm
        assert "cannot tell whether a job" in Launched(cluster, data, run.folder).submit(code=2).said
    finally:
        cluster.start_controller()
    assert "asked" in run.ingot("stop", str(run.folder))
    run.wait_for_end()
    assert not (run.folder / "FINISHED").exists()
    refused = Launched(cluster, data, tmp_path / "other", "-p", "nowhere").submit(code=1)
    assert "sbatch failed" in refused.said and "job.sh" in refused.said
    assert not (tmp_path / "other" / "launch" / "jobs.jsonl").exists()
