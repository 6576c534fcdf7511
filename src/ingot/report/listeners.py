"""Everything that listens to a run."""

from typing import Any

from ingot.config.run import RunConfig
from ingot.report.console import Console
from ingot.report.metrics_file import MetricsFile
from ingot.report.tensorboard import TensorBoard
from ingot.training.listener import Row, RunListener


class Listeners(RunListener):
    """Several listeners as one."""

    def __init__(self, listeners: list[RunListener]):
        self.listeners = listeners

    def note(self, text: str) -> None:
        for listener in self.listeners:
            listener.note(text)

    def warn(self, text: str) -> None:
        for listener in self.listeners:
            listener.warn(text)

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        for listener in self.listeners:
            listener.begin(batch, total, state)

    def rewind(self, batch: int, state: dict[str, Any] | None) -> None:
        for listener in self.listeners:
            listener.rewind(batch, state)

    def row(self, row: Row, batch: int) -> None:
        for listener in self.listeners:
            listener.row(row, batch)

    def evaluating(self, what: str, done: int, total: int) -> None:
        for listener in self.listeners:
            listener.evaluating(what, done, total)

    def state(self) -> dict[str, Any]:
        return {key: value for listener in self.listeners for key, value in listener.state().items()}

    def end(self) -> None:
        for listener in self.listeners:
            listener.end()


def make_listeners(config: RunConfig, rank: int) -> Listeners:
    """Console and metrics for rank 0; the other ranks only log what they decide."""
    listeners: list[RunListener] = [Console(config.run_folder, rank)]
    if rank == 0:
        if config.loggers.tensorboard is not None:
            listeners.insert(0, TensorBoard(config.loggers.tensorboard, config.run_folder))
        listeners.insert(0, MetricsFile(config.run_folder))
    return Listeners(listeners)
