"""Files that are torn, swapped, foreign or made to harm are refused with their name and the reason, in little memory."""

import json
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch

from ingot.checkpoint.manifest import MODEL, OPTIMIZER, read_manifest, verify
from ingot.checkpoint.remote_copy import newest_good
from ingot.checkpoint.safetensors_file import SafetensorsFile
from ingot.checkpoint.store import CheckpointTensors, save_checkpoint
from ingot.errors import CheckpointError
from ingot.parallel.coordinator import LocalCoordinator


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {MODEL: {"w": torch.arange(2000.0)}, OPTIMIZER: {"exp_avg/w": torch.arange(2000.0) + 1}}
    save_checkpoint(tmp_path, 1, tensors, {})
    return save_checkpoint(tmp_path, 2, tensors, {})


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def read_all(folder: Path) -> None:
    manifest = read_manifest(folder)
    verify(manifest)
    for kind in manifest.tensors:
        stored = CheckpointTensors(manifest, kind)
        for name in stored.names():
            stored.get(name).sum()


class Payload:
    def __reduce__(self):  # type: ignore[no-untyped-def]
        return os.mkdir, ("harm-done",)


def flip(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[3000] ^= 4
    (folder / "model.safetensors").write_bytes(content)


def swap(folder: Path) -> None:
    one, two = folder / "model.safetensors", folder / "optimizer.safetensors"
    os.rename(one, folder / "x")
    os.rename(two, one)
    os.rename(folder / "x", two)


def link(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder.parent.parent / "outside")
    (folder / "model.safetensors").symlink_to(folder.parent.parent / "outside")


def pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def chunks(*wanted: object) -> dict:
    return {"tensors": {MODEL: {"w": {"dtype": "F32", "shape": [2000], "chunks": list(wanted)}}}}


DAMAGE = {
    "flip": (flip, "model.safetensors is corrupt"),
    "truncate": (lambda f: os.truncate(f / "model.safetensors", 900), "model.safetensors is truncated"),
    "grow": (lambda f: os.truncate(f / "model.safetensors", 99_999), "model.safetensors is truncated or changed"),
    "missing": (lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "swapped": (swap, "safetensors is"),
    "link": (link, "model.safetensors is not a regular file"),
    "pipe": (pipe, "model.safetensors is not a regular file"),
    "pickle": (lambda f: (f / "model.safetensors").write_bytes(pickle.dumps(Payload())), "truncated or changed"),
    "pickled manifest": (lambda f: (f / "manifest.json").write_bytes(pickle.dumps(Payload())), "cannot be read"),
    "torn manifest": (lambda f: os.truncate(f / "manifest.json", 300), "manifest.json is damaged"),
    "empty manifest": (lambda f: (f / "manifest.json").write_text(""), "manifest.json is damaged"),
    "linked manifest": (
        lambda f: ((f / "manifest.json").unlink(), (f / "manifest.json").symlink_to("../1/manifest.json")),
        "manifest.json is not a regular file",
    ),
    "foreign": (lambda f: (f / "manifest.json").write_text('{"weight_map": {}}'), "not the manifest"),
    "newer": (lambda f: rewrite(f, version=99), "format version 99, and this ingot reads versions 2 to 3; install a newer"),
    "older": (lambda f: rewrite(f, version=1), "install an older"),
    "deep": (lambda f: (f / "manifest.json").write_text("[" * 1_000_000), "damaged|not the manifest"),
    "deep state": (lambda f: (f / "manifest.json").write_text(
        '{"format": "ingot-checkpoint", "version": 2, "state": ' + '{"a":' * 100_000), "damaged"),
    "traversal": (lambda f: rewrite(f, files={"../../secret": {"bytes": 1, "xxh3": ""}}), "a file outside its folder"),
    "absolute": (lambda f: rewrite(f, files={"/etc/passwd": {"bytes": 1, "xxh3": ""}}), "a file outside its folder"),
    "no file": (lambda f: rewrite(f, **chunks([1, [0], [2000]])), "is in part 1, which has no file"),
    "outside": (lambda f: rewrite(f, **chunks([0, [1], [2000]])), "a chunk outside it"),
    "hole": (lambda f: rewrite(f, **chunks([0, [0], [1999]])), "is not covered"),
    "dimensions": (lambda f: rewrite(f, **chunks([0, [0, 0], [2000, 1]])), "another number of dimensions"),
    "negative": (lambda f: rewrite(f, **chunks([0, [-1], [2000]])), "a chunk outside it"),
    "huge": (lambda f: rewrite(f, tensors={MODEL: {"w": {"dtype": "F32", "shape": [10**12], "chunks": [[0, [0], [10**12]]]}}}),
             "larger than all files together"),
    "type": (lambda f: rewrite(f, tensors={MODEL: {"w": {"dtype": "object", "shape": [], "chunks": []}}}), "unknown type"),
    "other shape": (lambda f: rewrite(f, tensors={MODEL: {"w": {"dtype": "F32", "shape": [1000], "chunks": [[0, [0], [1000]]]}}}),
                    "does not match the manifest: w is F32"),
    "negative step": (lambda f: rewrite(f, step=-1), "damaged: it has a negative step"),
    "other step": (lambda f: rewrite(f, step=7), "damaged: it is of step 7, unlike its folder"),
    "no parts": (lambda f: rewrite(f, parts=0), "or no parts"),
    "wrong types": (lambda f: rewrite(f, files=[1, 2]), "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_with_the_file_and_the_reason_and_the_one_before_is_taken(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent.parent)
    damage, words = DAMAGE[how]
    damage(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_all(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("harm-done").exists()
    if how != "other shape":  # that one's files are intact; it is found when it is read
        manifest, problems = newest_good(folder.parent.parent, LocalCoordinator())
        assert manifest is not None and manifest.step == 1 and len(problems) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ((2**62).to_bytes(8, "little") + b"{}", "header would be"),
        ((1 << 26).to_bytes(8, "little") + b" " * (1 << 26), "header would be"),
        (b"\x05", "header would be"),
        ((2).to_bytes(8, "little") + b"[]", "damaged or cut short"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "damaged or cut short"),
        (pickle.dumps(Payload()), "header would be"),
        ((64).to_bytes(8, "little") + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(64), "damaged or cut short"),
        ((64).to_bytes(8, "little") + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[-36,0]}}'.ljust(64), "damaged or cut short"),
    ],
)  # fmt: skip
def test_an_absurd_header_is_refused_before_it_costs_memory(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=words):
        SafetensorsFile(path).get("w", "F32", (9,))
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()


def test_a_manifest_beyond_any_real_size_is_not_parsed(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(CheckpointError, match="no manifest is larger than 64 MiB"):
        read_manifest(tmp_path)
