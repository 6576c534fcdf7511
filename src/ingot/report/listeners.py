"""Everything that listens to a run."""

import os
from typing import Any

from ingot.config.run import RunConfig
from ingot.parallel.rank_env import find_rank_env
from ingot.report.console import Console
from ingot.report.metrics_file import MetricsFile
from ingot.report.system_metrics import SystemMetrics
from ingot.report.trackers.listener import TrackerProcess
from ingot.report.trackers.registry import check_trackers, configured
from ingot.training.listener import Row, RunListener


class Listeners(RunListener):
    """Several listeners as one, whose rows also tell what the machine does."""

    def __init__(self, listeners: list[RunListener], system: SystemMetrics | None = None):
        self.listeners, self.system = listeners, system

    def note(self, text: str) -> None:
        for listener in self.listeners:
            listener.note(text)

    def warn(self, text: str) -> None:
        for listener in self.listeners:
            listener.warn(text)

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        if self.system is not None:
            self.system.start()
        for listener in self.listeners:
            listener.begin(batch, total, state)

    def rewind(self, batch: int, state: dict[str, Any] | None) -> None:
        for listener in self.listeners:
            listener.rewind(batch, state)

    def row(self, row: Row, batch: int) -> None:
        if self.system is not None:
            row = row | self.system.latest()
        for listener in self.listeners:
            listener.row(row, batch)

    def evaluating(self, what: str, done: int, total: int) -> None:
        for listener in self.listeners:
            listener.evaluating(what, done, total)

    def state(self) -> dict[str, Any]:
        return {key: value for listener in self.listeners for key, value in listener.state().items()}

    def end(self) -> None:
        if self.system is not None:
            self.system.close()
        for listener in self.listeners:
            listener.end()


def make_listeners(config: RunConfig, rank: int) -> Listeners:
    """Console and metrics for rank 0; the other ranks only log what they decide."""
    listeners: list[RunListener] = [Console(config.run_folder, rank)]
    if rank == 0:
        warn = listeners[0].warn
        if configured(config.loggers):
            check_trackers(config.loggers, os.environ)
            listeners.insert(0, TrackerProcess(config.run_folder, warn))
        listeners.insert(0, MetricsFile(config.run_folder, warn))
        return Listeners(listeners, SystemMetrics(None if config.device == "cpu" else find_rank_env().local_rank))
    return Listeners(listeners)
