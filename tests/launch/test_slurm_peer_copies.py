"""A node of a real Slurm job dies, and a spare in its place continues from the copy of its ranks on another node: later
than the last checkpoint, bitwise as if nothing had happened, with the right node named."""

import os
import signal
import time
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from runs import Run, assert_as_if_nothing_happened
from test_slurm import whole
from test_slurm_faults import Watched, usual
from test_slurm_node_faults import rank_process

from ingot.launch.peer_copies.sender import LOOK_SECONDS
from ingot.launch.supervisor import judge

__all__ = ["cluster", "usual", "whole"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("usual")]


class Copied(Watched):
    """A run that holds in batch 15 on a node until the copies of batch 14 have arrived where they are kept."""

    def __init__(self, cluster: Cluster, data: Path, folder: Path, *options: str, node: str = "n2"):
        self.go = folder.parent / "go"
        super().__init__(cluster, data, folder, "snapshot_interval=2ba", "save_interval=8ba", *options, kind="python",
                         node=node, batch=15, once=str(folder.parent / "struck"), after=str(self.go))  # fmt: skip

    def wait_for_copies(self) -> None:
        self.submit()
        self.wait_for_batch(14)
        time.sleep(1 + 2 * LOOK_SECONDS)

    def end_as_if_nothing_happened(self, whole: Path) -> None:
        self.go.touch()
        self.end()
        assert_as_if_nothing_happened(self.folder, whole)


@pytest.mark.parametrize("is_back", [False, True])
def test_a_spare_for_a_node_that_dies_continues_from_the_copy_on_another(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path, is_back: bool
) -> None:
    run = Copied(cluster, data, tmp_path / "run", "--spares", "1")
    run.wait_for_copies()
    (cluster.reboot_node if is_back else cluster.kill_node)("n2")
    run.end_as_if_nothing_happened(whole)
    assert run.causes == [("lost", "n2"), ("finished", "")] and run.nodes == [("n1", "n2"), ("n1", "n3")]
    assert set(judge.strikes(run.records)) <= {"n2"}
    assert "n3 fetches the copy of batch 14 of node 1's ranks from n1" in run.output()
    assert "resumed from host memory at batch 14" in run.output()
    assert not (run.folder / "checkpoints" / "14").exists()


def test_an_agent_that_is_killed_and_started_again_fetches_what_it_had(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """As by the out-of-memory killer; there is no spare."""
    run = Copied(cluster, data, tmp_path / "run")
    run.wait_for_copies()
    run.go.touch()  # otherwise the rank waits again after the restart, which is on the same node
    run.wait((tmp_path / "struck").exists)
    pid, _ = rank_process(run, 1)
    assert pid
    agent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    run.end_as_if_nothing_happened(whole)
    assert run.causes == [("lost", "n2"), ("finished", "")] and run.nodes == [("n1", "n2")] * 2
    assert "n2 fetches the copy of batch 14 of node 1's ranks from n1" in run.output()
    assert "resumed from host memory at batch 14" in run.output()


@pytest.fixture
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one local process, undisturbed."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    Run(data, folder, nproc=1).run()
    return folder


def test_a_spare_for_the_only_node_continues_from_the_copy_that_it_holds(
    cluster: Cluster, data: Path, alone: Path, tmp_path: Path
) -> None:
    """The agent is killed, as by the out-of-memory killer, and the supervisor on the same node lives. (Were it to die,
    the job would go back into the queue, and Slurm would end the spare's agent with the copies in its memory.)"""
    run = Copied(cluster, data, tmp_path / "run", "-N", "1", "--spares", "1", node="n1")
    run.wait_for_copies()
    assert "on this node and on a spare; a restart" in run.output()
    pid, _ = rank_process(run, 0)
    os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    run.end_as_if_nothing_happened(alone)
    assert run.causes == [("lost", "n1"), ("finished", "")] and run.nodes == [("n1",), ("n2",)]
    assert "n2 fetches the copy of batch 14 of node 0's ranks from n2" in run.output()
    assert "resumed from host memory at batch 14" in run.output()
    assert not (run.folder / "checkpoints" / "14").exists()


def test_without_another_node_or_a_spare_the_decision_says_that_no_copy_is_elsewhere(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    run = Watched(cluster, data, tmp_path / "run", "-N", "1", "max_duration=4ba", "snapshot_interval=2ba").submit()
    run.end()
    assert "on this node, on no other (there is neither another node nor a spare)" in run.output()
