"""Each of several ranks writes one file, whose beginning holds its weights and can be used without the rest."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_saver import assert_equal, read
from together import Together, on_all_ranks

from ingot.checkpoint.async_writer import AsyncWriter
from ingot.checkpoint.location import CheckpointLocation, find_checkpoints
from ingot.checkpoint.manifest import MODEL, OPTIMIZER, Manifest, read_manifest, steps_in, verify
from ingot.checkpoint.remote_copy import copy_checkpoint, fetch, fetch_into_run
from ingot.checkpoint.save_plan import Tensors
from ingot.checkpoint.store import CheckpointTensors, consolidate, find_checkpoint, own_files, save_checkpoint
from ingot.errors import CheckpointError
from ingot.parallel.coordinator import LocalCoordinator
from ingot.storage.object_store import Remote

RANKS = 3


def state(value: float = 1.0) -> Tensors:
    """The odd tensors leave the training state after them unaligned, unless something fills the gap."""
    return {
        MODEL: {"a": torch.full((7, 5), value), "b": torch.full((3,), value, dtype=torch.bfloat16),
                "c": torch.full((5,), int(value), dtype=torch.uint8), "d": torch.full((11,), value)},
        OPTIMIZER: {"step/a": torch.tensor(value, dtype=torch.float64), "exp_avg/a": torch.full((7, 5), -value),
                    "exp_avg/d": torch.full((11,), -value), "empty": torch.empty(0, 4)},
    }  # fmt: skip


def save(run: Path, step: int = 1, ranks: int = RANKS) -> Path:
    def work(coordinator: Together) -> str | None:
        writer = AsyncWriter(run, coordinator)
        writer.save(step, state(float(step)), {"some": "state"})
        writer.wait()
        return writer.problem

    assert on_all_ranks(Together.ranks(ranks), work) == [None] * ranks
    return run / "checkpoints" / str(step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_rank_writes_one_file_and_together_they_hold_everything(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert names(folder) == ["manifest.json", *(f"rank-0000{rank}-of-00003.safetensors" for rank in range(RANKS))]
    assert_equal(read(folder), state())
    assert_equal(read(consolidate(read_manifest(folder), tmp_path / "whole", [MODEL, OPTIMIZER])), state())
    plain = [load_file(folder / name) for name in names(folder)[1:]]  # any reader of safetensors reads them
    assert {n for tensors in plain for n in tensors} - {"__padding__"} == {n for kind in state().values() for n in kind}


def test_more_ranks_than_tensors(tmp_path: Path) -> None:
    folder = save(tmp_path, ranks=12)
    assert len(names(folder)) == 13
    assert_equal(read(folder), state())


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def some_file_with_both(manifest: Manifest) -> str:
    return next(name for name, file in manifest.files.items() if file.weights is not None)


def test_weights_are_verified_without_the_training_state_after_them(tmp_path: Path) -> None:
    folder = save(tmp_path)
    manifest = read_manifest(folder)
    name = some_file_with_both(manifest)
    flip(folder / name, -1)
    find_checkpoint(folder)
    with pytest.raises(CheckpointError, match=f"{name} is corrupt"):
        verify(manifest)
    flip(folder / name, 4096 + 1)
    with pytest.raises(CheckpointError, match=f"{name} is corrupt"):
        find_checkpoint(folder)
    os.truncate(folder / name, manifest.files[name].weights[0])  # type: ignore[index]
    with pytest.raises(CheckpointError, match=f"{name} is truncated or changed"):
        find_checkpoint(folder)


@pytest.mark.parametrize("where", ["folder", "url"])
def test_weights_are_fetched_without_the_training_state_after_them(
    tmp_path: Path, where: str, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in s3.items():
        monkeypatch.setenv(variable, value)
    folder = save(tmp_path)
    location = CheckpointLocation(Remote(str(tmp_path)), "checkpoints/1/")
    if where == "url":
        location = copy_checkpoint(location, "s3://test/rank-files")
    manifest = fetch(location, tmp_path / "copy", LocalCoordinator(), [MODEL])
    name = some_file_with_both(manifest)
    size, _ = manifest.files[name].weights or (0, "")
    copied, content = (tmp_path / "copy" / name).read_bytes(), (folder / name).read_bytes()
    assert copied == content[:size] + bytes(len(content) - size)
    stored = CheckpointTensors(manifest)
    assert_equal({MODEL: {n: stored.get(n) for n in stored.names()}}, {MODEL: state()[MODEL]})
    location.check(name, manifest.files[name])
    assert_equal(read(fetch_into_run(location, tmp_path / "moved", LocalCoordinator()).folder), state())


def test_ranks_check_and_fetch_the_files_that_they_wrote(tmp_path: Path) -> None:
    manifest = read_manifest(save(tmp_path))
    own = [list(own_files(manifest, coordinator)) for coordinator in Together.ranks(RANKS)]
    assert own == [[f"rank-0000{rank}-of-00003.safetensors"] for rank in range(RANKS)]
    two = [list(own_files(manifest, coordinator)) for coordinator in Together.ranks(2)]
    assert sorted(name for files in two for name in files) == sorted(manifest.files)


def test_a_file_that_another_rank_says_it_wrote_and_did_not_is_an_error(tmp_path: Path) -> None:
    def work(coordinator: Together) -> str | None:
        other_disk = tmp_path / "elsewhere" if coordinator.rank == 2 else tmp_path / "run"
        writer = AsyncWriter(other_disk, coordinator)
        writer.save(1, state(), {})
        writer._next_due.set()  # no retries
        writer.wait()
        return writer.problem

    problems = on_all_ranks(Together.ranks(RANKS), work)
    assert all("rank-00002-of-00003.safetensors, written by another rank, is not there" in str(p) for p in problems)
    assert steps_in(tmp_path / "run" / "checkpoints") == []


def test_a_weight_and_training_state_of_one_name_are_refused(tmp_path: Path) -> None:
    same: Tensors = {MODEL: {"x": torch.ones(3)}, OPTIMIZER: {"x": torch.zeros(3)}}

    def work(coordinator: Together) -> str:
        with pytest.raises(CheckpointError, match="have the same name"):
            AsyncWriter(tmp_path, coordinator).save(1, same, {})
        return "refused"

    assert on_all_ranks(Together.ranks(1), lambda c: AsyncWriter(tmp_path / "one", c).save(1, same, {})) == [None]
    assert on_all_ranks(Together.ranks(2), work) == ["refused"] * 2


def test_a_copy_keeps_version_2s_list_of_parts_readable(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "run", 1, state(), {})
    manifest = read_manifest(folder)
    text = (folder / "manifest.json").read_text().replace('"version": 3', '"version": 2')
    for entries in manifest.tensors.values():
        for name, entry in entries.items():
            shape = str(list(entry.shape)).replace(" ", "")
            old = f'"shape":{shape},"chunks":[[0,{str([0] * len(entry.shape)).replace(" ", "")},{shape}]]}}'
            text = text.replace(f'"{name}": {{"dtype":"{entry.dtype}","shape":{shape}}}',
                                f'"{name}": {{"dtype":"{entry.dtype}",{old}')  # fmt: skip
    (folder / "manifest.json").write_text(text)
    assert text.count("chunks") == 8
    assert_equal(read(folder), state())
    (location,) = find_checkpoints(str(tmp_path / "run"))
    copied = fetch_into_run(location, tmp_path / "other", LocalCoordinator())
    assert_equal(read(copied.folder), state())
