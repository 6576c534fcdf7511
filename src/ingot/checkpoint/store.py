"""Saving and loading checkpoints of a run, and finding the newest good one."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ingot.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    read_manifest,
    remove,
    steps_in,
    sync,
    verify,
    write_manifest,
)
from ingot.errors import CheckpointError

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
RNG = "rng.safetensors"
CHECKPOINTS = "checkpoints"


def save_checkpoint(run: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
    """Write `checkpoints/STEP` under a run folder: one safetensors file per entry of `tensors`, then the manifest.

    A failure (a full disk) leaves nothing behind and raises OSError.
    """
    parent = run / CHECKPOINTS
    parent.mkdir(parents=True, exist_ok=True)
    target = parent / str(step)
    draft = parent / f".draft-{step}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        for name, content in tensors.items():
            _write_tensors(draft / name, content)
        write_manifest(draft, step, list(tensors), state)
        if target.exists():
            remove(target)
        os.replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(parent)
    return target


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path)
    except SafetensorError as error:  # how the library reports a failed write
        raise OSError(0, str(error)) from None
    with path.open("rb") as file:
        os.fsync(file.fileno())


def clear_drafts(run: Path) -> None:
    """Remove what a killed save or removal left behind."""
    for leftover in (run / CHECKPOINTS).glob(".*-*"):
        if leftover.name.startswith((".draft-", ".remove-")):
            shutil.rmtree(leftover, ignore_errors=True)


def keep_newest(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; -1 keeps all."""
    if keep >= 0:
        for step in steps_in(run / CHECKPOINTS)[: -max(keep, 1)]:
            remove(run / CHECKPOINTS / str(step))


def newest_good_checkpoint(run: Path) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint of a run whose files are all intact, and what was wrong with newer ones.

    None if the run has no checkpoint yet; an error if it has some and all are damaged.
    """
    problems: list[str] = []
    for step in reversed(steps_in(run / CHECKPOINTS)):
        try:
            manifest = read_manifest(run / CHECKPOINTS / str(step))
            verify(manifest)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        return manifest, problems
    if problems:
        raise CheckpointError(f"{problems[0]}; no other checkpoint of this run is intact: start over with --fresh")
    return None, problems


def find_checkpoint(path: Path) -> Manifest:
    """The checkpoint that a path means: itself, or the newest of a run folder. Its files are verified."""
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
    elif steps := steps_in(path / CHECKPOINTS):
        manifest = read_manifest(path / CHECKPOINTS / str(steps[-1]))
    elif not path.exists():
        raise CheckpointError(f"no such run or checkpoint: {path}")
    else:
        raise CheckpointError(f"{path} holds no checkpoint: neither {MANIFEST} nor {CHECKPOINTS}/STEP/{MANIFEST}")
    verify(manifest)
    return manifest


def load_tensors(manifest: Manifest, name: str) -> dict[str, Tensor]:
    """All tensors of one file, on the CPU."""
    path = manifest.path(name)
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None


class CheckpointTensors:
    """The tensors of one file of a checkpoint, read one at a time."""

    def __init__(self, manifest: Manifest, file: str = MODEL):
        self.path = manifest.path(file)
        try:
            self._file = safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path} cannot be read as safetensors: {error}") from None

    def names(self) -> list[str]:
        return list(self._file.keys())

    def get(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


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
