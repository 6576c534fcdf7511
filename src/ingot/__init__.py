"""ingot: raw text to a pretrained GPT-style language model.

The Python API mirrors the command line: `ingot.prepare(...)`, `ingot.train(RunConfig(...))`, `ingot.load(path)`.
Each name is imported on first use: `import ingot` and `ingot --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.api import train
    from ingot.checkpoint.load import load_model as load
    from ingot.config.run import RunConfig
    from ingot.data.prepare.prepare import prepare

__all__ = ["RunConfig", "__version__", "load", "prepare", "train"]
LAZY = {"RunConfig": "config.run:RunConfig", "load": "checkpoint.load:load_model",
        "prepare": "data.prepare.prepare:prepare", "train": "api:train"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'ingot' has no attribute {name!r}")
    module, _, attribute = LAZY[name].partition(":")
    return getattr(import_module(f"ingot.{module}"), attribute)


def __dir__() -> list[str]:
    return __all__
