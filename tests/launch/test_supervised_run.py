"""A supervisor, its agents and their ranks together, with faults: each ends with the right culprit or none, and the run
that goes on is the undisturbed one."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from local_cluster import SupervisedRun
from runs import assert_as_if_nothing_happened, whole
from waiting import until

from ingot.launch.supervisor.records import PhaseBegan

__all__ = ["whole"]
slow = pytest.mark.slow


@pytest.fixture
def ranks() -> int:
    """Of the undisturbed run, also in the slow set."""
    return 2


def meanwhile(run: SupervisedRun, disturb: Callable[[], Awaitable[None]]) -> int:
    """The run to its end, and something that happens to it."""

    async def both() -> int:
        code, _ = await asyncio.gather(run.run(), disturb())
        return code

    return asyncio.run(both())


def rank_of(run: SupervisedRun, node: str) -> int:
    pid = run.cluster.agents[node].pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.slow
def test_a_device_error_on_a_node_brings_the_spare(data: Path, whole: Path, tmp_path: Path) -> None:
    run = SupervisedRun(data, tmp_path, spares=1, kind="device", node="n2", batch=11, attempts="all")
    warm = []

    async def look() -> None:
        await until(lambda: run.batches() >= 3)
        warm.append(rank_of(run, "n3"))

    assert meanwhile(run, look) == 0, run.said()
    assert warm, "the spare has imported torch before it is needed"
    assert run.causes == [("device", "n2"), ("finished", "")] and run.nodes == [("n1", "n2"), ("n1", "n3")]
    assert run.excluded == ["n2"]
    phases = [record.phase for record in run.of(PhaseBegan)]
    assert phases[:3] == ["hello", "preflight", "starting"]
    assert phases[3] in ("running", "saving")  # of what lasts a moment only, a part is seen
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_run_that_is_asked_to_stop_saves_and_is_not_started_again(data: Path, tmp_path: Path) -> None:
    run = SupervisedRun(data, tmp_path, "max_duration=2000ba")  # more than it can do until it looks for STOP

    async def stop() -> None:
        await until(lambda: run.batches() >= 3)
        (run.folder / "STOP").touch()

    assert meanwhile(run, stop) == 0, run.said()
    assert run.causes == [("stopped", "")] and run.actions == ["stop"] and (run.folder / "STOP").exists()
    assert list((run.folder / "checkpoints").glob("*/manifest.json"))


@slow
@pytest.mark.parametrize("kind", ["stop", "gil", "python"])
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_rank_that_hangs_is_found_whichever_node_it_is_on(
    data: Path, whole: Path, tmp_path: Path, kind: str, node: str
) -> None:
    run = SupervisedRun(data, tmp_path, "hang_timeout=4", kind=kind, node=node, batch=11, attempts=["7.0.1"])
    assert run.to_the_end() == 0, run.said()
    assert run.causes == [("hang", node), ("finished", "")], run.of(object)
    assert_as_if_nothing_happened(run.folder, whole)


@slow
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_killed_rank_is_named_and_started_again(data: Path, whole: Path, tmp_path: Path, node: str) -> None:
    run = SupervisedRun(data, tmp_path, spares=1, kind="kill", node=node, batch=11, attempts=["7.0.1"])
    assert run.to_the_end() == 0, run.said()
    assert run.causes[0] == ("machine", node) and run.causes[-1][0] == "finished"
    assert_as_if_nothing_happened(run.folder, whole)


@slow
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_an_agent_that_is_killed_takes_its_ranks_along_and_its_node_is_named(
    data: Path, whole: Path, tmp_path: Path, node: str
) -> None:
    run = SupervisedRun(data, tmp_path, spares=1)

    async def kill() -> None:
        await until(lambda: run.batches() >= 6)
        run.cluster.agents[node].kill()

    assert meanwhile(run, kill) == 0, run.said()
    assert run.causes == [("lost", node), ("finished", "")], run.said()
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_a_signal_to_one_agent_stops_the_run_with_a_checkpoint(data: Path, tmp_path: Path) -> None:
    run = SupervisedRun(data, tmp_path)

    async def end() -> None:
        await until(lambda: run.batches() >= 3)
        run.cluster.agents["n2"].send_signal(signal.SIGTERM)

    meanwhile(run, end)
    assert run.causes == [("stopped", "")] and list((run.folder / "checkpoints").glob("*/manifest.json"))


@slow
def test_a_node_whose_agent_never_reports_is_replaced(data: Path, whole: Path, tmp_path: Path) -> None:
    run = SupervisedRun(data, tmp_path, spares=1)
    run.cluster.absent = {"n2"}
    assert run.to_the_end() == 0, run.said()
    assert run.causes == [("silent", "n2"), ("finished", "")] and run.nodes[-1] == ("n1", "n3")
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_an_agent_that_is_cut_off_for_a_moment_changes_nothing(data: Path, whole: Path, tmp_path: Path) -> None:
    run = SupervisedRun(data, tmp_path)

    async def cut() -> None:
        await until(lambda: run.batches() >= 6)
        run.supervisor.server.links["n2"]._writer.transport.abort()

    assert meanwhile(run, cut) == 0, run.said()
    assert run.causes == [("finished", "")]
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_ranks_whose_supervisor_is_lost_end_within_half_a_minute(data: Path, tmp_path: Path) -> None:
    run = SupervisedRun(data, tmp_path, "max_duration=100000ba")

    async def lose() -> None:
        task = asyncio.ensure_future(run.run())
        await until(lambda: run.batches() >= 3)
        children = [rank_of(run, node) for node in ("n1", "n2")]
        server = run.supervisor.server
        server._server.close()  # it takes no connection any more
        for link in list(server.links.values()):
            link._writer.transport.abort()
        await until(lambda: all(agent.poll() is not None for agent in run.cluster.agents.values()), 40)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(lose())
