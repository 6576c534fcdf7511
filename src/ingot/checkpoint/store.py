"""The checkpoints of a run: finding them, reading tensors out of them, keeping some."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.checkpoint.coordinator import Coordinator
from ingot.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    MODEL,
    Chunk,
    Entry,
    Manifest,
    file_name,
    incomplete_steps,
    read_manifest,
    remove,
    steps_in,
    verify,
    write_manifest,
)
from ingot.checkpoint.safetensors_file import DTYPES, SafetensorsFile, write_shard
from ingot.checkpoint.save_plan import Tensors, plan_save
from ingot.errors import CheckpointError
from ingot.storage.atomic import sync

DRAFT, REMOVE, OLD = ".draft-", ".remove-", ".old-"
RNG = "rng"  # names of the generators' states begin with it and the number of their process


def save_checkpoint(
    run: Path, step: int, tensors: Tensors, state: dict[str, Any], get: Callable[[str, str], Tensor] | None = None
) -> Path:
    """Write `checkpoints/STEP` under a run folder, at once and from this process alone; `tensors` are whole, and where
    `get` is given only described: it gives their values, by kind of file and name.

    A failure (a full disk) leaves nothing behind and raises OSError.
    """
    draft = run / CHECKPOINTS / f"{DRAFT}{step}-{os.getpid()}"
    try:
        draft.mkdir(parents=True)
        files = {}
        for section, content in tensors.items():
            name = file_name(section, 0, 1)
            files[name] = write_shard(draft / name, content, partial(get, section) if get is not None else None)
        plan = plan_save(tensors, Coordinator(), full=True)
        write_manifest(Manifest(step, 1, files, plan.entries, state, draft))
        return put_in_place(draft, step)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def put_in_place(draft: Path, step: int) -> Path:
    """Give a complete draft its name. One of that step that was there before goes only when this one is there."""
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
    """Remove what a killed save or removal left behind."""
    for leftover in (run / CHECKPOINTS).glob(".*-*"):
        replaced = leftover.with_name(leftover.name.removeprefix(OLD))
        if leftover.name.startswith(OLD) and not replaced.exists():  # killed between the two renames of a save
            os.replace(leftover, replaced)
        elif leftover.name.startswith((DRAFT, REMOVE, OLD)):
            shutil.rmtree(leftover, ignore_errors=True)


def to_remove(steps: list[int], keep: int, every: int) -> list[int]:
    """Of the steps of some checkpoints, those that go: all but the newest `keep` (-1 for all) and every so many."""
    older = sorted(steps)[: -max(keep, 1)] if keep >= 0 else []
    return [step for step in older if not (every and step % every == 0)]


def share_of(manifest: Manifest, ranks: Coordinator, sections: list[str] | None = None) -> list[str]:
    """The files that this process shall check, fetch or upload; where it has saved some itself, those."""
    kinds = [manifest.section_files(section) for section in sections or manifest.tensors]
    return [name for files in kinds for number, name in enumerate(files) if number % ranks.count == ranks.rank]


def find_checkpoint(path: Path) -> Manifest:
    """The checkpoint that a path means: itself, or the newest of a run folder. Its weights are verified."""
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
    elif steps := steps_in(path / CHECKPOINTS):
        manifest = read_manifest(path / CHECKPOINTS / str(steps[-1]))
        for step in incomplete_steps(path / CHECKPOINTS):
            if step > steps[-1]:
                skipped = f"{path / CHECKPOINTS / str(step)} is incomplete (it has no {MANIFEST}) and was skipped"
                print(f"warning: {skipped}; using {manifest.folder}", file=sys.stderr)
    elif not path.exists():
        raise CheckpointError(f"no such run or checkpoint: {path}")
    else:
        raise CheckpointError(f"{path} holds no checkpoint: neither {MANIFEST} nor {CHECKPOINTS}/STEP/{MANIFEST}")
    verify(manifest, manifest.section_files(MODEL))
    return manifest


def consolidate(manifest: Manifest, out: Path, sections: list[str]) -> Path:
    """Write a checkpoint anew, one file of each kind, whatever the number of processes that it was saved by."""
    stored = {section: CheckpointTensors(manifest, section) for section in sections}
    described = {
        section: {n: torch.empty(e.shape, dtype=DTYPES[e.dtype], device="meta") for n, e in tensors.entries.items()}
        for section, tensors in stored.items()
    }
    return save_checkpoint(out, manifest.step, described, manifest.state, lambda kind, name: stored[kind].get(name))


class CheckpointTensors:
    """The tensors of a checkpoint, or any part of them, however they were cut when they were saved."""

    def __init__(self, manifest: Manifest, section: str = MODEL):
        self.manifest, self.section = manifest, section
        self.entries: dict[str, Entry] = manifest.tensors.get(section, {})
        self._shards: dict[str, SafetensorsFile] = {}

    def names(self) -> list[str]:
        return list(self.entries)

    def get(self, name: str) -> Tensor:
        """A whole tensor."""
        entry = self.entries[name]
        if len(entry.chunks) == 1:
            return self._chunk(name, entry.chunks[0])
        whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.read(name, whole, [0] * whole.ndim)
        return whole

    def read(self, name: str, target: Tensor, offsets: Sequence[int]) -> None:
        """Fill a tensor with the part of a stored one that begins at `offsets`."""
        for chunk in self.entries[name].chunks:
            there, here = [], []
            for begin, size, offset, length in zip(offsets, target.shape, chunk[1], chunk[2], strict=True):
                low, high = max(begin, offset), min(begin + size, offset + length)
                there.append(slice(low - offset, high - offset))
                here.append(slice(low - begin, high - begin))
            if all(place.start < place.stop for place in here):
                target[tuple(here)].copy_(self._chunk(name, chunk)[tuple(there)])

    def _chunk(self, name: str, chunk: Chunk) -> Tensor:
        file = file_name(self.section, chunk[0], self.manifest.parts)
        if file not in self._shards:
            self._shards[file] = SafetensorsFile(self.manifest.folder / file)
        return self._shards[file].get(name, self.entries[name].dtype, chunk[2])


def rng_tensors() -> dict[str, Tensor]:
    """The state of torch's generators (dropout draws from them)."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
