"""A checkpoint is a folder of safetensors files and a `manifest.json`, which records the size and hash of each file and
where every tensor is.

A checkpoint of one process has a file of each kind. Each of several ranks writes one file: weights first, then what
only training needs. The weights can be verified and fetched without the rest, since they have a hash of their own.

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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ingot.checkpoint.placement import Entry
from ingot.errors import CheckpointError
from ingot.storage.atomic import draft_of, file_hash

FORMAT = "ingot-checkpoint"
VERSION = 3
READABLE = (2, 3)  # 2 lists the parts of each tensor, and each rank has a file of each kind
CHECKPOINTS = "checkpoints"  # in a run folder, with a folder for each step
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26  # 8,192 ranks with 1,740 tensors need 1.5 MB; version 2 needed 64 for 1,000 and 2,500
MODEL, OPTIMIZER = "model", "optimizer"  # the two kinds of tensors; the second is what only training needs
RANK = "rank"  # begins the name of a file with both, one for each of several ranks
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class File(msgspec.Struct, frozen=True, omit_defaults=True):
    """Size and hash of a file."""

    bytes: int
    xxh3: str
    weights: tuple[int, str] | None = None
    """Of a file that holds training state too: size and hash of its beginning, which holds all the weights."""

    def beginning(self, kinds: Iterable[str]) -> "File":
        """What of the file is needed for some kinds of tensors."""
        return File(*self.weights) if self.weights is not None and OPTIMIZER not in kinds else self


class _Heading(msgspec.Struct):
    format: str
    version: int


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint holds."""

    step: int
    parts: int  # processes that have written
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

    def files_of(self, kinds: Iterable[str]) -> dict[str, File]:
        """The files, or the beginnings of files, that hold some kinds of tensors."""
        pattern = "|".join([*kinds, RANK])
        return {n: file.beginning(kinds) for n, file in self.files.items() if re.match(rf"({pattern})[-.]", n)}

    def file_of(self, kind: str, part: int) -> str:
        """The file of a process that holds its tensors of a kind."""
        name = file_name(RANK, part, self.parts)
        return name if name in self.files else file_name(kind, part, self.parts)


def file_name(kind: str, part: int, parts: int) -> str:
    return f"{kind}.safetensors" if parts == 1 else f"{kind}-{part:05d}-of-{parts:05d}.safetensors"


def write_manifest(manifest: Manifest) -> None:
    """Write the file that makes its folder of tensors a checkpoint, one line for each file and tensor.

    A manifest that could not be read again is refused.
    """
    content = {"format": FORMAT, "version": VERSION, "step": manifest.step, "parts": manifest.parts}
    tensors = ",\n".join(f"  {json.dumps(kind)}: {_lines(entries, 3)}" for kind, entries in manifest.tensors.items())
    text = (
        json.dumps(content | {"state": manifest.state}, indent=1)[:-2]
        + f',\n "files": {_lines(manifest.files, 2)},\n "tensors": {{\n{tensors}\n }}\n}}\n'
    ).encode()
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"a checkpoint's manifest would be {len(text) >> 20} MiB, and only {MAX_MANIFEST_BYTES >> 20} MiB can be "
            "read; set state_dict_type=full"
        )
    parse_manifest(text, manifest.folder, f"the manifest of step {manifest.step}")
    with draft_of(manifest.folder / MANIFEST) as file:
        file.write(text)


def _lines(values: dict[str, Any], indent: int) -> str:
    encode = msgspec.json.Encoder().encode
    lines = (f"{' ' * indent}{json.dumps(name)}: {encode(value).decode()}" for name, value in values.items())
    return "{\n" + ",\n".join(lines) + "\n" + " " * (indent - 1) + "}"


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest. `verify` checks the files that it names."""
    return parse_manifest(read_manifest_text(folder), folder, str(folder / MANIFEST))


def read_manifest_text(folder: Path) -> bytes:
    path = folder / MANIFEST
    try:
        check_regular(path)
        with path.open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
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
    if (version := heading.version) not in READABLE:
        found = f"{where} has format version {version}, and this ingot reads versions {READABLE[0]} to {VERSION}"
        raise CheckpointError(f"{found}; install {'a newer' if version > VERSION else 'an older'} one")
    try:
        manifest = msgspec.structs.replace(msgspec.json.decode(text, type=Manifest), folder=folder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from None
    sizes = [size for f in manifest.files.values() for size in (f.bytes, f.bytes - f.weights[0] if f.weights else 0)]
    if manifest.step < 0 or manifest.parts < 1 or any(size < 0 for size in sizes):
        raise CheckpointError(f"{where} is damaged: it has a negative step or size, or no parts")
    if folder.parent.name == CHECKPOINTS and folder.name.isdecimal() and int(folder.name) != manifest.step:
        raise CheckpointError(f"{where} is damaged: it is of step {manifest.step}, unlike its folder")
    for name in manifest.files:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
            raise CheckpointError(f"{where} names a file outside its folder: {name!r}")
    checked: set[object] = set()
    for kind, entries in manifest.tensors.items():
        for name, entry in entries.items():
            if problem := _problem(manifest, kind, entry, checked):
                raise CheckpointError(f"{where} is damaged: {kind} tensor {name} {problem}")
    return manifest


def _problem(manifest: Manifest, kind: str, entry: Entry, checked: set[object]) -> str | None:
    """What is impossible about a tensor, if anything. Tensors share rules, whose files are `checked` once."""
    if entry.dtype not in ITEM_BYTES:
        return f"has an unknown type {entry.dtype!r}"
    if any(size < 0 for size in entry.shape):
        return f"has an impossible shape {list(entry.shape)}"
    if problem := entry.problem(manifest.parts):
        return problem
    rule = (kind, entry.first, entry.axes)
    if entry.chunks is not None or rule not in checked:
        for part in entry.writers():
            if manifest.file_of(kind, part) not in manifest.files:
                return f"is in part {part}, which has no file"
        checked.add(rule)
    if math.prod(entry.shape) * ITEM_BYTES[entry.dtype] > manifest.bytes:
        return "is larger than all files together"
    return None


def verify(manifest: Manifest, files: dict[str, File] | None = None) -> None:
    """Check the presence, size and hash of every file, or of some, as of `files_of`."""
    for name, file in (manifest.files if files is None else files).items():
        verify_file(manifest.folder / name, file, manifest.files[name].bytes)


def verify_file(path: Path, expected: File, whole_size: int | None = None) -> None:
    """Check a file, or its beginning if the whole has another size."""
    try:
        size, expected_size = check_regular(path), expected.bytes if whole_size is None else whole_size
        if size != expected_size:
            raise CheckpointError(f"{path} is truncated or changed: {size} bytes, the manifest says {expected_size}")
        if file_hash(path, size=expected.bytes) != expected.xxh3:
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
