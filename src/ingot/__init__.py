"""ingot: raw text to a pretrained GPT-style language model.

The Python API mirrors the command line: `ingot.prepare(...)`, `ingot.train(RunConfig(...))`, `ingot.load(path)`.
Nothing heavy is imported before it is used: `import ingot` and `ingot --help` do not wait for torch.
"""

import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ingot.train as _train_layer
from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.data.prepare import prepare
    from ingot.model.gpt import GPT
    from ingot.report.run import train
    from ingot.train.config import RunConfig

__all__ = ["RunConfig", "__version__", "load", "prepare", "train"]


class _TrainLayer(types.ModuleType):
    """`ingot.train` is a layer of the package and, like the verb of that name, something to call."""

    def __call__(self, config: "RunConfig", fresh: bool = False) -> Any:
        from ingot.report.run import train

        return train(config, fresh)


_train_layer.__class__ = _TrainLayer


def load(path: str | Path, device: str = "cpu") -> "GPT":
    """The model of a run folder, a checkpoint or a Hugging Face folder: token ids [B, T] to logits [B, T, V]."""
    from ingot.checkpoint.load import load_model

    return load_model(path, device)


def __getattr__(name: str) -> Any:
    if name == "prepare":
        from ingot.data.prepare import prepare

        return prepare
    if name == "RunConfig":
        from ingot.train.config import RunConfig

        return RunConfig
    raise AttributeError(f"module 'ingot' has no attribute {name!r}")
