"""Which trackers there are. A new one is a file with a `Tracker`, a section in `config/training.py` and a line here."""

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ingot.config.training import LoggersConfig
from ingot.errors import ConfigError, MissingExtra
from ingot.report.trackers.base import Tracker

TRACKERS = {
    "tensorboard": ("ingot.report.trackers.tensorboard", "TensorBoard", "tensorboard"),
    "wandb": ("ingot.report.trackers.wandb", "Wandb", "wandb"),
    "mlflow": ("ingot.report.trackers.mlflow", "MLflow", "mlflow"),
    "comet": ("ingot.report.trackers.comet", "Comet", "comet_ml"),
    "trackio": ("ingot.report.trackers.trackio", "Trackio", "trackio"),
}
"""By key of `loggers`: our module, the class in it, and the package that it needs."""


def configured(loggers: LoggersConfig) -> list[str]:
    """The trackers that a config turns on."""
    return [name for name in TRACKERS if getattr(loggers, name) is not None]


def make_tracker(loggers: LoggersConfig, name: str) -> Tracker:
    module, cls, package = TRACKERS[name]
    if find_spec(package) is None:
        raise MissingExtra(f"loggers.{name}", name)
    return _make(module, cls, getattr(loggers, name))


def check_trackers(loggers: LoggersConfig, env: Iterable[str]) -> None:
    """Refuse a tracker whose package or login is missing, without a network. `env` names the variables that are set."""
    for name in configured(loggers):
        make_tracker(loggers, name)
    check_logins(loggers, env)


def check_logins(loggers: LoggersConfig, env: Iterable[str], has_home: bool = True) -> None:
    """Refuse a tracker that a run with these variables, and this home folder or none, cannot log in to."""
    names = set(env)
    for name in configured(loggers):
        module, cls, _ = TRACKERS[name]
        if remedy := _make(module, cls, getattr(loggers, name)).missing_login(names, has_home):
            raise ConfigError(f"loggers.{name}: the run will not be logged in; {remedy}")


def _make(module: str, cls: str, config: Any) -> Tracker:
    tracker = getattr(import_module(module), cls)(config)
    assert isinstance(tracker, Tracker)
    return tracker
