"""ingot: raw text to a pretrained GPT-style language model.

The Python API mirrors the command line: `ingot.prepare(...)`, `ingot.train(RunConfig(...))`, `ingot.load(path)`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.checkpoint.load import load_model as load
    from ingot.data.prepare import prepare
    from ingot.report.run import train
    from ingot.train.config import RunConfig

__version__ = "0.1.0"
__all__ = ["RunConfig", "__version__", "load", "prepare", "train"]

_HOMES = {
    "load": ("ingot.checkpoint.load", "load_model"),
    "prepare": ("ingot.data.prepare", "prepare"),
    "train": ("ingot.report.run", "train"),
    "RunConfig": ("ingot.train.config", "RunConfig"),
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import ingot` and `ingot --help` do not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ingot' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
