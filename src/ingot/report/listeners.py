"""A run with everything that listens to it: the `train` of the command line and of the Python API."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.config.run import RunConfig
from ingot.parallel.rank_env import ATTEMPT, find_rank_env
from ingot.report.console import Console
from ingot.report.metrics_file import MetricsFile
from ingot.report.rank_log import RankLog
from ingot.report.tensorboard import TensorBoard
from ingot.training.listener import Row, RunListener
from ingot.training.runtime.lease import clear_stop_request

if TYPE_CHECKING:
    from ingot.training.trainer import Result


class Reporters:
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

    def state(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for listener in self.listeners:
            merged |= listener.state()
        return merged

    def end(self) -> None:
        for listener in self.listeners:
            listener.end()


def train(config: RunConfig, fresh: bool = False) -> "Result":
    """Train a run to its end, continuing it if its folder holds a checkpoint."""
    rank = find_rank_env().rank
    if rank == 0 and ATTEMPT not in os.environ:  # else our launcher has done that, before it started this process
        clear_stop_request(Path(config.run_folder))
    listeners: list[RunListener] = []
    if rank == 0:
        listeners.append(MetricsFile(config.run_folder))
        if config.loggers.tensorboard is not None:
            listeners.append(TensorBoard(config.loggers.tensorboard, config.run_folder))
        listeners.append(Console(config.run_folder))
    else:  # the others only write down what they decide
        listeners.append(RankLog(config.run_folder, rank))
    from ingot.training.trainer import train as train_with  # torch loads after the config has been checked

    return train_with(config, Reporters(listeners), fresh)
