"""ingot: raw text to a pretrained GPT-style language model.

The Python API mirrors the command line: `ingot.prepare(...)`, `ingot.train(RunConfig(...))`, `ingot.load(path)`.
Nothing heavy is imported before it is used: `import ingot` and `ingot --help` do not wait for torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

# The import system binds the name of a sub-package once, when it is first imported. Done here, so that the function
# `train` below can have the name; `from ingot.train.x import y` works all the same.
import ingot.train as _train_layer  # noqa: F401
from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.data.prepare import prepare
    from ingot.model.gpt import GPT
    from ingot.train.config import RunConfig
    from ingot.train.trainer import Result

__all__ = ["RunConfig", "__version__", "load", "prepare", "train"]


def train(config: "RunConfig", fresh: bool = False) -> "Result":
    """Train a run to its end, continuing it if its folder holds a checkpoint."""
    from ingot.report.run import train as run

    return run(config, fresh)


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
