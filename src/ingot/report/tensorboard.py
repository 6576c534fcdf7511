"""Writes rows as TensorBoard event files."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ingot.config.training import TensorBoardConfig
from ingot.errors import MissingExtra
from ingot.training.listener import Row, RunListener


class TensorBoard(RunListener):
    """Writes each metric as a scalar under its own name."""

    def __init__(self, config: TensorBoardConfig, folder: str):
        if find_spec("tensorboard") is None:
            raise MissingExtra("loggers.tensorboard", "tensorboard")
        self.log_dir = config.log_dir or str(Path(folder) / "tensorboard")
        self.writer: Any = None

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        self.rewind(batch, state)

    def rewind(self, batch: int, state: dict[str, Any] | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.log_dir, purge_step=batch + 1)  # the viewer drops later steps: they repeat

    def row(self, row: Row, batch: int) -> None:
        for key, value in row.items():
            self.writer.add_scalar(key, value, batch)

    def state(self) -> dict[str, Any]:
        self.writer.flush()
        return {}

    def end(self) -> None:
        if self.writer is not None:
            self.writer.close()
