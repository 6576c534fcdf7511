"""Runs that lose nodes and continue from copies in the memory of the others: later than the last checkpoint, and as if
nothing had happened; where a copy is missing or damaged, from the checkpoint, and the supervisor says so."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from local_cluster import SupervisedRun
from runs import assert_as_if_nothing_happened, whole

from ingot.checkpoint.copy_memory import RECORD_BYTES
from ingot.launch.peer_copies.sender import LOOK_SECONDS
from ingot.launch.supervisor.history import read_history
from ingot.launch.supervisor.records import PhaseBegan

__all__ = ["whole"]
COPIES = ["snapshot_interval=2ba", "save_interval=8ba"]
slow = pytest.mark.slow


@pytest.fixture
def ranks() -> int:
    """Of the undisturbed run, also in the slow set."""
    return 2


def lose(
    data: Path, folder: Path, nodes: tuple[str, ...], spares: int, before: Callable[[SupervisedRun], None] | None = None,
    **fault: Any,
) -> SupervisedRun:  # fmt: skip
    """A run whose nodes are lost in batch 15, when all copies of batch 14 have arrived where they are kept."""
    go = folder / "go"
    fault = fault or {"kind": "python", "batch": 15, "after": str(go)}
    run = SupervisedRun(data, folder, *COPIES, spares=spares, node="n2", attempts=["7.0.1"], **fault)

    async def strike() -> None:
        await wait_for_batch(run, 14)
        if before is not None:
            before(run)
        for node in nodes:
            run.cluster.agents[node].kill()
            run.cluster.down.add(node)
        go.touch()

    assert end(run, strike) == 0, run.said()
    return run


async def wait_for_batch(run: SupervisedRun, batch: int) -> None:
    async with asyncio.timeout(100):
        while run.batches() < batch:
            await asyncio.sleep(0.02)
    await asyncio.sleep(1 + 2 * LOOK_SECONDS)


def end(run: SupervisedRun, disturb: Callable[[], Awaitable[None]]) -> int:
    async def both() -> int:
        code, _ = await asyncio.gather(run.run(), disturb())
        return code

    return asyncio.run(both())


def guest_memories(run: SupervisedRun, node: str) -> list[Path]:
    """Memory of an agent that was created last: that of its guest's ranks."""
    found = Path(f"/proc/{run.cluster.agents[node].pid}/fd").iterdir()
    memories = sorted(
        (path for path in found if "memfd:ingot-copy" in os.readlink(path)), key=lambda path: int(path.name)
    )
    assert len(memories) == 2
    return memories[1:]


def damage(path: Path, slots: tuple[int, ...]) -> None:
    with path.open("r+b") as file:
        size = (os.fstat(file.fileno()).st_size - 2 * RECORD_BYTES) // 2
        for slot in slots:
            file.seek(2 * RECORD_BYTES + slot * size + size // 2)
            file.write(b"harm")


@pytest.mark.parametrize("node", ["n2", pytest.param("n1", marks=slow)])
def test_a_spare_in_place_of_a_lost_node_continues_from_the_copy_on_another(
    data: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], node: str
) -> None:
    run = lose(data, tmp_path, (node,), 1)
    said = capfd.readouterr().out
    assert run.causes == [("lost", node), ("finished", "")] and run.excluded == [node]
    other = "n2" if node == "n1" else "n1"
    assert f"n3 fetches the copy of batch 14 of node {int(node[1]) - 1}'s ranks from {other}" in said
    assert "resumed from host memory at batch 14" in run.said(), run.said()
    assert [record.copied for record in run.of(PhaseBegan) if record.phase == "starting"][-1] == 14
    assert read_history(run.records).attempts[-1].opened.first == 14
    assert "on each node and" in run.said() and "for those of another node" in run.said()
    assert_as_if_nothing_happened(run.folder, whole)


@slow
@pytest.mark.parametrize("kind", ["kill", "device"])
def test_a_restart_continues_from_copies_on_the_same_nodes_and_on_a_spare(
    data: Path, whole: Path, tmp_path: Path, kind: str
) -> None:
    go = tmp_path / "go"
    run = SupervisedRun(data, tmp_path, *COPIES, spares=kind == "device", kind=kind, node="n2", batch=15,
                        attempts=["7.0.1"], after=str(go))  # fmt: skip

    async def strike() -> None:
        await wait_for_batch(run, 14)
        go.touch()

    assert end(run, strike) == 0, run.said()
    assert run.nodes == [("n1", "n2"), ("n1", "n3" if kind == "device" else "n2")]
    assert read_history(run.records).attempts[-1].opened.first == 14
    assert "resumed from host memory at batch 14" in run.said(), run.said()
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_of_a_damaged_copy_the_one_before_is_used(
    data: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def harm(run: SupervisedRun) -> None:
        (memory,) = guest_memories(run, "n1")
        damage(memory, (0,) if newest_slot(memory) == 0 else (1,))

    # slow enough for each copy to be sent before the next one is made
    run = lose(data, tmp_path, ("n2",), 1, harm, kind="slow", batch=11, seconds=2.0)
    said = capfd.readouterr().out
    assert "n3: the copy of step 14 is damaged: its hash differs" in said
    assert "resumed from host memory at batch 12" in run.said()
    assert_as_if_nothing_happened(run.folder, whole)


def newest_slot(memory: Path) -> int:
    from ingot.checkpoint.copy_memory import CopyMemory

    with memory.open("r+b") as file:
        records = CopyMemory(file.fileno()).records()
    return max(records, key=lambda slot: records[slot].step)


@slow
def test_without_an_intact_copy_the_checkpoint_is_used_and_said_to_be(
    data: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = lose(data, tmp_path, ("n2",), 1, lambda run: damage(guest_memories(run, "n1")[0], (0, 1)))
    said = capfd.readouterr().out
    assert "is damaged: its hash differs" in said
    assert "copies in host memory are not used; continuing from the last checkpoint" in said
    assert "resumed from host memory" not in run.said() and "checkpoints/8 at batch 8" in run.said()
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_when_the_keeper_of_its_copies_dies_with_a_node_the_checkpoint_is_used(
    data: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = lose(data, tmp_path, ("n1", "n2"), 2)
    assert "fetches" not in capfd.readouterr().out
    assert set(run.nodes[-1]) == {"n3", "n4"}
    assert "resumed from host memory" not in run.said() and "checkpoints/8 at batch 8" in run.said()
    assert_as_if_nothing_happened(run.folder, whole)
