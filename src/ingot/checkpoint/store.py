"""The checkpoints of a run: find them, read tensors from them, delete old ones."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.checkpoint.location import no_checkpoint_error
from ingot.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    MODEL,
    File,
    Manifest,
    file_name,
    incomplete_steps,
    parse_manifest,
    read_manifest_text,
    remove,
    steps_in,
    verify,
    write_manifest,
)
from ingot.checkpoint.placement import Chunk, Entry
from ingot.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, SafetensorsFile, write_shard
from ingot.checkpoint.save_plan import Tensors
from ingot.parallel.coordinator import Coordinator, LocalCoordinator
from ingot.storage.atomic import sync

DRAFT, REMOVE, OLD = ".draft-", ".remove-", ".old-"
OLD_RNG = "rng/"  # entries that v0.1 wrote with the optimizer's state: generator states, not needed any more


def save_checkpoint(
    run: Path, step: int, tensors: Tensors, state: dict[str, Any], get: Callable[[str, str], Tensor] | None = None
) -> Path:
    """Write `checkpoints/STEP` under a run folder, synchronously and from this process alone.

    `tensors` are whole; with `get` they only describe type and shape, and `get(kind of file, name)` returns the values.
    A failure (a full disk) leaves nothing behind and raises OSError.
    """
    draft = run / CHECKPOINTS / f"{DRAFT}{step}-{os.getpid()}"
    try:
        draft.mkdir(parents=True)
        files = {}
        for kind, content in tensors.items():
            name = file_name(kind, 0, 1)
            files[name] = write_shard(draft / name, content, partial(get, kind) if get is not None else None)
        entries = {
            kind: {name: Entry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in content.items()}
            for kind, content in tensors.items()
        }
        write_manifest(Manifest(step, 1, files, entries, state, draft))
        return put_in_place(draft, step)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def put_in_place(draft: Path, step: int, confirm_owner: Callable[[], None] = lambda: None) -> Path:
    """Give a complete draft its name. An older checkpoint of that step is deleted once the new one is in place.

    `confirm_owner` raises an error if the run has got another owner.
    """
    confirm_owner()
    target = draft.with_name(str(step))
    old = draft.with_name(f"{OLD}{step}")
    if target.exists():
        os.replace(target, old)
    os.replace(draft, target)
    sync(target.parent)
    if old.exists():
        remove(old)
    return target


def clear_drafts(run: Path) -> None:
    """Remove what was left behind by a save or removal that was killed."""
    for leftover in (run / CHECKPOINTS).glob(".*-*"):
        replaced = leftover.with_name(leftover.name.removeprefix(OLD))
        if leftover.name.startswith(OLD) and not replaced.exists():  # killed between the two renames of a save
            os.replace(leftover, replaced)
        elif leftover.name.startswith((DRAFT, REMOVE, OLD)):
            shutil.rmtree(leftover, ignore_errors=True)


def to_remove(steps: list[int], keep: int, every: int) -> list[int]:
    """Which checkpoints to delete: all but the newest `keep` (-1 keeps all) and those at multiples of `every`."""
    older = sorted(steps)[: -max(keep, 1)] if keep >= 0 else []
    return [step for step in older if not (every and step % every == 0)]


def own_files(manifest: Manifest, coordinator: Coordinator, kinds: list[str] | None = None) -> dict[str, File]:
    """The files that this rank checks, fetches or uploads, as of `files_of`: with as many ranks as saved the
    checkpoint, those that it wrote."""
    by_kind = [manifest.files_of([kind]) for kind in kinds or manifest.tensors]
    own = [name for files in by_kind for name in list(files)[coordinator.rank :: coordinator.world_size]]
    return {name: manifest.files[name].beginning(kinds or manifest.tensors) for name in own}


def find_checkpoint(path: Path, coordinator: Coordinator | None = None) -> Manifest:
    """The checkpoint at a path: the path itself, or the newest one of a run folder. Its weights are verified, by all
    ranks together."""
    coordinator = coordinator or LocalCoordinator()
    found = coordinator.broadcast(lambda: str(_newest_folder(path)).encode()).decode()
    return read_and_verify(Path(found), coordinator, [MODEL])


def _newest_folder(path: Path) -> Path:
    if (path / MANIFEST).is_file():
        return path
    if not (steps := steps_in(path / CHECKPOINTS)):
        raise no_checkpoint_error(path)
    newest = path / CHECKPOINTS / str(steps[-1])
    for step in incomplete_steps(path / CHECKPOINTS):
        if step > steps[-1]:
            skipped = f"{path / CHECKPOINTS / str(step)} is incomplete (it has no {MANIFEST}) and was skipped"
            print(f"warning: {skipped}; using {newest}", file=sys.stderr)
    return newest


def read_and_verify(folder: Path, coordinator: Coordinator, kinds: list[str] | None = None) -> Manifest:
    """A checkpoint whose files, or those of some kinds, have been verified, each rank some of them. Rank 0 alone reads
    the manifest."""
    text = coordinator.broadcast(lambda: read_manifest_text(folder))

    def verify_own_files() -> Manifest:
        manifest = parse_manifest(text, folder, str(folder / MANIFEST))
        verify(manifest, own_files(manifest, coordinator, kinds))
        return manifest

    return coordinator.run_on_all_ranks(verify_own_files)


def consolidate(manifest: Manifest, out: Path, kinds: list[str]) -> Path:
    """Rewrite a checkpoint with one file of each kind, however many ranks saved it."""
    stored = {kind: CheckpointTensors(manifest, kind) for kind in kinds}
    described = {
        kind: {n: torch.empty(e.shape, dtype=DTYPES[e.dtype], device="meta") for n, e in tensors.entries.items()}
        for kind, tensors in stored.items()
    }
    return save_checkpoint(out, manifest.step, described, manifest.state, lambda kind, name: stored[kind].get(name))


class CheckpointTensors:
    """The tensors of a checkpoint, whole or in part, however they were sharded when they were saved."""

    def __init__(self, manifest: Manifest, kind: str = MODEL):
        self.manifest, self.kind = manifest, kind
        self.entries: dict[str, Entry] = manifest.tensors.get(kind, {})
        self._files: dict[str, SafetensorsFile] = {}

    def names(self) -> list[str]:
        return list(self.entries)

    def get(self, name: str) -> Tensor:
        """A whole tensor."""
        entry = self.entries[name]
        parts = list(islice(entry.parts(), 2))
        if len(parts) == 1 and parts[0][2] == entry.shape:
            return self._chunk(name, parts[0])
        whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.read(name, whole, [0] * whole.ndim)
        return whole

    def read(self, name: str, target: Tensor, offsets: Sequence[int]) -> None:
        """Fill a tensor with the part of a stored one that begins at `offsets`."""
        for chunk in self.entries[name].overlapping(offsets, target.shape):
            there, here = [], []
            for begin, size, offset, length in zip(offsets, target.shape, chunk[1], chunk[2], strict=True):
                low, high = max(begin, offset), min(begin + size, offset + length)
                there.append(slice(low - offset, high - offset))
                here.append(slice(low - begin, high - begin))
            if all(part.start < part.stop for part in here):
                target[tuple(here)].copy_(self._chunk(name, chunk)[tuple(there)])

    def _chunk(self, name: str, chunk: Chunk) -> Tensor:
        file = self.manifest.file_of(self.kind, chunk[0])
        if file not in self._files:
            self._files[file] = SafetensorsFile(self.manifest.folder / file)
        return self._files[file].get(name, self.entries[name].dtype, chunk[2])
