"""Faults that stay with a node, come at start-up, or are in what all nodes share, on a real Slurm: every one ends within
a stated time, with the right culprit or none, and the run that goes on is the undisturbed one.

A device error cannot be caused for real: it is injected as the exception that torch raises. The rest is real: killed
processes and nodes, stopped and hanging ranks, full disks, missing programs, cut cables.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from runs import assert_as_if_nothing_happened
from state_records import StateRecords
from test_slurm import Launched, whole

from ingot.launch.supervisor import judge
from ingot.launch.supervisor.records import Closed, Excluded, Judged, Opened, Started, StopRequested

__all__ = ["cluster", "whole"]
slow = pytest.mark.slow
ALL = {"kind": "slow", "rank": 0, "batch": 1, "attempts": "all"}


class Watched(StateRecords, Launched):
    """A run of the cluster and its records."""

    def log(self) -> str:
        return "".join(path.read_text() for path in (self.folder / "launch").glob("slurm-*.out"))

    def second_start(self) -> int:
        """The number of its first record; all of them, if the job has not started again."""
        records = self.records
        starts = [number for number, record in enumerate(records) if isinstance(record, Started)]
        return starts[1] if len(starts) > 1 else len(records)

    def end(self, state: str = "COMPLETED", seconds: float = 240) -> None:
        self.wait(lambda: set(self.states()) <= {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"}, seconds)
        assert self.states() == [state], (self.states(), self.output())


@pytest.fixture
def usual(cluster: Cluster) -> Iterator[None]:
    """Whatever a test does to the nodes, the next one finds them idle."""
    yield
    cluster.restore()


@pytest.mark.usefixtures("usual")
class TestFaults:
    @slow
    def test_a_device_error_on_a_node_brings_the_spare(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """G1."""
        run = Watched(
            cluster, data, tmp_path / "run", "--spares", "1", kind="device", node="n2", batch=11, attempts="all"
        )
        run.submit().end()
        assert run.causes == [("device", "n2"), ("finished", "")] and run.nodes == [("n1", "n2"), ("n1", "n3")]
        assert judge.strikes(run.records) == {"n2": 1}
        assert_as_if_nothing_happened(run.folder, whole)

    @slow
    def test_the_same_error_on_one_node_moves_and_on_two_is_final(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        run = Watched(cluster, data, tmp_path / "run", "--spares", "1", kind="exception", node="n2", batch=11,
                      attempts="all")  # fmt: skip
        run.submit().end()
        assert run.causes == [("program", "n2")] * 2 + [("finished", "")] and run.nodes[-1] == ("n1", "n3")
        assert_as_if_nothing_happened(run.folder, whole)
        everywhere = Watched(cluster, data, tmp_path / "other", "--spares", "1", kind="exception", rank=1, batch=11,
                             attempts="all")  # fmt: skip
        everywhere.submit().end("FAILED")
        assert "different nodes" in everywhere.of(Judged)[-1].reason and judge.strikes(everywhere.records) == {}

    @slow
    @pytest.mark.parametrize(("kind", "node"), [("stop", "n2"), ("gil", "n2"), ("python", "n1"), ("gil", "n1")])
    def test_the_node_that_hangs_is_named(
        self, cluster: Cluster, data: Path, tmp_path: Path, kind: str, node: str
    ) -> None:
        """H1 to H3: whichever node's agent is the first to notice."""
        run = Watched(cluster, data, tmp_path / "run", "hang_timeout=4", kind=kind, node=node, batch=11,
                      once=str(tmp_path / "struck"))  # fmt: skip
        run.submit().end()
        assert run.causes == [("hang", node), ("finished", "")], run.output()
        hang = run.of(Closed)[0]
        assert set(judge.strikes(run.records)) == ({node} if kind == "stop" else set())
        assert hang.cause.batch == 11

    @slow
    def test_a_lost_agent_is_named_with_its_signal(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """L4: as by the out-of-memory killer."""
        run = Watched(cluster, data, tmp_path / "run", kind="agent", node="n2", batch=11, once=str(tmp_path / "struck"))
        run.submit().end()
        assert run.causes == [("lost", "n2"), ("finished", "")] and run.nodes == [("n1", "n2")] * 2
        assert "Killed" in run.of(Closed)[0].cause.message or "137" in run.of(Closed)[0].cause.message
        assert not run.of(StopRequested)
        assert_as_if_nothing_happened(run.folder, whole)

    @slow
    def test_a_node_that_dies_and_is_back_at_once_is_replaced(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """P1: faster than Slurm notices."""
        run = Watched(cluster, data, tmp_path / "run", "--spares", "1", **ALL).submit()
        run.wait_for_batch(10)
        cluster.reboot_node("n2")
        run.end()
        assert run.causes[0] == ("lost", "n2") and run.nodes[1] == ("n1", "n3")
        assert_as_if_nothing_happened(run.folder, whole)

    @slow
    def test_a_node_without_python_is_replaced_at_once(self, cluster: Cluster, data: Path, tmp_path: Path) -> None:
        """P3: srun knows, and need not be waited for."""
        program = os.path.realpath(sys.executable)
        cluster.on("n2", "mount", "--bind", "/dev/null", program)
        run = Watched(cluster, data, tmp_path / "run", "max_duration=2ba", "--spares", "1")
        run.submit().end()
        assert run.causes == [("silent", "n2"), ("finished", "")] and run.nodes == [("n1", "n2"), ("n1", "n3")]
        assert judge.strikes(run.records) == {}

    @slow
    def test_a_batch_host_that_dies_each_time_is_bounded_and_named(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """L3."""
        run = Watched(cluster, data, tmp_path / "run", **ALL).submit()
        run.wait(lambda: run.of(Opened))
        cluster.kill_node("n1")
        run.wait(lambda: run.of(Closed), 120)
        cluster.start_node("n1")
        run.end()
        assert run.causes[0] in (("lost", "n1"), ("supervisor", "n1")) and run.causes[-1] == ("finished", "")
        assert_as_if_nothing_happened(run.folder, whole)

    @slow
    def test_a_batch_host_that_dies_and_is_back_at_once_is_not_used_again(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """I8: when Slurm starts the job again, nothing seems wrong with the node."""
        run = Watched(cluster, data, tmp_path / "run", **ALL).submit()
        run.wait_for_batch(6)
        cluster.reboot_node("n1")
        run.end()
        assert run.causes == [("lost", "n1"), ("finished", "")] and run.nodes == [("n1", "n2"), ("n2", "n3")]
        assert "n1 died and came back: its slurmd was started" in run.of(Closed)[0].cause.message
        assert judge.strikes(run.records) == {"n1": 1}
        assert_as_if_nothing_happened(run.folder, whole)

    @slow
    def test_a_supervisor_that_is_killed_costs_an_attempt_and_not_the_job(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """As by the out-of-memory killer; with a spare, there is a deputy too."""
        run = Watched(cluster, data, tmp_path / "run", "--spares", "1", **ALL).submit()
        run.wait_for_batch(6)
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "cmdline").read_bytes()
                if b"launch.supervisor.main" in words and str(run.folder).encode() in words:
                    os.kill(int(path.name), signal.SIGKILL)
        run.end()
        assert run.causes == [("supervisor", "n1"), ("finished", "")] and run.nodes == [("n1", "n2")] * 2
        assert {(started.job, started.restart) for started in run.of(Started)} == {(run.job, 0)}
        assert "the supervisor was killed by signal 9; it is started again" in run.log()
        assert judge.strikes(run.records) == {} and not run.of(Excluded)
        assert_as_if_nothing_happened(run.folder, whole)

    @slow
    def test_the_last_job_of_a_chain_queues_itself_and_no_other(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """Its id is that of the chain, of which Slurm still knows the jobs that have ended."""
        run = Watched(cluster, data, tmp_path / "run", "--chain", "2", **ALL).submit()
        for element, batch in ((1, 6), (2, 12)):
            run.wait_for_batch(batch)
            cluster.ask("scancel", "--batch", "--signal=USR2", f"{run.job}_{element}")
        run.wait(lambda: (run.folder / "FINISHED").exists())
        run.wait_for_end()
        (first, _), *others = [(started.job, started.restart) for started in run.of(Started)]
        assert first != run.job and others == [(run.job, 0), (run.job, 1)] and "nothing to do" not in run.log()
        assert_as_if_nothing_happened(run.folder, whole)

    @slow
    def test_the_next_job_of_a_chain_starts_on_other_nodes(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        run = Watched(cluster, data, tmp_path / "run", "--chain", "2", kind="device", node="n2", batch=11,
                      attempts="all")  # fmt: skip
        run.submit()
        run.wait(lambda: (run.folder / "FINISHED").exists())
        run.wait_for_end()
        assert [started.nodes for started in run.of(Started)] == [("n1", "n2"), ("n1", "n3")]
        assert run.causes == [("device", "n2"), ("finished", "")]
        assert_as_if_nothing_happened(run.folder, whole)

    @slow
    def test_a_drained_node_is_replaced_and_keeps_its_good_name(
        self, cluster: Cluster, data: Path, whole: Path, tmp_path: Path
    ) -> None:
        """C2."""
        run = Watched(cluster, data, tmp_path / "run", "--spares", "1", kind="exception", rank=1, batch=11,
                      once=str(tmp_path / "struck"), after=str(tmp_path / "drained")).submit()  # fmt: skip
        run.wait_for_batch(5)
        cluster.ask("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=maintenance")
        (tmp_path / "drained").touch()
        run.end()
        (out,) = run.of(Excluded)
        assert (out.node, out.is_drained) == ("n1", True) and run.nodes[1] == ("n3", "n2")
        assert judge.strikes(run.records) == {}
        assert_as_if_nothing_happened(run.folder, whole)

    @slow
    def test_a_stop_during_start_up_is_not_lost(self, cluster: Cluster, data: Path, tmp_path: Path) -> None:
        """S1."""
        run = Watched(cluster, data, tmp_path / "run", **ALL).submit()
        run.wait(lambda: "preflight" in run.phases())
        run.ingot("stop", str(run.folder))
        run.end()
        assert [stop.reason for stop in run.of(StopRequested)] == ["user"]
        assert not (run.folder / "FINISHED").exists() and run.of(Judged)[-1].action == "stop"

    @slow
    def test_the_time_limit_before_the_first_step_ends_the_run(
        self, cluster: Cluster, data: Path, tmp_path: Path
    ) -> None:
        """L2, S2: not a single start more."""
        run = Watched(cluster, data, tmp_path / "run", **ALL).submit()
        run.wait(lambda: "hello" in run.phases())
        cluster.ask("scancel", "--batch", "--signal=USR2", run.job)
        run.end("FAILED")
        assert run.of(Judged)[-1].action == "halt" and "shorter than start-up" in run.of(Judged)[-1].reason
        assert "shorter" in cluster.ask("scontrol", "show", "job", run.job), "the job's comment says why"

    @slow
    def test_wall_time_ends_the_launch(self, cluster: Cluster, data: Path, tmp_path: Path) -> None:
        """L5: no chain and no requeue makes more of it than the user asked for."""
        run = Watched(cluster, data, tmp_path / "run", "max_wall_time=1sec", "--chain", "2", **ALL).submit()
        run.wait(lambda: set(run.states()) <= {"COMPLETED"})
        assert [stop.reason for stop in run.of(StopRequested)] == ["wall-time"] and len(run.of(Opened)) == 1

    @slow
    def test_a_full_run_folder_blames_no_node_and_the_run_goes_on_when_there_is_room(
        self, cluster: Cluster, data: Path, tmp_path: Path
    ) -> None:
        """D1f."""
        run = Watched(cluster, data, cluster.small / "run", "--no-preflight", **ALL).submit()
        run.wait_for_batch(6)
        filler = cluster.small / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=64k"], capture_output=True)
        try:
            run.wait(
                lambda: "No space left" in cluster.ask("scontrol", "show", "job", run.job) or "wait" in run.log(), 90
            )
        finally:
            filler.unlink()
        run.end()
        assert not run.of(Excluded) and judge.strikes(run.records) == {}
        assert {kind for kind, _ in run.causes} <= {"site", "finished"}


def test_the_agents_have_the_token_and_the_ranks_do_not(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    run = Watched(cluster, data, tmp_path / "run", **ALL).submit()
    run.wait_for_batch(3)
    ranks = agents = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, env = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if str(run.folder).encode() not in words + env:
            continue
        assert b"INGOT_JOB_TOKEN" not in words
        if b"ingot.launch.agent.rank_main" in words:
            ranks += 1
            assert b"INGOT_JOB_TOKEN" not in env
        agents += b"ingot.launch.agent.cluster_agent" in words and b"srun" not in words
    run.ingot("stop", str(run.folder))
    run.end()
    assert ranks == 2 and agents >= 2
