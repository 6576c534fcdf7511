"""Loads models and weights from a run folder, a checkpoint or a Hugging Face folder."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.checkpoint.hf.folder import TensorReader, read_hf
from ingot.checkpoint.hf.weights import EMBEDDINGS
from ingot.checkpoint.manifest import Manifest
from ingot.checkpoint.store import CheckpointTensors, find_checkpoint
from ingot.config.load import validate
from ingot.config.model import ModelConfig
from ingot.errors import CheckpointError, ConfigError
from ingot.host_memory import available_memory
from ingot.model.gpt import GPT, allocate
from ingot.parallel.coordinator import Coordinator
from ingot.parallel.dtensor import fill, local, local_offsets


def load_model(path: str | Path, device: str | torch.device = "cpu") -> GPT:
    """The model in a run folder, checkpoint or Hugging Face folder, in fp32 and ready for inference."""
    config, tensors = open_weights(Path(path))
    needed, available = 4 * config.parameters, available_memory()
    if torch.device(device).type == "cpu" and available is not None and needed > available:
        raise CheckpointError(
            f"{path} has {config.parameters:,} parameters: {needed / 2**30:.1f} GiB in fp32, and "
            f"{available / 2**30:.1f} GiB are available; use a machine with more memory, or a GPU"
        )
    model = allocate(config, device)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    fill_parameters(names, names.values(), tensors, str(path))
    return model.eval()


def open_weights(path: Path, coordinator: Coordinator | None = None) -> tuple[ModelConfig, TensorReader]:
    """The config and the weights of a model in any kind of folder. The ranks of a `coordinator` share the checks."""
    if (path / "config.json").is_file():
        return read_hf(path)
    manifest = find_checkpoint(path, coordinator)
    return model_config(manifest), CheckpointTensors(manifest)


def model_config(manifest: Manifest) -> ModelConfig:
    """The config of the model in a checkpoint."""
    try:
        return validate(ModelConfig, manifest.state["config"]["model"])
    except (KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{manifest.folder}: the manifest does not describe a model ({error})") from None


def fill_parameters(
    parameters: dict[Tensor, str], model_names: Iterable[str], tensors: TensorReader, source: str
) -> None:
    """Copy weights into this rank's parameters. Every name of the whole model, `model_names`, must exist."""
    known, found = set(model_names), set(tensors.names())
    if missing := sorted(known - found):
        raise CheckpointError(f"{source} has no weight {missing[0]}: it is from another model")
    if extra := sorted(found - known):
        raise CheckpointError(f"{source} has a weight {extra[0]} that this model lacks: it is from another model")
    for parameter, name in parameters.items():
        read_into(parameter, name, tensors, source)


def read_into(target: Tensor, name: str, tensors: TensorReader, source: str) -> None:
    """Fill a tensor, or this rank's shard of it. From our own checkpoints, only that part is read."""
    if isinstance(tensors, CheckpointTensors):
        _check_shape(target, tensors.entries[name].shape, name, source)
        with torch.no_grad():
            tensors.read(name, local(target), local_offsets(target))
    else:
        whole = tensors.get(name)
        _check_shape(target, whole.shape, name, source)
        fill(target, whole)


@dataclass(frozen=True)
class Repadded:
    """Weights of a model whose vocabulary has other padding: unused rows are cut, or added as zeros."""

    tensors: TensorReader
    vocab: int
    rows: int

    def names(self) -> list[str]:
        return self.tensors.names()

    def get(self, name: str) -> Tensor:
        whole = self.tensors.get(name)
        return F.pad(whole[: self.vocab], (0, 0, 0, self.rows - self.vocab)) if name in EMBEDDINGS else whole


def _check_shape(target: Tensor, shape: tuple[int, ...], name: str, source: str) -> None:
    if tuple(shape) != target.shape:
        raise CheckpointError(f"{source}: {name} has shape {list(shape)}, and in this model {list(target.shape)}")
