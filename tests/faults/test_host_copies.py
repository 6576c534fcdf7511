"""A run that fails continues from the copies of its state that its launcher holds in memory, as if nothing had happened;
where that is not possible, from its last checkpoint."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Shared
from runs import BATCHES, Run, assert_as_if_nothing_happened, ranks, whole

from ingot.checkpoint.copy_memory import RECORD_BYTES
from ingot.checkpoint.manifest import MODEL, OPTIMIZER, read_manifest
from ingot.checkpoint.store import CheckpointTensors

__all__ = ["ranks", "whole"]

slow = pytest.mark.slow
COPIES = ["snapshot_interval=2ba", "save_interval=8ba"]


def assert_the_same_to_the_last_bit(folder: Path, whole: Path) -> None:
    assert_as_if_nothing_happened(folder, whole)
    one, two = (read_manifest(run / "checkpoints" / str(BATCHES)) for run in (folder, whole))
    for kind in (MODEL, OPTIMIZER):
        ours, expected = CheckpointTensors(one, kind), CheckpointTensors(two, kind)
        assert sorted(ours.names()) == sorted(expected.names())
        assert all(torch.equal(ours.get(name), expected.get(name)) for name in ours.names())
    assert one.state["guard"] == two.state["guard"] and one.state["data"] == two.state["data"]


def memories(run: Run) -> list[Path]:
    """The launcher's, one of each rank."""
    found = Path(f"/proc/{run.process.pid}/fd").iterdir()
    return sorted(path for path in found if "memfd:ingot-copy" in os.readlink(path))


def run_to_copy(run: Run, go: Path, before: Callable[[], None] = lambda: None) -> str:
    """Let the fault of batch 15 strike when the copy of batch 14 is complete."""
    run.start()
    run.wait_for_batch(14)
    time.sleep(1)
    before()
    go.touch()
    return run.end()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("kill", "shard=2"), pytest.param("kill", "replicate=2", marks=slow), pytest.param("kill", "tensor=2", marks=slow),
     pytest.param("kill", "pipeline=2", marks=slow), pytest.param("segfault", "shard=2", marks=slow)],
)  # fmt: skip
def test_a_restart_loses_at_most_the_steps_since_the_last_copy(
    data: Path, whole: Path, tmp_path: Path, shared: Shared, kind: str, layout: str
) -> None:
    def make(folder: Path, **fault: object) -> Run:
        return Run(data, folder, *COPIES, f"parallel.{layout}", nproc=2, **fault)

    undisturbed = whole  # which is sharded
    if layout != "shard=2":
        undisturbed = shared(f"undisturbed-{layout}", lambda folder: make(folder / "run").run()) / "run"
    go = tmp_path / "go"
    run = make(tmp_path / "run", kind=kind, rank=1, batch=15, after=str(go))
    said = run_to_copy(run, go)
    assert "copies in host memory: every 2 batches, " in said
    assert "attempt 2 starts from the copy of batch 14 in host memory" in said
    assert f"resumed from host memory at batch 14 of {BATCHES}" in said
    assert_the_same_to_the_last_bit(run.folder, undisturbed)


@slow  # that the content is compared with its hash is in tests/checkpoint/test_copy_memory.py
def test_a_corrupt_copy_is_not_used(data: Path, whole: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = Run(data, tmp_path / "run", *COPIES, kind="kill", rank=1, batch=15, after=str(go))

    def corrupt() -> None:
        with memories(run)[0].open("r+b") as file:  # of one rank
            size = (os.fstat(file.fileno()).st_size - 2 * RECORD_BYTES) // 2
            for slot in (0, 1):
                file.seek(2 * RECORD_BYTES + slot * size + size // 2)
                file.write(b"harm")

    said = run_to_copy(run, go, corrupt)
    assert "in host memory is corrupt: its hash differs; continuing from the last checkpoint" in said
    assert f"resumed from {run.folder}/checkpoints/8 at batch 8 of {BATCHES}" in said
    assert_the_same_to_the_last_bit(run.folder, whole)


@slow
def test_a_copy_is_used_once(data: Path, whole: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = Run(data, tmp_path / "run", *COPIES, kind="kill", rank=1, batch=15, attempts=[1, 2], after=str(go))
    said = run_to_copy(run, go)
    resumed = [line for line in said.splitlines() if "resumed from" in line]
    assert len(resumed) == 2 and "host memory at batch 14" in resumed[0] and "host memory at batch 12" in resumed[1]
    assert_the_same_to_the_last_bit(run.folder, whole)


@slow
def test_after_diverged_weights_only_a_checkpoint_is_trusted(data: Path, whole: Path, tmp_path: Path) -> None:
    more = [*COPIES, "parallel.replicate=3", "guards.checksum_interval=3ba"]
    run = Run(data, tmp_path / "run", *more, kind="flip", rank=1, batch=13)
    said = run.run()
    assert "in host memory at batch" not in said and "resumed from host memory" not in said
    assert f"checkpoints/8 at batch 8 of {BATCHES}" in said


@slow
def test_without_copies_a_restart_starts_from_the_checkpoint(data: Path, whole: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", "snapshot_interval=0ba", "save_interval=8ba", kind="kill", rank=1, batch=15)
    said = run.run()
    assert "host memory" not in said and "attempt 2 starts from batch 8" in said
    assert_the_same_to_the_last_bit(run.folder, whole)


def test_a_killed_launcher_leaves_no_memory_behind(data: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", *COPIES, "max_duration=100000ba").start()
    run.wait_for_batch(5)
    inodes = {os.stat(memory).st_ino for memory in memories(run)}
    pids = [run.process.pid, *run.ranks().values()]
    assert len(inodes) == 2 and len(pids) == 3
    run.process.send_signal(signal.SIGKILL)
    run.process.communicate()
    end = time.monotonic() + 20
    while any(holds(pid, inodes) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)


def holds(pid: int, inodes: set[int]) -> bool:
    try:
        links = [path for path in Path(f"/proc/{pid}/fd").iterdir() if "ingot-copy" in os.readlink(path)]
        return any(os.stat(path).st_ino in inodes for path in links)
    except OSError:
        return False
