"""A checkpoint is a folder of safetensors files and a `manifest.json` that names each with its size and hash.

The manifest is written last and the folder renamed into place after it, so a checkpoint exists whole or not at all.
Nothing here is pickled: loading a checkpoint runs no code of whoever wrote it.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.data.files import file_hash
from ingot.errors import CheckpointError

FORMAT = "ingot-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    folder: Path
    step: int
    files: dict[str, dict[str, Any]]
    """File name to {"bytes", "xxh3"}."""
    state: dict[str, Any]
    """Everything that is not a tensor: config, progress, position in metrics.jsonl."""

    def path(self, name: str) -> Path:
        if name not in self.files:
            raise CheckpointError(f"checkpoint {self.folder} has no {name}; it holds weights only, not training state")
        return self.folder / name

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())


def write_manifest(folder: Path, step: int, names: list[str], state: dict[str, Any]) -> None:
    """Hash the files of a checkpoint and write the manifest that makes it one."""
    files = {name: {"bytes": (folder / name).stat().st_size, "xxh3": file_hash(folder / name)} for name in names}
    content = {"format": FORMAT, "version": VERSION, "step": step, "files": files, "state": state}
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest; the files it names are checked by `verify`."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a manifest of an ingot checkpoint")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {content.get('version')}, and this ingot reads version {VERSION}; install a "
            "newer one"
        )
    try:
        files, step, state = content["files"], int(content["step"]), dict(content["state"])
        for name, entry in files.items():
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.startswith("."):
                raise CheckpointError(f"{path} names a file outside its folder: {name!r}")
            int(entry["bytes"]), str(entry["xxh3"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path} is damaged: it lacks the step, files or state of a manifest") from None
    return Manifest(folder, step, files, state)


def verify(manifest: Manifest) -> None:
    """Check every file's presence, size and hash."""
    for name, entry in manifest.files.items():
        path = manifest.folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {manifest.folder} is incomplete: {name} is missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{path} is truncated or changed: {size} bytes, the manifest says {entry['bytes']}")
        if file_hash(path) != entry["xxh3"]:
            raise CheckpointError(f"{path} is corrupt: its hash differs from the manifest's")


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's `checkpoints` folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and (p / MANIFEST).is_file())


def remove(folder: Path) -> None:
    """Delete a checkpoint: first the name, in one step, then the files."""
    doomed = folder.with_name(f".remove-{folder.name}-{os.getpid()}")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one step, and make it last."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file or the names in a folder last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
