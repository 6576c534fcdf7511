"""ingot: raw text to a pretrained GPT-style language model.

The Python API mirrors the command line: `ingot.prepare(...)`, `ingot.train(RunConfig(...))`, `ingot.load(path)`.
Nothing heavy is imported before it is used: `import ingot` and `ingot --help` do not wait for torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.config.run import RunConfig
    from ingot.data.prepare.prepare import prepare
    from ingot.model.gpt import GPT
    from ingot.report.listeners import train

__all__ = ["RunConfig", "__version__", "load", "prepare", "train"]


def load(path: str | Path, device: str = "cpu") -> "GPT":
    """The model of a run folder, a checkpoint or a Hugging Face folder: token ids [B, T] to logits [B, T, V]."""
    from ingot.checkpoint.load import load_model

    return load_model(path, device)


def __getattr__(name: str) -> Any:
    if name == "train":
        from ingot.report.listeners import train

        return train
    if name == "prepare":
        from ingot.data.prepare.prepare import prepare

        return prepare
    if name == "RunConfig":
        from ingot.config.run import RunConfig

        return RunConfig
    raise AttributeError(f"module 'ingot' has no attribute {name!r}")
