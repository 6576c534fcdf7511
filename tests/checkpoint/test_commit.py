"""A process that no longer owns its run never commits a checkpoint, however late it wakes up."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from test_saver import gate, state
from together import Together, on_all_ranks
from warm_process import WarmProcess

import ingot.checkpoint.store as store_module
from ingot.checkpoint.async_writer import AsyncWriter
from ingot.checkpoint.manifest import MODEL, read_manifest, steps_in
from ingot.checkpoint.remote_copy import Uploader, newest_good
from ingot.checkpoint.store import CheckpointTensors, save_checkpoint
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import OwnerError
from ingot.parallel.coordinator import LocalCoordinator
from ingot.parallel.executors.base import NamedParameter
from ingot.parallel.layout import Layout
from ingot.parallel.rank_env import RankEnv
from ingot.training.checkpointer import Checkpointer
from ingot.training.optimizer import Optimizer
from ingot.training.runtime.lease import Lease

__all__ = ["gate"]


def take_over(run: Path) -> None:
    """As a run on another node does, for which this one seemed dead."""
    (run / "owner.json").write_text(json.dumps({"host": "n7", "pid": 1, "epoch": 4}))


@pytest.fixture
def lease(tmp_path: Path) -> Any:
    lease = Lease(tmp_path)
    yield lease
    lease.lost = True  # it leaves the successor's file alone
    lease.release()


@pytest.mark.parametrize("ended", [False, True])
def test_an_orphan_never_commits(tmp_path: Path, gate: threading.Event, lease: Lease, ended: bool) -> None:
    writer = AsyncWriter(tmp_path, confirm_owner=lease.confirm)
    writer.save(1, state(), {})
    take_over(tmp_path)
    if ended:  # the successor has finished the run
        (tmp_path / "owner.json").unlink()
    gate.set()
    writer.wait()
    assert writer.disowned and writer.saved_step is None
    assert writer.problem is not None
    assert ("a process that has ended" if ended else "process 1 on n7") in writer.problem
    assert os.listdir(tmp_path / "checkpoints") == []


def test_the_owner_commits(tmp_path: Path, lease: Lease) -> None:
    writer = AsyncWriter(tmp_path, confirm_owner=lease.confirm)
    writer.save(1, state(), {})
    writer.wait()
    assert not writer.disowned and steps_in(tmp_path / "checkpoints") == [1]


def test_every_rank_of_an_orphan_ends_with_the_reason(tmp_path: Path, lease: Lease) -> None:
    take_over(tmp_path)

    def work(coordinator: Together) -> str:
        config = load_config(RunConfig, [*TINY, "data=x", f"save_folder={tmp_path}"])
        weight = torch.zeros(4)
        executor: Any = type("E", (), {
            "parameters": [NamedParameter("x", weight)], "parameter_shapes": {"x": (4,)}, "coordinator": coordinator,
            "layout": Layout(), "rank_env": RankEnv(),
        })  # fmt: skip
        unused: Any = None
        optimizer = Optimizer(config.optimizer, {weight: "x"})
        saving = Checkpointer(config, unused, executor, optimizer, unused, lease.confirm)
        saving.save(1, lambda: {}, final=False)
        saving.writer.wait()
        with pytest.raises(OwnerError, match="taken over by process 1 on n7"):
            saving.after_step()
        with pytest.raises(OwnerError, match="taken over by process 1 on n7"):
            saving.save(2, lambda: {}, final=True)
        return "ended"

    assert on_all_ranks(Together.ranks(2), work) == ["ended"] * 2
    assert steps_in(tmp_path / "checkpoints") == []


def test_an_orphan_leaves_the_url_alone(tmp_path: Path, lease: Lease) -> None:
    folder = save_checkpoint(tmp_path, 1, state(), {})
    take_over(tmp_path)
    uploader = Uploader(str(tmp_path / "far"), tmp_path, LocalCoordinator(), lambda steps: [], lease.confirm)
    uploader.start(folder)
    uploader.wait()
    assert uploader.problem is not None and "taken over by process 1 on n7" in uploader.problem
    assert not (tmp_path / "far" / "checkpoints" / "1" / "manifest.json").exists()


def test_two_attempts_never_write_to_one_draft(
    tmp_path: Path, gate: threading.Event, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orphan of epoch 3 and its successor of epoch 4 save the same step at once."""
    monkeypatch.setenv("INGOT_EPOCH", "3")
    orphan = AsyncWriter(tmp_path, confirm_owner=lease.confirm)
    monkeypatch.setenv("INGOT_EPOCH", "4")
    successor = AsyncWriter(tmp_path)
    take_over(tmp_path)
    orphan.save(5, state(1), {})
    successor.save(5, state(2), {})
    gate.set()
    orphan.wait()
    successor.wait()
    assert orphan.disowned and not successor.disowned
    assert os.listdir(tmp_path / "checkpoints") == ["5"]
    manifest, problems = newest_good(tmp_path, LocalCoordinator())
    assert manifest is not None and not problems
    assert float(CheckpointTensors(manifest, MODEL).get("a")[0, 0]) == 2


ORPHAN = """
import sys
from pathlib import Path
import torch
from ingot.checkpoint.async_writer import AsyncWriter
from ingot.training.runtime.lease import Lease
lease = Lease(Path("."))
writer = AsyncWriter(Path("."), confirm_owner=lease.confirm)
tensors = {"model": {f"w{n}": torch.full((2_000_000,), 1.0) for n in range(20)}}
print("saving", flush=True)
writer.save(1, tensors, {})
writer.wait()
lease.lost = True
print(writer.problem, flush=True)
"""


def test_a_process_stopped_in_mid_save_and_woken_after_its_successor_ended_commits_nothing(tmp_path: Path) -> None:
    with WarmProcess([sys.executable, "-c", ORPHAN], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as orphan:
        assert orphan.stdout is not None and orphan.stdout.readline() == "saving\n"
        while not list(tmp_path.glob("checkpoints/.draft-*/*")):
            time.sleep(0.001)
        orphan.send_signal(signal.SIGSTOP)
        (tmp_path / "owner.json").unlink()
        save_checkpoint(tmp_path, 1, state(2), {})  # the successor, which has ended since
        orphan.send_signal(signal.SIGCONT)
        said = orphan.communicate(timeout=60)[0]
    assert "taken over by a process that has ended" in said
    assert os.listdir(tmp_path / "checkpoints") == ["1"]
    assert float(CheckpointTensors(read_manifest(tmp_path / "checkpoints" / "1"), MODEL).get("a")[0, 0]) == 2


def test_rank_0_alone_reads_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 1, state(), {})
    readers: list[str] = []
    read = store_module.read_manifest_text

    def counted(folder: Path) -> bytes:
        readers.append(threading.current_thread().name)
        return read(folder)

    monkeypatch.setattr(store_module, "read_manifest_text", counted)
    found = on_all_ranks(Together.ranks(4), lambda coordinator: newest_good(tmp_path, coordinator)[0])
    assert len(readers) == 1 and all(manifest is not None and manifest.step == 1 for manifest in found)
    shutil.rmtree(tmp_path / "checkpoints")
