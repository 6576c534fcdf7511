"""A process that is killed at any byte of a save leaves whole checkpoints, and drafts that the next start removes."""

import multiprocessing
import os
import time
from pathlib import Path

import torch

from ingot.checkpoint.async_writer import AsyncWriter
from ingot.checkpoint.manifest import MODEL, OPTIMIZER, remove, steps_in
from ingot.checkpoint.remote_copy import newest_good
from ingot.checkpoint.save_plan import Tensors
from ingot.checkpoint.store import CheckpointTensors, clear_drafts, to_remove
from ingot.parallel.coordinator import LocalCoordinator

TENSORS, EACH = 20, 300_000  # floats
BYTES = 2 * TENSORS * EACH * 4


def state(step: int) -> Tensors:
    return {
        MODEL: {f"w{i}": torch.full((EACH,), float(step)) for i in range(TENSORS)},
        OPTIMIZER: {f"exp_avg/w{i}": torch.full((EACH,), float(step)) for i in range(TENSORS)},
    }


def save_for_ever(run: Path) -> None:
    torch.set_num_threads(1)
    clear_drafts(run)
    manifest, _ = newest_good(run, LocalCoordinator())
    step = manifest.step if manifest is not None else 0

    def after(step: int, final: bool) -> bool:
        for old in to_remove(steps_in(run / "checkpoints"), keep=2, every=0):
            remove(run / "checkpoints" / str(old))
        return False

    saver = AsyncWriter(run, after_save=after)
    while True:
        step += 1
        saver.save(step, state(step), {})


def drafted(run: Path) -> int:
    try:
        return sum(path.stat().st_size for path in (run / "checkpoints").glob(".draft-*/*"))
    except FileNotFoundError:  # just renamed to what it was to become
        return 0


def test_killed_at_twenty_offsets_of_a_save_a_run_never_finds_a_torn_checkpoint(tmp_path: Path) -> None:
    start = multiprocessing.get_context("fork")  # a real process without another two seconds of imports
    seen, last = [], 0
    for number in range(20):
        offset = BYTES * number // 19
        process = start.Process(target=save_for_ever, args=(tmp_path,))
        process.start()
        while (size := drafted(tmp_path)) < min(offset, BYTES - 1) or not steps_in(tmp_path / "checkpoints"):
            assert process.is_alive()
            time.sleep(0)
        os.kill(process.pid, 9)  # type: ignore[arg-type]
        process.join()
        seen.append(size)

        clear_drafts(tmp_path)
        assert all(name.isdigit() for name in os.listdir(tmp_path / "checkpoints"))
        manifest, problems = newest_good(tmp_path, LocalCoordinator())
        assert problems == [] and manifest is not None and manifest.step >= last
        last = manifest.step
        for kind in (MODEL, OPTIMIZER):
            stored = CheckpointTensors(manifest, kind)
            assert len(stored.names()) == TENSORS
            assert all((stored.get(name) == manifest.step).all() for name in stored.names())
    assert len({size * 10 // BYTES for size in seen}) >= 4  # the kills really were at different places
