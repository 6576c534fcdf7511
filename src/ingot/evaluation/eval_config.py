"""The config of `ingot eval`: that of the run with overrides, checked without loading torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.checkpoint.hf.config import from_hf_config
from ingot.checkpoint.location import model_folder
from ingot.checkpoint.manifest import CHECKPOINTS, read_manifest, steps_in
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.loading.open_dataset import check_local
from ingot.errors import CheckpointError, ConfigError

NO_DATA = "there is no validation data; name it with data.eval.path=FOLDER, and data.eval.split=NAME if it has splits"


def load_eval_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The config of a run, checkpoint or Hugging Face folder, whose validation data exists."""
    base = _stored_config(path)
    given = dict(override.partition("=")[::2] for override in overrides)
    where = given.get("data.eval.path")
    if "data.eval.split" not in given and where and _is_one_dataset(Path(where)):
        overrides = [*overrides, "data.eval.split=null"]  # the run's own split is of another folder
    if not base.get("data") and where:
        base["data"] = {"train": {"path": where}}  # required of a run, and not read here
    config = load_config(RunConfig, overrides, base)
    if config.data is None or not config.data.eval_sources:
        raise ConfigError(NO_DATA)
    for source in config.data.eval_sources.values():
        check_local(source, config.model.vocab_size)
    return config


def _stored_config(path: Path) -> dict[str, Any]:
    folder = model_folder(path)
    if (folder / "config.json").is_file():
        try:
            values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"cannot read {folder / 'config.json'}: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{folder / 'config.json'} should hold a JSON object")
        model = json.loads(from_hf_config(values, str(folder / "config.json")).model_dump_json())
        return {"model": model, "max_seq_len": model["max_seq_len"]}
    steps = steps_in(folder / CHECKPOINTS)
    manifest = read_manifest(folder / CHECKPOINTS / str(steps[-1]) if steps else folder)
    if not isinstance(manifest.state.get("config"), dict):
        raise CheckpointError(f"{manifest.folder}: the manifest does not describe a model")
    return dict(manifest.state["config"])


def _is_one_dataset(path: Path) -> bool:
    """Whether this is a dataset itself, not a folder of splits."""
    return (path / "index.json").is_file() or Path(f"{path.with_suffix('')}.idx").is_file()
