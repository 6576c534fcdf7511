"""What a cluster does to a job that is not at fault, on a real Slurm: it preempts it, changes its time limit, or its
administrator queues it again. Whatever the moment, the run goes on, and ends as the undisturbed one."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from runs import ARGUMENTS, assert_as_if_nothing_happened
from test_slurm import whole
from test_slurm_faults import ALL, Watched, usual

from ingot.launch.supervisor import judge
from ingot.launch.supervisor.records import Excluded, Judged, Started, StopRequested

__all__ = ["cluster", "usual", "whole"]
pytestmark = [pytest.mark.slow]
GRACE_SECONDS = 60
PREEMPTION = f"""
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=requeued Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_SECONDS} MaxTime=INFINITE State=UP
PartitionName=canceled Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime={GRACE_SECONDS} MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def preempting(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[Cluster]:
    """Another cluster (`cluster` is named only because it skips where there is no Slurm). After a job,
    its epilog waits until the file `dirty` is gone."""
    folder = tmp_path_factory.mktemp("preempting")
    two = Cluster(folder, 2, 3, f"{PREEMPTION}Epilog={folder}/epilog\n")
    (folder / "epilog").write_text(f"#!/bin/bash\nwhile test -e {folder}/dirty; do sleep 0.1; done\n")
    (folder / "epilog").chmod(0o755)
    try:
        two.start()
        yield two
    finally:
        two.stop()


def urgent_job(cluster: Cluster, folder: Path) -> None:
    """A job that needs all nodes now, for a few seconds."""
    script = folder / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 5\n")
    command = ["sbatch", "-p", "urgent", "-N", "2", "--exclusive", "-o", "/dev/null", str(script)]
    subprocess.run(command, env=cluster.env, check=True, capture_output=True)


@pytest.mark.parametrize("partition", ["requeued", "canceled"])
def test_a_preempted_job_saves_in_its_grace_time_and_comes_back(
    preempting: Cluster, data: Path, whole: Path, tmp_path: Path, partition: str
) -> None:
    """Slurm sends TERM to the agents, as `scancel` does; it also says that the job is preempted."""
    run = Watched(preempting, data, tmp_path / "run", "-p", partition, **ALL).submit()
    run.wait_for_batch(6)
    urgent_job(preempting, tmp_path)
    run.wait(lambda: (run.folder / "FINISHED").exists(), 240)
    run.wait_for_end()
    assert [stop.reason for stop in run.of(StopRequested)] == ["preempt"], run.output()
    first, second = run.of(Started)
    assert second.step >= 6 and second.job == first.job, "it saved when it was asked, and not only every four batches"
    assert run.of(Judged)[0].reason == "the job was preempted" and not run.of(Excluded)
    assert judge.strikes(run.records) == {}
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_job_that_is_preempted_before_its_first_step_comes_back(
    preempting: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """Nothing is new in the queue, but the nodes were taken away: not the run's fault."""
    run = Watched(preempting, data, tmp_path / "run", "-p", "requeued").submit()
    run.wait(lambda: "preflight" in run.phases())
    urgent_job(preempting, tmp_path)
    run.wait(lambda: (run.folder / "FINISHED").exists(), 240)
    run.wait_for_end()
    assert len(run.of(Started)) == 2 and {stop.reason for stop in run.of(StopRequested)} <= {"preempt"}
    assert_as_if_nothing_happened(run.folder, whole)


def test_while_nodes_are_cleaned_up_after_a_job_the_run_waits_to_be_continued(
    preempting: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    dirty = preempting.folder / "dirty"
    dirty.touch()
    try:
        run = Watched(preempting, data, tmp_path / "run", **ALL).submit()
        run.wait_for_batch(6)
        run.ingot("stop", str(run.folder))
        run.wait(lambda: run.states() == ["COMPLETING"])
        status = json.loads(run.ingot("status", "--json", str(run.folder)))
        assert status["state"].startswith("stopped") and status["jobs"] == {run.job: "COMPLETING"}, status
        refused = run.ingot("launch", "resume", str(run.folder), code=2)
        assert "wait until Slurm has cleaned up after it, then try again" in refused
    finally:
        dirty.unlink()
    run.wait_for_end()
    run.ingot("launch", "resume", str(run.folder))
    run.wait(lambda: (run.folder / "FINISHED").exists(), 240)
    run.wait_for_end()
    assert_as_if_nothing_happened(run.folder, whole)


@pytest.mark.usefixtures("usual")
class TestLimits:
    def test_a_limit_that_is_shortened_during_the_run_still_leaves_time_to_save(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """To one minute, of which the last 15 s are for the save; the limit holds for the next start, too."""
        run = Watched(cluster, data, tmp_path / "run", "--signal-seconds", "15", **(ALL | {"seconds": 2.5})).submit()
        run.wait_for_batch(2)
        cluster.ask("scontrol", "update", f"JobId={run.job}", "TimeLimit=1")
        run.wait(lambda: (run.folder / "FINISHED").exists(), 400)
        run.wait_for_end()
        stops = [stop.reason for stop in run.of(StopRequested)]
        assert stops and set(stops) == {"time-limit"} and len(run.of(Started)) == len(stops) + 1
        assert_as_if_nothing_happened(run.folder, whole)

    def test_a_limit_that_is_extended_during_the_run_is_used(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """It would save and stop after 80 s, and its steps take longer."""
        limits = ["--time", "3", "--signal-seconds", "100"]
        run = Watched(cluster, data, tmp_path / "run", *limits, **(ALL | {"seconds": 4.0})).submit()
        run.wait_for_batch(2)
        cluster.ask("scontrol", "update", f"JobId={run.job}", "TimeLimit=10")
        run.end(seconds=300)
        assert not run.of(StopRequested) and len(run.of(Started)) == 1
        assert_as_if_nothing_happened(run.folder, whole)

    @pytest.mark.parametrize("how", ["asked", "over"])
    def test_the_time_limit_during_a_save_loses_nothing(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path, how: str
    ) -> None:
        """The save takes ten seconds. Asked: USR2. Over: what Slurm does then, TERM to all, and KILL after KillWait."""
        save = {"kind": "slow", "rank": 0, "batch": 8, "phase": "save", "seconds": 10.0}
        run = Watched(cluster, data, tmp_path / "run", "--chain", "2")
        run.env["INGOT_TEST_FAULT"] = json.dumps([ALL, save | {"once": str(tmp_path / "saving")}])
        run.submit()
        run.wait((tmp_path / "saving").exists)
        if how == "asked":
            cluster.ask("scancel", "--batch", "--signal=USR2", f"{run.job}_1")
        else:
            cluster.ask("scancel", "--signal=KILL", "--full", f"{run.job}_1")
        run.wait(lambda: (run.folder / "FINISHED").exists(), 240)
        run.wait_for_end()
        assert [stop.reason for stop in run.of(StopRequested)] == ["time-limit" if how == "asked" else "signal"]
        assert_as_if_nothing_happened(run.folder, whole)

    def test_a_save_that_outlasts_the_time_limit_is_given_up_and_the_job_comes_back(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """It is asked to save in time, and the disk takes minutes: between TERM and KILL, the job is queued again."""
        save = {"kind": "slow", "rank": 0, "batch": 8, "phase": "save", "seconds": 300.0}
        run = Watched(cluster, data, tmp_path / "run", "--signal-seconds", "15")
        run.env["INGOT_TEST_FAULT"] = json.dumps([ALL, save | {"once": str(tmp_path / "saving")}])
        run.submit()
        run.wait((tmp_path / "saving").exists)
        cluster.ask("scontrol", "update", f"JobId={run.job}", "TimeLimit=1")
        run.wait(lambda: len(run.of(Started)) > 1, 200)
        cluster.ask("scontrol", "update", f"JobId={run.job}", "TimeLimit=10")
        run.wait(lambda: (run.folder / "FINISHED").exists(), 200)
        run.wait_for_end()
        assert [stop.reason for stop in run.of(StopRequested)] == ["time-limit"] and len(run.of(Started)) == 2
        assert run.of(Judged)[0].action == "requeue" and run.of(Started)[1].step >= 4
        assert_as_if_nothing_happened(run.folder, whole)

    @pytest.mark.parametrize("phase", ["preflight", "starting"])
    def test_a_job_that_its_administrator_queues_again_during_start_up_loses_nothing(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path, phase: str
    ) -> None:
        run = Watched(cluster, data, tmp_path / "run").submit()
        run.wait(lambda: phase in run.phases())
        cluster.ask("scontrol", "requeue", run.job)
        run.wait(lambda: len(run.of(Started)) > 1)
        run.end()
        assert len(run.of(Started)) == 2 and not run.of(Excluded) and judge.strikes(run.records) == {}
        assert_as_if_nothing_happened(run.folder, whole)

    def test_a_stop_signal_before_there_is_a_supervisor_ends_the_job(
        self, cluster: Cluster, data: Path, tmp_path: Path
    ) -> None:
        """S2: in the first second. The guard takes a minute to start here."""
        guard, began = tmp_path / "hook" / "sitecustomize.py", tmp_path / "began"
        guard.parent.mkdir()
        wait = f"open({str(began)!r}, 'w').close(); time.sleep(60)"
        guard.write_text(f"import sys, time\nif 'ingot.launch.slurm.guard' in sys.orig_argv: {wait}\n")
        run = Watched(cluster, data, tmp_path / "run", **ALL)
        run.env |= {"PYTHONPATH": str(guard.parent)}
        run.submit().wait(began.exists)
        cluster.ask("scancel", "--batch", "--signal=USR2", run.job)
        run.end("FAILED")
        assert f"ExitCode=0:{int(signal.SIGUSR2)}" in cluster.ask("scontrol", "--oneliner", "show", "job", run.job)
        assert len(run.of(Started)) <= 1 and not (run.folder / "metrics.jsonl").exists()
        assert not run.of(Excluded) and judge.strikes(run.records) == {}

    def test_a_job_in_special_exit_is_still_the_only_one_of_its_run(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """C3."""
        run = Watched(cluster, data, tmp_path / "run", **ALL).submit()
        run.wait_for_batch(6)
        cluster.ask("scontrol", "requeuehold", "State=SpecialExit", run.job)
        run.wait(lambda: run.states() == ["SPECIAL_EXIT"])
        job = run.job
        refused = run.ingot("launch", "slurm", *ARGUMENTS, *run.options, code=2)
        assert "already has a job" in refused and job in refused and run.job == job
        assert "state: held" in run.ingot("status", str(run.folder))
        time.sleep(1)
        cluster.ask("scontrol", "release", job)
        run.wait(lambda: (run.folder / "FINISHED").exists(), 240)
        run.wait_for_end()
        assert_as_if_nothing_happened(run.folder, whole)

    def test_a_job_that_is_held_again_goes_on_when_it_is_released(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """C4."""
        run = Watched(cluster, data, tmp_path / "run", **ALL).submit()
        run.wait_for_batch(6)
        cluster.ask("scontrol", "requeuehold", run.job)
        run.wait(lambda: run.states() == ["REQUEUE_HOLD"] or "PENDING" in run.states())
        assert "state: held" in run.ingot("status", str(run.folder))
        time.sleep(1)
        cluster.ask("scontrol", "release", run.job)
        run.wait(lambda: (run.folder / "FINISHED").exists(), 240)
        run.wait_for_end()
        assert_as_if_nothing_happened(run.folder, whole)
