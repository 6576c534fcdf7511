"""Weights & Biases. A killed offline process leaves a file that may lack its last steps: its folder is removed, and the
steps are logged again from metrics.jsonl. Rollbacks use W&B's rewind, which needs a server."""

import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ingot.config.training import WandbConfig
from ingot.report.trackers.base import Summary, TrackedRun, Tracker, Values

CLOSED = "ingot-closed"  # a file in the folder of an offline run that holds everything that was logged
QUIET = {"silent": True, "console": "off", "disable_git": True, "disable_code": True, "x_disable_stats": True}
"""The process is not the training process: its output, code and load say nothing about the run."""


class Wandb(Tracker):
    """A W&B run. Metrics keep their names; their x axis is the batch."""

    def __init__(self, config: WandbConfig):
        self.config = config
        self.keeps_unclosed = config.mode == "online"
        self.run: Any = None
        self.tracked: TrackedRun

    def missing_login(self, env: Collection[str], has_home: bool) -> str | None:
        if self.config.mode == "offline" or {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & set(env):
            return None
        netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        if has_home and netrc.is_file() and "machine" in netrc.read_text(encoding="utf-8", errors="replace"):
            return None
        return (
            "run `wandb login`, set WANDB_API_KEY (on a cluster: --secret WANDB_API_KEY), or loggers.wandb.mode=offline"
        )

    def open(self, run: TrackedRun, after: int) -> str:
        run_id = run.id or (self.config.id or secrets.token_hex(4)) + run.suffix
        self._init(run, id=run_id, resume="allow")
        return run_id

    def last_step(self) -> int | None:
        return self.run.starting_step - 1 if self.config.mode == "online" else None

    def log(self, step: int, values: Values) -> None:
        self.run.log(values, step=step)

    def event(self, step: int, kind: str, text: str) -> None:
        self.run.summary[f"events/{kind}"] = f"batch {step}: {text}"
        if self.config.mode == "online":
            self.run.alert(title=f"{self.tracked.name}: {kind}", text=f"batch {step}: {text}")

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        import wandb

        self.run.log({name: wandb.Table(columns=[*columns], data=rows)}, step=step)

    def rewind(self, step: int) -> bool:
        if self.config.mode == "offline":
            return False
        run_id = self.run.id
        self._finish()
        self._init(self.tracked, resume_from=f"{run_id}?_step={step}")
        return True

    def close(self, summary: Summary) -> None:
        self.run.summary.update({"ingot/state": summary.state, "ingot/batch": summary.step, **summary.values})
        self._finish(exit_code=1 if summary.state == "crashed" else 0)

    def discard_unclosed(self, folder: Path) -> None:
        for left in (folder / "wandb").glob("offline-run-*"):
            if not (left / CLOSED).exists():
                shutil.rmtree(left)

    def _init(self, run: TrackedRun, **which: Any) -> None:
        import wandb

        self.tracked = run
        run.tracker_folder.mkdir(exist_ok=True)
        self.run = wandb.init(
            project=self.config.project, entity=self.config.entity, name=(self.config.name or run.name) + run.suffix,
            group=self.config.group or run.group, tags=self.config.tags or None, mode=self.config.mode,
            dir=str(run.tracker_folder), config=run.config, notes=_notes(run),
            settings=wandb.Settings(**QUIET, init_timeout=60), **which,
        )  # fmt: skip

    def _finish(self, exit_code: int = 0) -> None:
        self.run.finish(exit_code=exit_code)
        if self.config.mode == "offline":
            (Path(self.run.dir).parent / CLOSED).touch()


def _notes(run: TrackedRun) -> str | None:
    return f"starts from the weights of {run.forked_from}" if run.forked_from else None
