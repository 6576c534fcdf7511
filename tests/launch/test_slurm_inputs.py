"""What one node sees differently, or every node alike, on a real Slurm: two votes that differ name nobody, bad input that
one node alone sees is tried on another, and what fails everywhere is final."""

import json
import os
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from test_slurm_faults import Watched, usual

from ingot.launch.supervisor import judge
from ingot.launch.supervisor.records import Closed, Judged

__all__ = ["cluster", "usual"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("usual")]
HOOK = str(Path(__file__).parent / "hook")


@pytest.mark.parametrize("kind", ["clock", "deaf"])
def test_of_two_nodes_that_differ_neither_is_blamed(cluster: Cluster, data: Path, tmp_path: Path, kind: str) -> None:
    """P5: n1's clock is wrong (what its processes read: a namespace has no clock), or its all-reduce listens to itself
    only. The spare cannot vote: all suspects are tried once more, one is replaced, and nobody is struck."""
    run = Watched(cluster, data, tmp_path / "run", "max_duration=2ba", "--spares", "1")
    path = os.pathsep.join(filter(None, [HOOK, os.environ.get("PYTHONPATH")]))
    run.env |= {"PYTHONPATH": path, "INGOT_TEST_NODE": json.dumps({"node": "n1", "kind": kind, "report_seconds": 60.0})}
    run.submit()
    run.wait(lambda: len(run.of(Closed)) >= 2, 240)
    for closed in run.of(Closed)[:2]:
        assert (closed.cause.node, closed.cause.suspects) == ("", ("n1", "n2")), closed
    run.end("FAILED", 300)
    assert run.of(Judged)[-1].action == "halt" and judge.strikes(run.records) == {}
    assert all(not cause.node for cause in (closed.cause for closed in run.of(Closed)))


def test_a_job_of_one_node_that_does_not_see_its_data_is_tried_on_the_spare(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    """U2: one vote decides nothing."""
    run = Watched(cluster, data, tmp_path / "run", "max_duration=2ba", "-N", "1", "--spares", "1")
    cluster.on("n1", "mount", "-t", "tmpfs", "none", str(data))
    run.submit().end()
    assert run.causes[-1] == ("finished", "") and run.nodes == [("n1",), ("n2",)]
    cause = run.of(Closed)[0].cause
    assert (cause.kind, cause.node) == ("data", "n1") and judge.strikes(run.records) == {}


def test_data_that_no_node_sees_is_final(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """U2."""
    run = Watched(cluster, data, tmp_path / "run", "max_duration=2ba", "--spares", "1")
    for node in ("n1", "n2", "n3"):
        cluster.on(node, "mount", "-t", "tmpfs", "none", str(data))
    run.submit().end("FAILED")
    (closed,) = run.of(Closed)
    assert closed.cause.kind == "data" and not closed.cause.node and str(data) in closed.cause.message
    assert not run.excluded and judge.strikes(run.records) == {}


def test_a_nan_is_final_and_names_its_batch(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """U2."""
    run = Watched(cluster, data, tmp_path / "run", "--spares", "1", kind="nan", rank=0, batch=11, attempts="all")
    run.submit().end("FAILED")
    (closed,) = run.of(Closed)
    assert (closed.cause.kind, closed.cause.batch) == ("numeric", 11) and run.of(Judged)[-1].action == "halt"
    assert not run.excluded and judge.strikes(run.records) == {}
