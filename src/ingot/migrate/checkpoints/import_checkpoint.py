"""Whose checkpoint lies at a path, and a run folder made from it."""

import re
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ingot.checkpoint.hf.folder import TensorReader
from ingot.checkpoint.hf.transfer import import_hf
from ingot.config.model import ModelConfig
from ingot.config.recipes import find_recipe
from ingot.errors import CheckpointError, ConfigError, disk_error
from ingot.migrate.checkpoints.composer import read_composer
from ingot.migrate.checkpoints.megatron import rank_folders, read_megatron
from ingot.migrate.checkpoints.merge import validated
from ingot.migrate.checkpoints.neox import is_neox, read_neox
from ingot.migrate.detect import translate
from ingot.migrate.translation import Translation

READERS = {"foundry": read_composer, "neox": read_neox, "megatron": read_megatron}


def import_checkpoint(source: Path, out: Path, config: str | None = None) -> dict[str, Any]:
    """Turn a checkpoint of Hugging Face, Composer, GPT-NeoX or Megatron into a run folder; gives the config it wrote.

    `config` describes the model where the checkpoint does not: a file of the same stack, or a native file or recipe.
    """
    kind, place = recognise(source)
    if kind == "hf":
        if config is not None:
            raise CheckpointError(f"{source} is a Hugging Face folder, which says what it is; leave out --config")
        return import_hf(source, out)

    def read(_: Path) -> tuple[ModelConfig, TensorReader]:
        return READERS[kind](place, described(config, kind) if config else None, Path(work))

    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.reading-", dir=out.absolute().parent) as work:
            return import_hf(source, out, read)
    except OSError as error:
        raise disk_error("write beside", out, error) from None


def recognise(source: Path) -> tuple[str, Path]:
    """The stack that wrote a checkpoint, and the file or folder with its weights."""
    if source.is_file():
        if source.suffix != ".pt":
            raise CheckpointError(f"{source} is no .pt file of Composer; the others are imported by their folder")
        return "foundry", source
    if not source.is_dir():
        raise CheckpointError(f"no such file or folder: {source}")
    if (source / "config.json").is_file():
        return "hf", source
    if (source / ".metadata").is_file() or any(source.glob("*.distcp")):
        raise CheckpointError(f"{source} is sharded by torch.distributed.checkpoint; save it again as full state "
                              "(Composer: state_dict_type full, Megatron: --ckpt-format torch)")  # fmt: skip
    folder = _pointed_to(source)
    if any(path.is_dir() for path in folder.glob("mp_rank_*")) and rank_folders(folder):
        return "megatron", folder
    if is_neox(folder):
        return "neox", folder
    states = {f.name: [int(n) for n in re.findall(r"\d+", f.name)] for f in source.glob("*rank0.pt") if f.is_file()}
    if states:  # latest-rank0.pt, or else ep0-ba1000-rank0.pt with the most batches
        return "foundry", source / max(states, key=lambda name: (name == "latest-rank0.pt", states[name], name))
    raise CheckpointError(f"{source} holds no checkpoint of Hugging Face (config.json), Composer (*-rank0.pt), "
                          "GPT-NeoX (global_stepN) or Megatron (iter_NNNNNNN)")  # fmt: skip


def _pointed_to(folder: Path) -> Path:
    """The newest checkpoint of a folder of several, by the pointer files of NeoX and Megatron."""
    for pointer, name in ("latest_checkpointed_iteration.txt", "iter_{:0>7}"), ("latest", "{}"):
        if (folder / pointer).is_file():
            text = (folder / pointer).read_text(encoding="utf-8", errors="replace").strip()
            found = folder / (text if text == "release" else name.format(text))
            if not re.fullmatch(r"[\w-]+", text) or not found.is_dir():
                raise CheckpointError(f"{folder / pointer} names {text[:40]!r}, which is not in that folder")
            return found
    return folder


def described(config: str, dialect: str) -> ModelConfig | Translation:
    """A model described by a native file or recipe, or by one of the stack that made the checkpoint."""
    path = find_recipe(config)
    if path.suffix in (".yaml", ".yml", ".json"):
        try:
            values = OmegaConf.to_container(OmegaConf.load(path))
        except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as YAML: {str(error).splitlines()[0]}") from None
        model = values.get("model") if isinstance(values, dict) else None
        if isinstance(values, dict) and isinstance(model, dict) and "family" in model:
            return validated({"max_seq_len": values.get("max_seq_len"), **model}, str(path))
    return translate([str(path)], dialect)
