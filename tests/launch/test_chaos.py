"""Random faults against a real Slurm: twenty in the slow set, six in `make slurm`, as many as one likes in `make chaos`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.__main__ import add_row, run_schedule, schedules_of, undisturbed
from chaos.oracle import blame, budgets, may_end, nodes_used_again, stops
from chaos.run import ChaosRun, host_of_attempt
from chaos.schedule import INSIDE, NODES, PHASES, Fault, Schedule, draw
from cluster import Cluster, missing

from ingot.launch.supervisor.records import Cause, Closed, Excluded, Launched, Opened, Started
from ingot.launch.supervisor.state_file import StateFile

slow = pytest.mark.slow
TIME = "2026-01-01T00:00:00+00:00"
FAULTS = int(os.environ.get("INGOT_CHAOS_FAULTS", "20"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    cluster = Cluster(tmp_path_factory.mktemp("chaos"), NODES, number=1)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(data, tmp_path_factory.mktemp("chaos") / "whole")


def test_a_seed_is_a_schedule_and_seeds_differ() -> None:
    drawn = [draw(seed) for seed in range(300)]
    assert drawn == [draw(seed) for seed in range(300)] and len(set(map(str, drawn))) == 300
    faults = [fault for schedule in drawn for fault in schedule.faults]
    assert {fault.kind for fault in faults} >= {*INSIDE, "node", "drain", "cable", "supervisor", "requeue", "usr2",
                                                "ingot stop", "scancel", "controller", "disk", "workdir", "stage"}  # fmt: skip
    assert {fault.moment for fault in faults} == {"submit", *PHASES, "batch", "save", "evaluation"}
    assert any(fault.is_after_requeue for fault in faults) and any(len(s.faults) == 3 for s in drawn)
    assert all(len(schedules_of(7, count)) <= count for count in (1, 6, 20))


def test_rows_are_merged_by_seed(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    for seed, struck, wrong in ((3, ["kill"], ["lost"]), (1, [], []), (3, ["kill", "gil"], [])):
        add_row(path, {"seed": seed, "struck": struck, "wrong": wrong})
    text = path.read_text()
    assert (
        '"schedules": 2' in text and '"faults_struck": 2' in text and text.index('"seed": 1') < text.index('"seed": 3')
    )
    assert [row.get("wrong_before") for row in json.loads(text)["rows"]] == [None, ["lost"]] and '"wrong": 0' in text


def test_the_oracle_sees_a_healthy_node_blamed_and_an_unexplained_end(tmp_path: Path) -> None:
    """What slurmctld's restart once did: each node was left out as lost."""
    kill = Fault("kill", "n2", "batch", 6)
    run = ChaosRun(Schedule(0, 1, 1, (kill,)), None, tmp_path, tmp_path / "run", tmp_path, [kill])  # type: ignore[arg-type]
    killed = Cause("machine", "the process of rank 1 was killed by signal 9", "n2", 1, 6)
    records = [
        Launched(time=TIME, launch="a", back_end="slurm", nodes=2, spares=1),
        Started(time=TIME, launch="a", job="1", restart=0, host="n1", nodes=("n1", "n2", "n3"), step=0),
        Opened(time=TIME, epoch=1, attempt="1.0.1", nodes=("n1", "n2"), step=0),
        Closed(time=TIME, epoch=1, cause=killed, step=4),
    ]
    state = StateFile(run.folder / "launch")
    assert all(state.append(record) for record in records) and blame(run) == budgets(run) == []
    state.append(Excluded(time=TIME, node="n3", reason="unknown"))
    state.append(Opened(time=TIME, epoch=2, attempt="1.0.2", nodes=("n1", "n2"), step=4))
    state.append(Closed(time=TIME, epoch=2, cause=Cause("device", "n1: ECC", "n1", is_local=True), step=4))
    found = "; ".join(blame(run))
    assert "n3 is healthy and was left out" in found and "epoch 2 was closed as device of n1" in found
    assert "n1 is healthy and has 1 strikes" in found and "epoch 1" not in found
    assert budgets(run) == ["2 attempts have failed, and 1 could"]
    assert may_end(run, "halted", ": no") and may_end(run, "stopped", "") and not may_end(run, "finished", "")
    run.stopped_at = "2026-01-01T00:00:01+00:00"
    assert stops(run) == []
    run.stopped_at = "2025-01-01T00:00:01+00:00"
    assert "1.0.1 was opened" in stops(run)[0]
    assert nodes_used_again(run) == [] and host_of_attempt(run.records) == ""
    assert host_of_attempt(run.records[:3]) == "n1"
    run.dead_hosts = {"n1": "2025-12-31T23:59:59+00:00"}
    state.append(Opened(time=TIME, epoch=9, attempt="1.0.9", nodes=("n2", "n3"), step=4))
    state.append(Closed(time=TIME, epoch=9, cause=killed, step=4))
    found = "; ".join(nodes_used_again(run))
    assert "1.0.9 runs on n3, which failed" in found and "1.0.1 runs on n1, which failed" in found
    for epoch in range(3, 7):
        state.append(Opened(time=TIME, epoch=epoch, attempt=f"1.0.{epoch}", nodes=("n1", "n2"), step=4))
        state.append(Closed(time=TIME, epoch=epoch, cause=killed, step=4))
    assert any("attempts at batch 4" in text for text in budgets(run))


@slow
@pytest.mark.parametrize("schedule", schedules_of(1, FAULTS), ids=lambda schedule: f"seed-{schedule.seed}")
def test_a_run_ends_as_its_faults_allow(
    four: Cluster, data: Path, whole: Path, tmp_path: Path, schedule: object
) -> None:
    row = run_schedule(schedule, four, data, whole, tmp_path)  # type: ignore[arg-type]
    assert not row["wrong"], row
