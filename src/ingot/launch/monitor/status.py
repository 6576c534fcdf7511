"""How a run is doing, from its folder alone and, where it was launched, from its back end.

Silence proves nothing: a cluster that does not answer leaves the state "unknown".
"""

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.config.secrets import redact
from ingot.errors import ConfigError, IngotError
from ingot.launch.build_spec import MAX_STRIKES, strikes
from ingot.launch.monitor.job_states import JobState, job_states, launched_verb
from ingot.launch.protocol import LAUNCH, LaunchFolder
from ingot.launch.slurm.commands import run_folder_of
from ingot.launch.supervisor.failure_log import read_all_failures, read_failures
from ingot.launch.supervisor.restart_policy import newest_checkpoint
from ingot.plurals import count_of
from ingot.storage.json_lines import read_json_lines
from ingot.training.runtime.run_files import CONFIG, FINISHED, LOGS, METRICS, OWNER, STOP, STOPPED

TAIL_BYTES = 200_000  # of the metrics, in which the last row with a loss is
FRESH_SECONDS = 60.0  # a running run touches its owner's file every few seconds


@dataclass
class Status:
    """What is known."""

    state: str
    stopped: str = ""
    """By what a run that is not running was stopped, and where; empty if it broke off."""
    verb: str = "train"
    pieces: int = 0
    """Of a running preparation: pieces of the input that are done."""
    batch: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    checkpoint: int = 0
    attempts: int = 0
    """Starts of its ranks, by whichever part of the restart policy."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    jobs: dict[str, str] = field(default_factory=dict)
    """States of the jobs of the last launch, and of earlier ones that still live."""
    waits_for: dict[str, str] = field(default_factory=dict)
    """Why living jobs do not run, in the words of Slurm."""
    strikes: dict[str, int] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self.state.partition(":")[0] in ("finished", "halted", "stopped by the file STOP", "not running")

    def lines(self) -> list[str]:
        """For people."""
        out = [f"state: {self.state}" + (f": {self.stopped}" if self.stopped else "")]
        if self.row:
            eta = self.row.get("time/remaining_estimate")
            figures = f"batch {self.batch}, loss {self.row.get('loss/train/total') or float('nan'):.4f}"
            figures += f", {self.row.get('throughput/tokens_per_sec', 0.0):,.0f} tok/s"
            out.append(figures + (f", {eta:.2f} h to go" if eta is not None and self.state != "finished" else ""))
        if self.pieces:
            out.append(f"{self.pieces:,} pieces of the input are done")
        if self.verb != "prepare":
            out.append(f"last checkpoint: batch {self.checkpoint}" if self.checkpoint else "no checkpoint yet")
        for job, state in self.jobs.items():
            out.append(f"job {job}: {state}" + (f" ({self.waits_for[job]})" if job in self.waits_for else ""))
        out.append(f"attempts: {self.attempts}, failures: {len(self.failures)}")
        for failure in self.failures[-5:]:
            where = "attempt {attempt}, rank {rank} on {host}, batch {batch}".format(**failure)
            out.append(redact(f"  {failure['time']} {failure['kind']}: {failure['message']} ({where})"))
        for node, count in self.strikes.items():
            excluded = "; the next job excludes it" if count >= MAX_STRIKES else ""
            out.append(f"node {node}: {count_of(count, 'strike')}{excluded}")
        return out


def find_run(text: str) -> Path:
    """A run folder, given as such or by the id of a job that was launched from here."""
    path = Path(text)
    if path.is_dir() and ((path / LAUNCH).is_dir() or (path / CONFIG).is_file() or (path / METRICS).is_file()):
        return path
    if path.is_dir():
        raise ConfigError(f"{text} is not a run folder: it has neither {CONFIG} nor {METRICS} nor {LAUNCH}")
    for folder in Path().glob("runs/*"):
        if any(job.id == text for job in LaunchFolder(folder).jobs()):
            return folder
    if re.fullmatch(r"[0-9]+(_[0-9]+)?", text):
        with suppress(IngotError):  # Slurm is not here, or has forgotten it
            found = run_folder_of(text)
            if found is not None and found.is_dir():
                return found
    raise ConfigError(f"{text} is neither a run folder nor a job of one under {Path('runs').absolute()}; name the run "
                      "folder")  # fmt: skip


def read_status(run: Path) -> Status:
    """All that is known about a run."""
    rows = read_json_lines(run / METRICS, TAIL_BYTES)
    row: dict[str, Any] = next((row for row in reversed(rows) if "loss/train/total" in row), {})
    state = _state_by_folder(run)  # before asking the back end, which may take a while
    states = job_states(run)
    verb = launched_verb(run) or "train"
    state = state or _state_by_jobs(run, verb, states)
    return Status(
        state=state, stopped=_stopped(run) if state == "not running" else "", verb=verb,
        pieces=_pieces(run) if verb == "prepare" else 0,
        checkpoint=newest_checkpoint(run), attempts=_attempts(run), failures=read_all_failures(run),
        jobs={job.id: job.state for job in states or ()},
        waits_for={job.id: job.reason for job in states or () if job.is_living and job.reason},
        strikes=strikes(run, 1), row=row, batch=int(row.get("time/batch", 0)),
    )  # fmt: skip


def _stopped(run: Path) -> str:
    """What the run wrote down when it stopped."""
    try:
        record = json.loads((run / STOPPED).read_text(encoding="utf-8"))
        reason, batch, total = str(record["reason"]), int(record["batch"]), int(record["total"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    by = {"SIGINT": "stopped by Ctrl-C", "SIGHUP": "stopped because its terminal was closed (SIGHUP)"}
    why = by.get(reason) or (f"stopped by {reason}" if reason.startswith("SIG") else f"stopped because {reason}")
    then = f"the same command continues from batch {batch} of {total}" if batch else "the same command starts over"
    return f"{why}; {then}"


def _attempts(run: Path) -> int:
    """On a cluster each has a folder of logs; on one machine they share one, and all but the last have failed."""
    folders = [path for path in (run / LOGS).glob("*") if path.is_dir()]
    return len(folders) or (len(read_failures(run)) + 1 if (run / LOGS).is_dir() else 0)


def _pieces(run: Path) -> int:
    """Pieces in the journals of the preparation that this folder belongs to."""
    pieces = 0
    with suppress(FileNotFoundError):  # a preparation removes them when it ends
        for path in run.parent.glob(".*.partial/journal*.jsonl"):
            pieces += path.read_bytes().count(b'"task": "tokenize"')
    return pieces


def _state_by_folder(run: Path) -> str:
    if (run / FINISHED).exists():
        return "finished"
    with suppress(FileNotFoundError):  # a run removes it when it ends
        if time.time() - (run / OWNER).stat().st_mtime < FRESH_SECONDS:
            return "stopping" if (run / STOP).exists() else "running"
    reason = LaunchFolder(run).halted()
    return "" if reason is None else f"halted: {reason or 'see the failures'}"


def _state_by_jobs(run: Path, verb: str, states: list[JobState] | None) -> str:
    if states is None:
        return "unknown: the cluster does not answer"
    if living := [job.state for job in states if job.is_living]:
        return ("starting" if verb == "train" else "running") if "RUNNING" in living else "queued"
    if (run / STOP).exists():
        return "stopped by the file STOP"
    return "not running" if (run / METRICS).exists() or LaunchFolder(run).jobs() else "never started"
