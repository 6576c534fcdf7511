"""Sends a run to a tracker afterwards: `ingot sync`."""

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ingot.config.load import load_config
from ingot.config.secrets import redact
from ingot.config.training import LoggersConfig
from ingot.errors import ConfigError, IngotError
from ingot.plurals import count_of
from ingot.report.trackers.feed import Feed
from ingot.report.trackers.registry import TRACKERS, check_logins, make_tracker
from ingot.report.trackers.sidecar import tracked_run
from ingot.training.runtime.run_files import CONFIG, METRICS


class TrackerError(IngotError):
    """A tracker did not accept what was sent."""


def _with_settings(values: dict[str, Any], name: str, settings: Sequence[str]) -> LoggersConfig:
    """The loggers of a run, with one tracker turned on and its settings changed."""
    base = {**values, name: values.get(name) or {}}
    return load_config(LoggersConfig, [f"{name}.{setting}" for setting in settings], base)


def sync_run(folder: Path, name: str, settings: Sequence[str], env: Sequence[str]) -> str:
    """Send the rows that a tracker lacks. Return a sentence on what was done."""
    name = "comet" if name == "cometml" else name
    if name not in TRACKERS:
        raise ConfigError(f"--to {name}: not a tracker; choose one of {', '.join(TRACKERS)}")
    if not (folder / CONFIG).is_file() or not (folder / METRICS).is_file():
        raise ConfigError(f"{folder} is not a run folder with metrics: it lacks {CONFIG} or {METRICS}")
    values = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    loggers = _with_settings(values.get("loggers", {}), name, settings)
    tracker = make_tracker(loggers, name)
    check_logins(LoggersConfig.model_validate({name: getattr(loggers, name)}), env)
    run = tracked_run(folder, values)
    run.tracker_folder.mkdir(exist_ok=True)
    feed = Feed(name, tracker, run)
    with (run.tracker_folder / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder} is being sent to {name} already, by its training process or another sync"
            ) from None
        unsent = feed.unsent()
        try:
            feed.open()
            while feed.behind:
                feed.send()
            feed.close(crashed=False)
        except Exception as error:
            reason = redact(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
            raise TrackerError(f"cannot send {folder} to {name}: {reason}") from error
    return f"sent {count_of(unsent, 'row')} of {folder} to {name}, run {feed.state.id}"
