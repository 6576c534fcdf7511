"""How a run is doing, from its folder alone and, where it was launched, from its back end.

Nothing is concluded from silence: a cluster that does not answer gives the state "unknown".
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.config.secrets import redact
from ingot.errors import ConfigError
from ingot.launch.jobs import Job, read_jobs
from ingot.launch.ladder import START, newest_checkpoint, read_history
from ingot.launch.place import strikes
from ingot.launch.slurm import job_states
from ingot.launch.spec import LAUNCH
from ingot.launch.submit import LIVING
from ingot.launch.worker import HALT
from ingot.train.run_files import CONFIG, FINISHED, METRICS, OWNER, STOP

FRESH_SECONDS = 60.0  # an owner's file is touched every few


@dataclass
class Status:
    """What is known."""

    state: str
    batch: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    checkpoint: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    jobs: dict[str, str] = field(default_factory=dict)
    strikes: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people."""
        out = [f"state: {self.state}"]
        if self.row:
            eta = self.row.get("time/remaining_estimate")
            figures = f"batch {self.batch}, loss {self.row.get('loss/train/total') or float('nan'):.4f}"
            figures += f", {self.row.get('throughput/tokens_per_sec', 0.0):,.0f} tok/s"
            out.append(figures + (f", {eta:.2f} h to go" if eta is not None and self.state != "finished" else ""))
        out.append(f"last checkpoint: batch {self.checkpoint}" if self.checkpoint else "no checkpoint yet")
        out += [f"job {job}: {state}" for job, state in self.jobs.items()]
        out.append(f"failures: {len(self.failures)}")
        for failure in self.failures[-5:]:
            where = "attempt {attempt}, rank {rank} on {host}, batch {batch}".format(**failure)
            out.append(redact(f"  {failure['time']} {failure['kind']}: {failure['message']} ({where})"))
        out += [f"node {node}: {count} strikes, left out of the next job" for node, count in self.strikes.items()]
        return out


def find_run(text: str) -> Path:
    """A run folder, given as such or by the id of a job that was launched from here."""
    path = Path(text)
    if path.is_dir() and ((path / LAUNCH).is_dir() or (path / CONFIG).is_file() or (path / METRICS).is_file()):
        return path
    if text.isdigit():
        for jobs in Path().glob(f"runs/*/{LAUNCH}/jobs.jsonl"):
            if any(job.id == text for job in read_jobs(jobs.parent.parent)):
                return jobs.parent.parent
        raise ConfigError(f"no run under {Path('runs').absolute()} has a job {text}; name the run folder instead")
    raise ConfigError(f"{text} is no run folder: it has neither {CONFIG} nor {METRICS} nor {LAUNCH}")


def read_status(run: Path) -> Status:
    """All that is known about a run."""
    rows = _tail(run / METRICS)
    history = [line for line in read_history(run) if line["kind"] != START]
    jobs = read_jobs(run)
    state = _seen_in_folder(run)  # before Slurm is asked, which may take its time
    states = _job_states(jobs)
    return Status(
        state=state or _by_jobs(run, jobs, states), checkpoint=newest_checkpoint(run), failures=history,
        jobs=states or {}, strikes=strikes(run), row=rows, batch=int(rows.get("time/batch", 0)),
    )  # fmt: skip


def _job_states(jobs: list[Job]) -> dict[str, str] | None:
    slurm = [job for job in jobs if job.back_end == "slurm"]
    return job_states(slurm[-1].id) if slurm else {}


def _seen_in_folder(run: Path) -> str:
    if (run / FINISHED).exists():
        return "finished"
    owner = run / OWNER
    if owner.exists() and time.time() - owner.stat().st_mtime < FRESH_SECONDS:
        return "stopping" if (run / STOP).exists() else "running"
    if (run / LAUNCH / HALT).exists():
        return f"halted: {(run / LAUNCH / HALT).read_text(encoding='utf-8').strip() or 'see the failures'}"
    return ""


def _by_jobs(run: Path, jobs: list[Job], states: dict[str, str] | None) -> str:
    if states is None:
        return "unknown: Slurm does not answer"
    if living := [state for state in states.values() if state in LIVING]:
        return "starting" if "RUNNING" in living else "queued"
    if (run / STOP).exists():
        return "stopped by the file STOP"
    return "not running" if (run / METRICS).exists() or jobs else "never started"


def _tail(path: Path) -> dict[str, Any]:
    """The last whole row that has a loss."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 200_000))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "loss/train/total" in row:
            return row
    return {}
