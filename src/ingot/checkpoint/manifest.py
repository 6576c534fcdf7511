"""A checkpoint is a folder of safetensors files and a `manifest.json`, which records the size and hash of each file and
where every tensor is.

The manifest is written last and the folder renamed into place after it, so a checkpoint exists whole or not at all.
Nothing here is pickled: loading a checkpoint never runs code from it, and every value of a manifest is checked for type
and bounds before it is used.
"""

import json
import math
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec

from ingot.errors import CheckpointError
from ingot.storage.atomic import draft_of, file_hash

FORMAT = "ingot-checkpoint"
VERSION = 2
CHECKPOINTS = "checkpoints"  # in a run folder, with a folder for each step
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26  # 1,000 ranks with 1,000 tensors need half of it
MODEL, OPTIMIZER = "model", "optimizer"  # the two kinds of files; the second holds what only training needs
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}

Chunk = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Part of a tensor: number of the file that holds it, offsets in the whole tensor, shape."""


class File(msgspec.Struct, frozen=True):
    """Size and hash of a file."""

    bytes: int
    xxh3: str


class Entry(msgspec.Struct, frozen=True):
    """A tensor, and the chunks that it is stored in."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


class _Heading(msgspec.Struct):
    format: str
    version: int


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint holds."""

    step: int
    parts: int  # files of each kind: one for each process that wrote
    files: dict[str, File]
    tensors: dict[str, dict[str, Entry]]  # by kind of file and name
    state: dict[str, Any]
    """Everything that is not a tensor: config, progress, position in metrics.jsonl."""
    folder: Path = Path()  # where it was read; not stored

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def has_training_state(self) -> bool:
        return OPTIMIZER in self.tensors

    def files_of(self, kind: str) -> list[str]:
        return [name for name in self.files if re.match(rf"{kind}[-.]", name)]


def file_name(kind: str, part: int, parts: int) -> str:
    return f"{kind}.safetensors" if parts == 1 else f"{kind}-{part:05d}-of-{parts:05d}.safetensors"


def write_manifest(manifest: Manifest) -> None:
    """Write the file that makes its folder of tensors a checkpoint, one line for each tensor."""
    content = {
        "format": FORMAT, "version": VERSION, "step": manifest.step, "parts": manifest.parts,
        "files": msgspec.to_builtins(manifest.files), "state": manifest.state,
    }  # fmt: skip
    encode = msgspec.json.Encoder().encode
    tensors = ",\n".join(
        f' "{kind}": {{\n'
        + ",\n".join(f"  {json.dumps(name)}: {encode(entry).decode()}" for name, entry in entries.items())
        + "\n }"
        for kind, entries in manifest.tensors.items()
    )
    text = json.dumps(content, indent=1)[:-2] + f',\n "tensors": {{\n{tensors}\n }}\n}}\n'
    if (size := len(text.encode())) > MAX_MANIFEST_BYTES:
        raise too_large(size)
    with draft_of(manifest.folder / MANIFEST) as file:
        file.write(text.encode())


def too_large(size: int) -> CheckpointError:
    """The error for a manifest that `read_manifest` would refuse: the checkpoint could never be loaded."""
    return CheckpointError(
        f"a checkpoint's manifest would be {size >> 20} MiB, and only {MAX_MANIFEST_BYTES >> 20} MiB can be read, "
        "since it lists the part of every tensor that each process holds; set state_dict_type=full, or let fewer "
        "processes share a tensor (parallel.shard)"
    )


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest. `verify` checks the files that it names."""
    path = folder / MANIFEST
    try:
        check_regular(path)
        with path.open("rb") as file:
            return parse_manifest(file.read(MAX_MANIFEST_BYTES + 1), folder, str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def parse_manifest(text: bytes, folder: Path, where: str) -> Manifest:
    """Parse a manifest from an untrusted source."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{where} is damaged: no manifest is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
    try:
        heading = msgspec.json.decode(text, type=_Heading)
    except msgspec.ValidationError:
        raise CheckpointError(f"{where} is not the manifest of an ingot checkpoint") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged and cannot be read: {error}") from None
    if heading.format != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of an ingot checkpoint")
    if (version := heading.version) != VERSION:
        found = f"{where} has format version {version}, and this ingot reads version {VERSION}"
        raise CheckpointError(f"{found}; install {'a newer' if version > VERSION else 'an older'} one")
    try:
        manifest = msgspec.structs.replace(msgspec.json.decode(text, type=Manifest), folder=folder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from None
    if manifest.step < 0 or manifest.parts < 1 or any(file.bytes < 0 for file in manifest.files.values()):
        raise CheckpointError(f"{where} is damaged: it has a negative step or size, or no parts")
    if folder.parent.name == CHECKPOINTS and folder.name.isdecimal() and int(folder.name) != manifest.step:
        raise CheckpointError(f"{where} is damaged: it is of step {manifest.step}, unlike its folder")
    for name in manifest.files:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
            raise CheckpointError(f"{where} names a file outside its folder: {name!r}")
    for kind, entries in manifest.tensors.items():
        for name, entry in entries.items():
            if problem := _problem(manifest, kind, entry):
                raise CheckpointError(f"{where} is damaged: {kind} tensor {name} {problem}")
    return manifest


def _problem(manifest: Manifest, kind: str, entry: Entry) -> str | None:
    """What is impossible about a tensor, if anything."""
    if entry.dtype not in ITEM_BYTES:
        return f"has an unknown type {entry.dtype!r}"
    volume = 0
    for part, offsets, sizes in entry.chunks:
        if not 0 <= part < manifest.parts or file_name(kind, part, manifest.parts) not in manifest.files:
            return f"is in part {part}, which has no file"
        if not len(offsets) == len(sizes) == len(entry.shape):
            return "has a chunk of another number of dimensions"
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, entry.shape, strict=True)):
            return f"of shape {list(entry.shape)} has a chunk outside it"
        volume += math.prod(sizes)
    if volume != math.prod(entry.shape):
        return "is not covered by its chunks"
    if volume * ITEM_BYTES[entry.dtype] > manifest.bytes:
        return "is larger than all files together"
    return None


def verify(manifest: Manifest, names: list[str] | None = None) -> None:
    """Check the presence, size and hash of every file, or of some."""
    for name in manifest.files if names is None else names:
        verify_file(manifest.folder / name, manifest.files[name])


def verify_file(path: Path, expected: File) -> None:
    try:
        size = check_regular(path)
        if size != expected.bytes:
            raise CheckpointError(f"{path} is truncated or changed: {size} bytes, the manifest says {expected.bytes}")
        if file_hash(path) != expected.xxh3:
            raise CheckpointError(f"{path} is corrupt: its hash differs from the manifest's")
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path.parent} is incomplete: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def check_regular(path: Path) -> int:
    """The size of a regular file. Links out of the folder and pipes that never end are refused."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file; a checkpoint holds no links")
    return status.st_size


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's `checkpoints` folder, oldest first."""
    return [step for step in _numbered(folder) if (folder / str(step) / MANIFEST).is_file()]


def incomplete_steps(folder: Path) -> list[int]:
    """Steps whose folder has no manifest. A save renames its folder into place only after writing one, so the manifest
    was deleted, or a copy into this folder is unfinished."""
    return [step for step in _numbered(folder) if not (folder / str(step) / MANIFEST).exists()]


def _numbered(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if re.fullmatch("0|[1-9][0-9]*", p.name) and p.is_dir())


def remove(folder: Path) -> None:
    """Delete a checkpoint: first its name, atomically, then the files."""
    doomed = folder.with_name(f".remove-{folder.name}-{os.getpid()}")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)
