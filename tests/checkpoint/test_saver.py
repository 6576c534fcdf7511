"""Saves run in the background, one at a time, and a failed one leaves earlier checkpoints alone."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file

import ingot.checkpoint.async_writer as saver_module
from ingot.api import train
from ingot.checkpoint.async_writer import AsyncWriter
from ingot.checkpoint.location import find_checkpoints
from ingot.checkpoint.manifest import MODEL, OPTIMIZER, read_manifest, steps_in, verify
from ingot.checkpoint.remote_copy import copy_checkpoint, newest_good
from ingot.checkpoint.safetensors_file import write_blocks
from ingot.checkpoint.save_plan import Tensors
from ingot.checkpoint.snapshot import Snapshot
from ingot.checkpoint.store import CheckpointTensors, clear_drafts, consolidate, save_checkpoint, to_remove
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import CheckpointError
from ingot.parallel.coordinator import LocalCoordinator, StoreCoordinator
from ingot.parallel.executors.base import NamedParameter
from ingot.parallel.layout import Layout
from ingot.parallel.rank_env import RankEnv
from ingot.training.checkpointer import Checkpointer
from ingot.training.optimizer import Optimizer


def state(value: float = 1.0) -> Tensors:
    return {
        MODEL: {"a": torch.full((7, 5), value), "b": torch.full((3,), value, dtype=torch.bfloat16)},
        OPTIMIZER: {"step/a": torch.tensor(value), "rng/0/cpu": torch.get_rng_state(), "empty": torch.empty(0, 4)},
    }


def read(folder: Path) -> Tensors:
    manifest = read_manifest(folder)
    verify(manifest)
    tensors = {kind: CheckpointTensors(manifest, kind) for kind in manifest.tensors}
    return {kind: {name: stored.get(name) for name in stored.names()} for kind, stored in tensors.items()}


def assert_equal(one: Tensors, two: Tensors) -> None:
    assert {s: list(t) for s, t in one.items()} == {s: list(t) for s, t in two.items()}
    for kind, tensors in one.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, two[kind][name]) and tensor.dtype == two[kind][name].dtype, name


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing waits for it: a disk as slow as a test wants."""
    opened = threading.Event()

    def write(*arguments):  # type: ignore[no-untyped-def]
        assert opened.wait(60)
        return write_blocks(*arguments)

    monkeypatch.setattr(saver_module, "write_blocks", write)
    return opened


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "RETRY_PAUSES", (0.01,))


def test_what_is_saved_is_what_there_was_before_the_next_update(tmp_path: Path, gate: threading.Event) -> None:
    saver, tensors = AsyncWriter(tmp_path), state()
    saver.save(3, tensors, {"some": "state"})
    saver.before_update()
    for content in tensors.values():
        for tensor in content.values():
            tensor.zero_()
    assert steps_in(tmp_path / "checkpoints") == []
    gate.set()
    saver.wait()
    expected = state()
    expected[OPTIMIZER]["rng/0/cpu"] = read(tmp_path / "checkpoints" / "3")[OPTIMIZER]["rng/0/cpu"]
    assert_equal(read(tmp_path / "checkpoints" / "3"), expected)
    assert read_manifest(tmp_path / "checkpoints" / "3").state == {"some": "state"}


def test_the_files_are_plain_safetensors_under_parameter_names(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state(), {})
    folder = tmp_path / "checkpoints" / "1"
    for kind, tensors in state().items():
        loaded = load_file(folder / f"{kind}.safetensors")
        assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[n], tensors[n]) for n in loaded)


def test_at_most_one_save_is_in_flight(tmp_path: Path, gate: threading.Event) -> None:
    saver = AsyncWriter(tmp_path)
    saver.save(1, state(1), {})
    second = threading.Thread(target=saver.save, args=(2, state(2), {}))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.set()
    second.join(60)
    assert steps_in(tmp_path / "checkpoints")[0] == 1  # it waited until the first was there
    saver.wait()
    assert float(read(tmp_path / "checkpoints" / "2")[MODEL]["a"][0, 0]) == 2


