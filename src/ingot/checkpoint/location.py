"""Finds, checks and copies checkpoints by path or URL. Without torch, whose import takes longer than all of that."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ingot.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    File,
    Manifest,
    parse_manifest,
    read_manifest_text,
    steps_in,
    verify_file,
)
from ingot.errors import CheckpointError, disk_error
from ingot.storage.object_store import Again, NotThere, Remote


@dataclass(frozen=True)
class CheckpointLocation:
    """A checkpoint in a folder or at a URL."""

    remote: Remote
    prefix: str
    """`checkpoints/STEP/`, or empty if `remote` is the checkpoint itself."""

    def __str__(self) -> str:
        return f"{self.remote.url}/{self.prefix}".rstrip("/")

    @property
    def step(self) -> int:
        """According to the folder's name."""
        return int(self.prefix.split("/")[1])

    def manifest(self) -> Manifest:
        return self.parse(self.manifest_text())

    def manifest_text(self) -> bytes:
        if self.remote.folder is not None:
            return read_manifest_text(self.remote.folder / self.prefix)
        text = self.remote.read(self.prefix + MANIFEST)
        if text is None:
            raise CheckpointError(f"{self} is not a checkpoint: it has no {MANIFEST}")
        return text

    def parse(self, text: bytes) -> Manifest:
        folder = self.remote.folder / self.prefix if self.remote.folder is not None else Path(str(self))
        return parse_manifest(text, folder, f"{self}/{MANIFEST}")

    def check(self, name: str, expected: File) -> None:
        """Check a file's presence, size and hash."""
        if self.remote.folder is not None:
            verify_file(self.remote.folder / self.prefix / name, expected)
        else:
            self.fetch(name, expected, Path(os.devnull))

    def fetch(self, name: str, expected: File, target: Path, whole_size: int | None = None) -> None:
        """Copy a file to this machine and check it. If the whole file has another size, only its beginning is read; the
        copy has the size of the whole, as a sparse file."""
        size = expected.bytes if whole_size is None else whole_size

        def attempt() -> None:
            with target.open("wb") as file:
                self._stream(name, expected, file.write, size)
                if size != expected.bytes:
                    file.truncate(size)

        if self.remote.folder is not None:
            verify_file(self.remote.folder / self.prefix / name, expected, size)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.remote.retry(self.prefix + name, attempt)
        except NotThere:
            raise CheckpointError(f"checkpoint {self} is incomplete: {name} is missing") from None
        except OSError as error:
            raise disk_error("write", target, error) from None

    def _stream(self, name: str, expected: File, use: Callable[[bytes], object], whole_size: int) -> None:
        digest, size, path = xxhash.xxh3_128(), 0, self.prefix + name
        whole = expected.bytes == whole_size
        for chunk in self.remote.stream(path) if whole else self.remote.stream(path, 0, expected.bytes):
            digest.update(chunk)
            use(chunk)
            size += len(chunk)
            if size > expected.bytes:
                break
        if size < expected.bytes and self.remote.folder is None and size != self.remote.size(path):
            raise Again(f"{name} ended early, after {size} bytes")
        if size != expected.bytes:
            raise CheckpointError(f"{self}/{name} is truncated or changed: the manifest says {whole_size} bytes")
        if digest.hexdigest() != expected.xxh3:
            raise CheckpointError(f"{self}/{name} is corrupt: its hash differs from the manifest's")


def find_checkpoints(where: str | Remote) -> list[CheckpointLocation]:
    """The checkpoints of a run, oldest first; or the path or URL itself, if it is a checkpoint."""
    remote = Remote(where) if isinstance(where, str) else where
    if remote.size(MANIFEST) is not None:
        return [CheckpointLocation(remote, "")]
    return [location for location in _numbered(remote) if remote.size(location.prefix + MANIFEST) is not None]


def find_incomplete(where: str) -> list[CheckpointLocation]:
    """Numbered folders of a run without a manifest: it was deleted, or an upload is unfinished."""
    remote = Remote(where)
    if remote.size(MANIFEST) is not None:
        return []
    return [location for location in _numbered(remote) if remote.size(location.prefix + MANIFEST) is None]


def _numbered(remote: Remote) -> list[CheckpointLocation]:
    steps = sorted(int(name) for name in remote.names(CHECKPOINTS, required=True) if re.fullmatch("[0-9]+", name))
    return [CheckpointLocation(remote, f"{CHECKPOINTS}/{step}/") for step in steps]


def model_folder(path: Path, step: int | None = None) -> Path:
    """Where to read a model from: a run folder, checkpoint or Hugging Face folder, or a run's checkpoint of a step."""
    steps = steps_in(path / CHECKPOINTS)
    if (path / "config.json").is_file() or (path / MANIFEST).is_file():
        if step is not None:
            raise CheckpointError(f"{path} is a single model, not a run with steps; leave out --step")
        return path
    if not steps:
        raise no_checkpoint_error(path)
    if step is not None and step not in steps:
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return path if step is None else path / CHECKPOINTS / str(step)


def no_checkpoint_error(path: Path) -> CheckpointError:
    if not path.exists():
        return CheckpointError(f"no such run or checkpoint: {path}")
    return CheckpointError(f"{path} holds no checkpoint: neither {MANIFEST} nor {CHECKPOINTS}/STEP/{MANIFEST}")
