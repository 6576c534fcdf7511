"""What can be wrong with a run and is found without torch, which takes seconds to load."""

import errno
import os
from pathlib import Path

from ingot.checkpoint.location import model_folder
from ingot.checkpoint.manifest import CHECKPOINTS, read_manifest, steps_in
from ingot.config.run import RunConfig
from ingot.data.loading.open_dataset import check_local
from ingot.errors import CheckpointError, disk_error
from ingot.parallel.layout import Layout
from ingot.storage.object_store import is_url
from ingot.training.runtime.memory_check import check_batch_memory, check_host_memory
from ingot.training.runtime.run_folder import changed_keys


def check_early(config: RunConfig, fresh: bool, layout: Layout, processes: int, has_gpu: bool) -> None:
    """Refuse a run whose data, folder, weights or size cannot work. Nothing is written, nothing fetched."""
    for source in (config.sources.train, *config.sources.eval_sources.values()):
        check_local(source, config.model.vocab_size)
    if config.load_path is not None and not is_url(config.load_path):
        model_folder(Path(config.load_path))
    run = Path(config.run_folder)
    check_writable(run)
    if not fresh:
        _check_continues(config, run)
    check_batch_memory(config, layout, processes)
    if config.device == "cpu" or not has_gpu:
        check_host_memory(config, layout, processes)


def may_have_gpu() -> bool:
    """Whether torch may find a GPU here: of NVIDIA on a server, under WSL or on a Jetson."""
    return any(any(Path("/dev").glob(pattern)) for pattern in ("nvidia[0-9]*", "dxg", "nvhost-*"))


def _check_continues(config: RunConfig, run: Path) -> None:
    """Refuse a checkpoint of another model. A damaged one is left to the trainer, which goes back to the one before."""
    for step in steps_in(run / CHECKPOINTS)[-1:]:
        try:
            manifest = read_manifest(run / CHECKPOINTS / str(step))
        except CheckpointError:
            return
        if "config" in manifest.state and (manifest.has_training_state or manifest.step):  # otherwise imported weights
            changed_keys(config, manifest)


def check_writable(folder: Path) -> None:
    """Raise if a folder cannot be created or written to. Nothing is created here: the launcher of another machine may
    be doing just that."""
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK | os.X_OK):
            code = errno.EROFS if os.statvfs(nearest).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code))
    except OSError as error:
        raise disk_error("write the run folder", folder, error) from None