def test_preparing_ahead_leaves_less_for_the_first_save(tmp_path: Path) -> None:
    saver = AsyncWriter(tmp_path)
    saver.prepare(state())
    saver.wait()
    planned = saver._planned
    saver.save(1, state(), {})
    saver.wait()
    assert planned is not None and saver._planned is planned and saver.problem is None


def test_a_file_system_without_direct_writes_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refusing(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")  # as a tmpfs of an older kernel
        return plain(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr("ingot.checkpoint.safetensors_file.os.open", refusing)
    assert write_blocks(tmp_path / "x", [memoryview(b"content")]).bytes == 7
    assert (tmp_path / "x").read_bytes() == b"content"


def test_a_write_that_fails_without_direct_access_too_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = iter(range(2))  # with and without

    def refused(descriptor: int, block: memoryview) -> int:
        next(attempts)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("ingot.checkpoint.safetensors_file.os.write", refused)
    with pytest.raises(OSError, match="Invalid argument"):
        write_blocks(tmp_path / "x", [memoryview(bytes(4096))])


def test_a_failed_write_is_tried_again_from_the_same_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "RETRY_PAUSES", (0.0,) * 10_000)
    failed = threading.Event()
    run = saver_module.disk_error
    monkeypatch.setattr(saver_module, "disk_error", lambda *a: (failed.set(), run(*a))[1])
    (tmp_path / "checkpoints").write_text("in the way")  # nothing can be written below a file
    saver = AsyncWriter(tmp_path)
    saver.save(1, state(), {})
    assert failed.wait(60)
    (tmp_path / "checkpoints").unlink()
    saver.wait()
    assert saver.problem is None and steps_in(tmp_path / "checkpoints") == [1]


def test_a_save_that_fails_for_good_keeps_the_one_before_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = AsyncWriter(tmp_path)
    saver.save(1, state(1), {})
    saver.wait()

    def full(*arguments: object) -> None:
        write_blocks(*arguments)  # type: ignore[arg-type]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver_module, "write_blocks", full)
    saver.save(2, state(2), {})
    saver.wait()
    assert saver.problem is not None and "No space left on device" in saver.problem
    assert saver.news[-1][1]
    assert os.listdir(tmp_path / "checkpoints") == ["1"]
    monkeypatch.setattr(saver_module, "write_blocks", write_blocks)
    saver.save(3, state(3), {})
    saver.wait()
    assert saver.problem is None and steps_in(tmp_path / "checkpoints") == [1, 3]


def test_a_checkpoint_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    saver = AsyncWriter(tmp_path / "run")
    saver.save(1, state(), {})
    saver.wait()
    os.rename(tmp_path / "run", tmp_path / "elsewhere")
    saver.save(2, state(), {})
    saver.wait()
    assert steps_in(tmp_path / "run" / "checkpoints") == [2]


def test_saving_a_step_again_replaces_it_and_a_kill_between_the_two_names_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save_checkpoint(tmp_path, 5, state(1), {})
    save_checkpoint(tmp_path, 5, state(2), {})
    assert float(read(folder / "5")[MODEL]["a"][0, 0]) == 2 and os.listdir(folder) == ["5"]
    os.rename(folder / "5", folder / ".old-5")  # where a kill leaves it
    clear_drafts(tmp_path)
    assert os.listdir(folder) == ["5"]
    (folder / ".old-5").mkdir()
    (folder / ".draft-6-0").mkdir()
    (folder / ".remove-4-123").mkdir()
    clear_drafts(tmp_path)
    assert os.listdir(folder) == ["5"] and float(read(folder / "5")[MODEL]["a"][0, 0]) == 2


def test_a_newer_checkpoint_is_found_by_its_manifest_alone(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, state(step), {})
    (tmp_path / "checkpoints" / "latest").write_text("garbage")  # whatever pointers others may leave
    (tmp_path / "checkpoints" / "4").write_text("garbage")
    (tmp_path / "checkpoints" / "3").mkdir()
    manifest, problems = newest_good(tmp_path, LocalCoordinator())
    assert manifest is not None and manifest.step == 2
    assert problems == [f"{tmp_path}/checkpoints/3 is not a checkpoint: it has no manifest.json"]  # and says so


@pytest.mark.parametrize(
    ("keep", "every", "gone"), [(-1, 0, []), (2, 0, [10, 20, 30]), (1, 20, [10, 30]), (0, 0, [10, 20, 30, 40])]
)
def test_retention_keeps_the_newest_and_those_at_multiples(keep: int, every: int, gone: list[int]) -> None:
    assert to_remove([30, 10, 20, 50, 40], keep, every) == gone


def test_consolidating_keeps_the_same_tensors_in_one_file_of_each_kind(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "run", 1, state(), {"x": 1})
    out = consolidate(read_manifest(path), tmp_path / "out", [MODEL])
    assert sorted(os.listdir(out)) == ["manifest.json", "model.safetensors"]
    assert_equal(read(out), {MODEL: state()[MODEL]})


@pytest.mark.parametrize("ranks", [1, 2])
def test_closing_waits_for_a_slow_save_unless_other_ranks_may_be_dead(
    tmp_path: Path, gate: threading.Event, ranks: int
) -> None:
    """A save by several ranks may wait forever for one that has died; a save by one rank finishes, however slow."""
    config = load_config(RunConfig, [*TINY, "data=x", f"save_folder={tmp_path}"])
    coordinator = LocalCoordinator()
    if ranks > 1:
        assert StoreCoordinator.last_save_seconds is not None
        coordinator.last_save_seconds = 0.05
    executor: Any = SimpleNamespace(
        parameters=[], parameter_shapes={}, coordinator=coordinator, layout=Layout(), rank_env=RankEnv()
    )
    unused: Any = None
    saving = Checkpointer(config, unused, executor, unused, unused)
    coordinator.world_size = ranks
    saving.writer.save(1, state(), {})
    closing = threading.Thread(target=saving.close, daemon=True)
    closing.start()
    closing.join(0.5 if ranks == 1 else 60)
    assert closing.is_alive() == (ranks == 1)
    gate.set()
    closing.join(60)
    saving.writer.wait()
    assert not closing.is_alive() and steps_in(tmp_path / "checkpoints") == [1]


def test_everything_is_on_disk_before_what_relies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure: no manifest without its files, no name without its folder, no old checkpoint removed for
    a new one that is not there."""
    done: list[str] = []

    def record(module: object, name: str, describe: Any) -> None:
        plain = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, **options: (done.append(describe(*args)), plain(*args, **options))
        )

    def named(path: str | Path) -> str:
        return str(path).replace(str(tmp_path / "checkpoints"), "").replace(str(os.getpid()), "PID") or "/"

    save_checkpoint(tmp_path, 5, state(1), {})
    record(os, "fsync", lambda descriptor: f"sync {named(os.readlink(f'/proc/self/fd/{descriptor}'))}")
    record(os, "replace", lambda source, target: f"rename {named(source)} {named(target)}")
    record(shutil, "rmtree", lambda folder: f"delete {named(folder)}")
    save_checkpoint(tmp_path, 5, state(2), {})
    assert done == [
        "sync /.draft-5-PID/model.safetensors",
        "sync /.draft-5-PID/optimizer.safetensors",
        "sync /.draft-5-PID/.manifest.json.PID.tmp",
        "rename /.draft-5-PID/.manifest.json.PID.tmp /.draft-5-PID/manifest.json",
        "sync /.draft-5-PID",
        "rename /5 /.old-5",
        "rename /.draft-5-PID /5",
        "sync /",
        "rename /.old-5 /.remove-.old-5-PID",
        "delete /.remove-.old-5-PID",
    ]


def test_a_copied_checkpoint_takes_along_what_its_run_needs_to_continue(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "run", 3, state(), {})
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text(name)
    (location,) = find_checkpoints(str(tmp_path / "run"))
    copy_checkpoint(location, str(tmp_path / "other"))
    assert_equal(read(tmp_path / "other" / "checkpoints" / "3"), state())
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
    ]


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    save_checkpoint(run, 1, state(1), {})
    size = (run / "checkpoints" / "1" / "manifest.json").stat().st_size
    monkeypatch.setattr("ingot.checkpoint.manifest.MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(CheckpointError, match="state_dict_type=full"):
        save_checkpoint(run, 2, state(2), {})
    saver = AsyncWriter(run)
    saver.save(3, state(3), {})
    saver.wait()
    assert saver.problem is not None and "state_dict_type=full" in saver.problem and saver.saved_step is None
    assert os.listdir(run / "checkpoints") == ["1"]
    monkeypatch.setattr("ingot.checkpoint.manifest.MAX_MANIFEST_BYTES", size)
    save_checkpoint(run, 2, state(2), {})
    read_manifest(run / "checkpoints" / "2")


@pytest.mark.parametrize(("kind", "prepared"), [("sharded", 1), ("full", 0)])
def test_memory_for_the_first_save_is_prepared_once_unless_that_would_gather_all_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, prepared: int
) -> None:
    calls: list[Tensors] = []
    monkeypatch.setattr(AsyncWriter, "prepare", lambda self, tensors: calls.append(tensors))
    config = load_config(RunConfig, [*TINY, "data=x", f"save_folder={tmp_path}", f"state_dict_type={kind}"])
    weight = torch.zeros(4)
    executor: Any = SimpleNamespace(
        parameters=[NamedParameter("x", weight)], parameter_shapes={"x": (4,)}, coordinator=LocalCoordinator(),
        layout=Layout(), rank_env=RankEnv(),
    )  # fmt: skip
    unused: Any = None
    saving = Checkpointer(config, unused, executor, Optimizer(config.optimizer, {weight: "x"}), unused)
    for _ in range(3):
        saving.after_step()
    assert len(calls) == prepared


def test_optimizer_state_of_a_parameter_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    config = load_config(RunConfig, [*TINY, "data=x", f"save_folder={tmp_path}"])
    kept = {MODEL: {"x": torch.ones(4)}, OPTIMIZER: {"exp_avg/x": torch.ones(4), "exp_avg/y": torch.ones(4)}}
    manifest = read_manifest(save_checkpoint(tmp_path, 1, kept, {}))
    weight = torch.zeros(4)
    executor: Any = SimpleNamespace(
        parameters=[NamedParameter("x", weight)], parameter_shapes={"x": (4,)}, coordinator=LocalCoordinator(),
        layout=Layout(), rank_env=RankEnv(),
    )  # fmt: skip
    unused: Any = None
    saving = Checkpointer(config, unused, executor, Optimizer(config.optimizer, {weight: "x"}), unused)
    with pytest.raises(CheckpointError, match="has optimizer state for y, which the model lacks"):
        saving.load(manifest)


def test_a_checkpoint_holds_the_weights_of_its_step_however_slow_the_copy(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path) -> Tensors:
        length = ["max_duration=4ba", "scheduler.t_max=12ba", "save_interval=2ba", "eval_interval=0ba"]
        train(load_config(RunConfig, [*TINY, *length, f"data={data}", f"save_folder={folder}"]))
        return read(folder / "checkpoints" / "2")

    expected = run(tmp_path / "fast")
    finish = Snapshot.finish
    monkeypatch.setattr(Snapshot, "finish", lambda self: (time.sleep(1.0), finish(self))[1])
    assert_equal(run(tmp_path / "slow"), expected)  # steps 3 and 4 would have changed the weights by then
