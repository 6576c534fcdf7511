"""What the back ends of a launched run say about its jobs, and how they are ended: Slurm, Kubernetes, or this machine.
States are in Slurm's words. A back end that does not answer is None, which proves nothing.

All jobs that were ever launched into the folder count, not only the last: one that was held for a week still starts.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ingot.errors import IngotError
from ingot.launch.kubernetes import kubectl
from ingot.launch.monitor.owner import start_ticks
from ingot.launch.protocol import LOCAL, TRAIN, Job, LaunchFolder
from ingot.launch.slurm import commands as slurm
from ingot.launch.slurm.queue import belongs_to, explain, queued_jobs
from ingot.launch.spec import read_spec

# Every other state may still run: one that this list does not know must not lead to a second job in the same folder.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL",
         "PREEMPTED", "REVOKED")  # fmt: skip
RUNNING = ("RUNNING", "SIGNALING")  # the second for a moment, while Slurm delivers a signal
SUSPENDED = ("SUSPENDED", "STOPPED")
ENDING = "COMPLETING"  # cancelled or at its end: its processes have some seconds to save, then its nodes are cleaned
_CLOCK_SECONDS = 2.0  # by which a process may seem younger than its line in jobs.jsonl
_ENTRY_SECONDS = 600.0  # from the start of a local launcher to that line


@dataclass(frozen=True)
class JobState:
    """A job, or an element of an array."""

    id: str
    state: str
    reason: str = ""
    """Why it waits, if the back end says so."""
    end: str = ""
    """When its time limit is over, if it runs and has one."""
    number: str = ""
    """The id by which it knows itself, where that differs: an element of an array, an object of Kubernetes."""

    @property
    def is_living(self) -> bool:
        """Whether it runs or may run again."""
        return is_living(self.state)

    @property
    def is_running(self) -> bool:
        return self.state in RUNNING

    @property
    def is_suspended(self) -> bool:
        """Whether its processes live, and stand still until somebody resumes it."""
        return self.state in SUSPENDED

    @property
    def is_ending(self) -> bool:
        """Whether Slurm ends it or cleans up after it; whether it is queued again then, is not known yet."""
        return self.state == ENDING

    def __str__(self) -> str:
        return f"{self.id}: {self.state}" + (f" ({self.reason})" if self.reason and self.is_living else "")


def is_living(state: str) -> bool:
    """Whether a job in this state runs or may run again."""
    return state not in ENDED


def has_ended(job: str) -> bool:
    """Whether Slurm says that a job has ended, or that it does not know it."""
    found = queued_jobs([job])
    return found is not None and not any(is_living(each.state) for each in found)


def launched_verb(run: Path) -> str:
    """What was launched from a folder: train, prepare, or nothing."""
    path = LaunchFolder(run).spec_file
    return read_spec(path).verb if path.is_file() else ""


def last_jobs(run: Path) -> list[Job]:
    """The jobs of the last launch; a preparation has two."""
    return LaunchFolder(run).jobs()[-2 if launched_verb(run) == "prepare" else -1 :]


def job_states(run: Path) -> list[JobState] | None:
    """The jobs of the last launch, and every earlier one that still lives."""
    last, states = last_jobs(run), _states(run, LaunchFolder(run).jobs())
    if states is None:
        return None
    shown = {job.id for job in last}
    return [state for state in states if state.is_living or state.id.partition("_")[0] in shown]


def end_jobs(run: Path) -> str:
    """End all living jobs of a run at once; returns what was done."""
    done = []
    for job in LaunchFolder(run).jobs():
        states = _states(run, [job])
        if states is None:
            done.append(f"{job.back_end} does not answer, so job {job.id} was not ended")
        elif any(state.is_living for state in states):
            _end(job)
            done.append(f"ended job {job.id}")
    return "; ".join(done) or "it has no job to end"


def _states(run: Path, jobs: Sequence[Job]) -> list[JobState] | None:
    """What the back ends still know of jobs; one question per back end."""
    found: list[JobState] = []
    for back_end in dict.fromkeys(job.back_end for job in jobs):
        of_it = [job for job in jobs if job.back_end == back_end]
        states = _ask(run, back_end, of_it)
        if states is None:
            return None
        found += states
    return found


def _ask(run: Path, back_end: str, jobs: Sequence[Job]) -> list[JobState] | None:
    if back_end == "slurm":
        queued = queued_jobs([job.id for job in jobs])
        if queued is None:
            return None
        return [
            JobState(q.id, q.state, explain(q), q.end, "" if q.number == q.id else q.number)
            for q in queued
            if belongs_to(q, LaunchFolder(run).path)
        ]
    if back_end in (LOCAL, TRAIN):
        return [JobState(job.id, "RUNNING") for job in jobs if _is_launcher(job)]
    try:
        _, namespace, kind = back_end.split("/")
        states = kubectl.object_states(namespace, kind, [job.id for job in jobs])
    except IngotError:
        return None
    return [JobState(name, state, number=name.rpartition("-")[2]) for name, state in states.items()]


def _end(job: Job) -> None:
    if job.back_end == "slurm":
        slurm.cancel(job.id)
    elif job.back_end in (LOCAL, TRAIN):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(job.id), signal.SIGKILL)  # its processes go with it
    else:
        _, namespace, kind = job.back_end.split("/")
        kubectl.delete(namespace, kind, job.id)


def _is_launcher(job: Job) -> bool:
    """Whether a process of this machine is still the launcher that was started under this number, and not a later one
    that has got the same number."""
    try:
        words = Path(f"/proc/{int(job.id)}/cmdline").read_bytes().split(b"\0")
        age = (datetime.now() - datetime.fromisoformat(job.time)).total_seconds()
    except (OSError, ValueError):
        return False
    ticks = start_ticks(int(job.id))
    if ticks is None:
        return False
    older_by = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK") - age  # than the line
    is_ours = not {b"launch", b"train", b"profile", b"quickstart"}.isdisjoint(words)
    return is_ours and -_CLOCK_SECONDS <= older_by <= _ENTRY_SECONDS
