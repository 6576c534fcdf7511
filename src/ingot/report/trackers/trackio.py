"""Trackio: a local database, or a Space of the Hugging Face hub. Metrics cannot be taken back: after a rollback the
repeated steps go under a new run with the same group."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ingot.config.dotted_keys import flatten
from ingot.config.training import TrackioConfig
from ingot.report.trackers.base import Summary, TrackedRun, Tracker, Values


class Trackio(Tracker):
    """A Trackio run, continued by its name."""

    def __init__(self, config: TrackioConfig):
        self.config = config
        self.run: Any = None

    def missing_login(self, env: Collection[str], has_home: bool) -> str | None:
        home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
        if self.config.space_id is None or "HF_TOKEN" in env or (has_home and (home / "token").is_file()):
            return None
        return "run `hf auth login` or set HF_TOKEN (on a cluster: --secret HF_TOKEN)"

    def open(self, run: TrackedRun, after: int) -> str:
        import trackio

        name = run.id or (self.config.name or run.name) + run.suffix
        about = flatten(run.config) | ({"forked_from": run.forked_from} if run.forked_from else {})
        self.run = trackio.init(
            project=self.config.project, name=name, group=self.config.group or run.group, config=about,
            space_id=self.config.space_id, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        return name

    def last_step(self) -> int | None:
        if self.config.space_id is not None:
            return None
        from trackio.sqlite_storage import SQLiteStorage

        last = SQLiteStorage.get_max_step_for_run(self.config.project, self.run.name, run_id=self.run.id)
        return -1 if last is None else int(last)

    def log(self, step: int, values: Values) -> None:
        self.run.log(values, step=step)

    def event(self, step: int, kind: str, text: str) -> None:
        self.run.alert(kind, text, step=step)

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        import pandas
        import trackio

        self.run.log({name: trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))}, step=step)

    def close(self, summary: Summary) -> None:
        self.run.alert(summary.state, f"at batch {summary.step}", step=summary.step)
        self.run.finish()
