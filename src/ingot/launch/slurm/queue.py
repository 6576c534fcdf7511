"""What Slurm says about jobs."""

import os
import pwd
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ingot.errors import IngotError
from ingot.launch.programs import output_of

SCRIPTS = ("job.sh", "array.sh", "last.sh")
_FIELDS = {"JOBID": "%i", "STATE": "%T", "COMMAND": "%o", "END_TIME": "%e", "REASON": "%r", "NUMBER": "%A"}

MEANINGS = {
    "JobHeldUser": "its user holds it: `scontrol release {id}` lets it start",
    "JobHeldAdmin": "an administrator holds it, who alone can release it",
    "job requeued in held state": "it was put back and is held: `scontrol release {id}` lets it start",
    "launch failed requeued held": "a node could not start it: `scontrol release {id}` lets it try again",
    "BeginTime": "Slurm waits about two minutes before it starts a requeued job again",
    "Cleaning": "its nodes are being cleaned up",
    "Priority": "other jobs come first",
    "Resources": "it waits for free nodes",
    "Dependency": "it waits for another job",
    "JobArrayTaskLimit": "it waits for the job of the chain before it",
    "BadConstraints": "no node has what it asks for",
    "PartitionTimeLimit": "its --time is more than the partition allows",
    "PartitionNodeLimit": "the partition has too few nodes for it",
    "PartitionDown": "the partition is down",
    "Reservation": "it waits for its reservation",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
}  # fmt: skip
"""Slurm's reasons, in words."""


class QueuedJob(NamedTuple):
    """A job, or an element of an array, as Slurm shows it."""

    id: str
    state: str
    command: str = ""
    """The script."""
    end: str = ""
    """When its time limit is over, by the cluster's clock; empty if it does not run or has no limit."""
    reason: str = ""
    """Why it does not run; empty if there is no reason."""
    number: str = ""
    """Of an element of an array, the job id by which it knows itself."""


def queued_jobs(jobs: Sequence[str]) -> list[QueuedJob] | None:
    """The jobs, with array elements one by one; without those that Slurm has forgotten. None if Slurm cannot be
    reached, is not on this machine, or prints nothing at all."""
    return _ask(f"--jobs={','.join(jobs)}")


def jobs_of_folder(launch: Path) -> list[QueuedJob] | None:
    """The jobs of this user that run a script of a launch folder. None as above."""
    found = _ask(f"--user={os.getuid()}")
    return None if found is None else [job for job in found if _runs_script_in(job.command, launch)]


def _ask(which: str) -> list[QueuedJob] | None:
    options = [which, f"--format={'|'.join(_FIELDS.values())}"]
    try:
        found = output_of(["squeue", "--array", "--states=all", *options]).splitlines()
    except IngotError as error:  # of several forgotten jobs, it prints the header only
        return [] if "Invalid job id" in str(error) else None
    if not any(line.strip() for line in found):
        return None
    return [_parse(line) for line in found if line.strip() and not line.startswith(next(iter(_FIELDS)))]


def explain(job: QueuedJob) -> str:
    """Slurm's reason, with its meaning where that is known; empty if there is none."""
    name = next((name for name in MEANINGS if job.reason.startswith(name)), None)
    return f"{job.reason}: {MEANINGS[name].format(id=job.id)}" if name else job.reason


def belongs_to(job: QueuedJob, launch: Path) -> bool:
    """Whether a job runs a script of this folder. A cluster that was set up again starts with the same numbers, so a
    job may be somebody else's. A script that cannot be seen from here counts as this folder's."""
    return not job.command.startswith("/") or _runs_script_in(job.command, launch, if_unseen=True)


def _runs_script_in(command: str, launch: Path, if_unseen: bool = False) -> bool:
    script = Path(command)
    if script.parent == launch:
        return True
    if script.name not in SCRIPTS or script.parent.name != launch.name:
        return False
    try:
        return script.parent.samefile(launch)
    except OSError:
        return if_unseen


def _parse(line: str) -> QueuedJob:
    id, state, *rest = line.strip().split("|", len(_FIELDS) - 1)
    command, end, reason, number = (*rest, "", "", "", "")[:4]
    running_until = end if state == "RUNNING" and end not in ("N/A", "Unknown", "NONE") else ""
    return QueuedJob(id, state, command, running_until, "" if reason in ("None", "(null)") else reason, number or id)


def canceller(job: str) -> str:
    """Who cancelled a job, by Slurm's accounting; empty where it does not say."""
    try:
        found = output_of(["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State"])
    except IngotError:  # most small clusters have no accounting
        return ""
    by = re.search(r"CANCELLED by (\d+)", found)
    if by is None:
        return ""
    try:
        return pwd.getpwuid(int(by[1])).pw_name
    except KeyError:
        return f"user {by[1]}"


def exit_of(job: str) -> str:
    """What the script of a job ended with: `signal 9`, `exit code 3`, or nothing; empty if Slurm has forgotten it."""
    try:
        found = output_of(["scontrol", "--oneliner", "show", "job", job])
    except IngotError:
        return ""
    codes = re.findall(r"\bExitCode=(\d+):(\d+)", found)
    if not codes:
        return ""
    code, number = map(int, codes[-1])
    number = number or max(0, code - 128)
    return f"signal {number}" if number else f"exit code {code}" if code else ""
