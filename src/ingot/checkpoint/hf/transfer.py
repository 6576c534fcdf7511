"""Converts between our checkpoints and Hugging Face folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ingot.checkpoint.hf.folder import TensorReader, export_hf, read_hf
from ingot.checkpoint.load import open_weights
from ingot.checkpoint.store import MODEL, save_checkpoint
from ingot.config.model import ModelConfig
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.errors import CheckpointError, disk_error
from ingot.storage.atomic import write_whole
from ingot.storage.names import plain_name_from
from ingot.version import __version__

TOKENIZER_FILE = "tokenizer.json"
Reader = Callable[[Path], tuple[ModelConfig, TensorReader]]


def export_run(path: Path, out: Path, dtype: str | None = None, max_shard_bytes: int = 5 * 10**9) -> str:
    """Write the model of a run, checkpoint or Hugging Face folder as a Hugging Face folder. Returns the class name."""
    config, tensors = open_weights(path)
    tokenizer = tokenizer_folder(path)
    return export_hf(tensors, config, out, tokenizer=tokenizer, dtype=dtype, max_shard_bytes=max_shard_bytes)


def import_hf(folder: Path, out: Path, read: Reader = read_hf) -> dict[str, Any]:
    """Turn a Hugging Face folder into a run folder with its weights. Returns the config that it wrote.

    Weights keep their stored type, so exporting them again writes the same bits.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} already exists and is not empty; choose another folder")
    config, tensors = read(folder)
    name = plain_name_from(out.absolute().name)
    values = {"name": name, "max_seq_len": config.context, "model": json.loads(config.model_dump_json())}
    state = {"config": values, "source": folder.name, "versions": {"ingot": __version__}}
    try:
        described = {name: tensors.get(name).to("meta") for name in tensors.names()}  # one is in memory at a time
        save_checkpoint(out, 0, {MODEL: described}, state, lambda _, name: tensors.get(name))
        if tokenizer := tokenizer_folder(folder):
            load_tokenizer(tokenizer).save(out / "tokenizer")
        header = (
            f"# Imported from {folder.name}. Train it with: ingot train {out}/config.yaml data=... load_path={out}\n"
        )
        write_whole(out / "config.yaml", header + yaml.safe_dump(values, sort_keys=False))
    except OSError as error:
        raise disk_error("write", out, error) from None
    return values


def tokenizer_folder(path: Path) -> Path | None:
    """The folder of the tokenizer that belongs to a run folder, a checkpoint in one, or a Hugging Face folder."""
    folders = (path / "tokenizer", path, path.parent.parent / "tokenizer")
    return next((folder for folder in folders if (folder / TOKENIZER_FILE).is_file()), None)


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer that belongs to such a folder."""
    folder = tokenizer_folder(path)
    if folder is None:
        raise CheckpointError(f"{path} has no tokenizer; put {TOKENIZER_FILE} into {path / 'tokenizer'}")
    return load_tokenizer(folder)
