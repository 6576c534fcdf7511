"""Comet. An offline experiment becomes an archive when it is closed; a killed process leaves an empty one, which is
removed, and its steps are logged again from metrics.jsonl. Metrics cannot be taken back: after a rollback the repeated
steps go under a new experiment with the same group."""

import os
import secrets
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ingot.config.dotted_keys import flatten
from ingot.config.training import CometConfig
from ingot.report.trackers.base import Summary, TrackedRun, Tracker, Values

ARCHIVES = "comet"


class Comet(Tracker):
    """A Comet experiment, one archive per process when offline."""

    def __init__(self, config: CometConfig):
        self.config = config
        self.keeps_unclosed = config.mode == "online"
        self.experiment: Any = None

    def missing_login(self, env: Collection[str], has_home: bool) -> str | None:
        if self.config.mode == "offline" or "COMET_API_KEY" in env:
            return None
        if has_home and Path("~/.comet.config").expanduser().is_file():
            return None
        return (
            "run `comet login`, set COMET_API_KEY (--secret COMET_API_KEY on a cluster), or loggers.comet.mode=offline"
        )

    def open(self, run: TrackedRun, after: int) -> str:
        os.environ["COMET_LOGGING_CONSOLE"] = "ERROR"
        import comet_ml

        key = run.id or (None if run.suffix else self.config.id) or secrets.token_hex(16)
        folder = run.tracker_folder / ARCHIVES
        folder.mkdir(parents=True, exist_ok=True)
        quiet: Any = False  # the process is not the training process: its output and code say nothing about the run
        settings = comet_ml.ExperimentConfig(
            name=(self.config.name or run.name) + run.suffix, tags=self.config.tags, offline_directory=str(folder),
            log_code=quiet, log_graph=quiet, parse_args=quiet, display_summary_level=0, log_git_metadata=quiet,
            log_git_patch=quiet, log_env_details=quiet, auto_output_logging=quiet, auto_param_logging=quiet,
            auto_metric_logging=quiet,
        )  # fmt: skip
        self.experiment = comet_ml.start(
            project=self.config.project, workspace=self.config.workspace, experiment_key=key, mode="get_or_create",
            online=self.config.mode == "online", experiment_config=settings,
        )  # fmt: skip
        if not run.id:
            self.experiment.log_parameters(flatten(run.config))
            about = {"group": self.config.group or run.group, "folder": str(run.folder)}
            self.experiment.log_others(about | ({"forked from": run.forked_from} if run.forked_from else {}))
        return key

    def log(self, step: int, values: Values) -> None:
        self.experiment.log_metrics(values, step=step)

    def flush(self) -> None:
        if self.config.mode == "online":
            self.experiment.flush()

    def event(self, step: int, kind: str, text: str) -> None:
        self.experiment.log_text(f"{kind}: {text}", step=step)

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self.experiment.log_table(f"{name}-{step}.csv", [columns, *rows], headers=False)

    def close(self, summary: Summary) -> None:
        self.experiment.log_others({"state": summary.state, "batch": summary.step})
        self.experiment.end()

    def discard_unclosed(self, folder: Path) -> None:
        for archive in (folder / ARCHIVES).glob("*.zip"):
            if not zipfile.is_zipfile(archive) or not zipfile.ZipFile(archive).namelist():
                archive.unlink()
