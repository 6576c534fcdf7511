"""Nodes whose loss makes Slurm end more than what ran on them, on a real Slurm: the agents of other nodes, or the whole
job. The lost node is named, nobody counts as having asked for a stop, and the run ends as the undisturbed one."""

import os
import subprocess
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from runs import HOOK, assert_as_if_nothing_happened
from test_slurm import whole
from test_slurm_faults import ALL, Watched, usual

from ingot.launch.supervisor import judge
from ingot.launch.supervisor.records import Closed, Excluded, Judged, Started, StopRequested

__all__ = ["cluster", "usual", "whole"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("usual")]

ONE_SRUN = """
import runpy, sys
if "ingot.launch.supervisor.main" in sys.orig_argv:
    import ingot.launch.slurm.allocation
    ingot.launch.slurm.allocation.MAX_SRUNS = 1
runpy.run_path({hook!r})
"""


@pytest.mark.parametrize(("phase", "chain"), [("hello", 1), ("preflight", 2), ("running", 2)])
def test_without_spares_a_node_that_is_cut_off_is_lost_and_nobody_has_asked_for_a_stop(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path, phase: str, chain: int
) -> None:
    """Slurm sends TERM to the agents that are left, and queues the job again by itself."""
    run = Watched(cluster, data, tmp_path / "run", "--chain", str(chain), **ALL).submit()
    run.wait(lambda: phase in run.phases())
    subprocess.run(["ip", "link", "set", f"{cluster.bridge}.2", "down"], check=True, env=cluster.env)
    run.wait(lambda: (run.folder / "FINISHED").exists(), 240)
    run.wait_for_end()
    assert not run.of(StopRequested), run.output()
    if phase != "hello" or run.causes[0] != ("silent", "n2"):  # srun had not reached it yet
        assert run.causes == [("lost", "n2"), ("finished", "")], run.output()
        assert run.of(Closed)[0].cause.is_local and judge.strikes(run.records) == {"n2": 1}
    assert [out.node for out in run.of(Excluded)] == ["n2"] and run.of(Judged)[0].action == "requeue"
    assert [start.nodes for start in run.of(Started)][:2] == [("n1", "n2"), ("n1", "n3")]
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_spare_for_whose_reboot_srun_ends_all_agents_is_named(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """As in a job of more than 32 nodes, where the agents of several nodes share an srun."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(ONE_SRUN.format(hook=f"{HOOK}/sitecustomize.py"))
    run = Watched(cluster, data, tmp_path / "run", "--spares", "1", **(ALL | {"seconds": 1.5}))
    run.env["PYTHONPATH"] = os.pathsep.join([str(hook), run.env["PYTHONPATH"]])
    run.submit().wait_for_batch(4)
    cluster.reboot_node("n3")
    run.end()
    assert run.causes == [("lost", "n3"), ("finished", "")] and run.nodes == [("n1", "n2")] * 2, run.output()
    assert [out.node for out in run.of(Excluded)] == ["n3"] and judge.strikes(run.records) == {}
    assert_as_if_nothing_happened(run.folder, whole)
