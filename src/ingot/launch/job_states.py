"""What the back end of a launched run says about its jobs, and how they are ended: Slurm, Kubernetes, or this machine.
States are in Slurm's words. A back end that does not answer is None, which proves nothing."""

import contextlib
import os
import signal
from pathlib import Path

from ingot.errors import IngotError
from ingot.launch.kubernetes import kubectl
from ingot.launch.protocol import Job, LaunchFolder
from ingot.launch.slurm import commands as slurm
from ingot.launch.spec import read_spec
from ingot.training.runtime.run_files import FINISHED, STOP

# Every other state may still run: one that this list does not know must not lead to a second job in the same folder.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL",
         "PREEMPTED", "REVOKED")  # fmt: skip


def is_living(state: str) -> bool:
    """Whether a job in this state runs or may run again."""
    return state not in ENDED


def launched_verb(run: Path) -> str:
    """What was launched from a folder: train, prepare, or nothing."""
    path = LaunchFolder(run).spec_file
    return read_spec(path).verb if path.is_file() else ""


def last_jobs(run: Path) -> list[Job]:
    """The jobs of the last launch; a preparation has two."""
    return LaunchFolder(run).jobs()[-2 if launched_verb(run) == "prepare" else -1 :]


def job_states(run: Path) -> dict[str, str] | None:
    """Ids and states of the jobs of the last launch."""
    states: dict[str, str] = {}
    for job in last_jobs(run):
        found = _states(job)
        if found is None:
            return None
        states |= found
    return states


def stop_run(run: Path, now: bool) -> str:
    """Ask a run to save and stop (it checks for the file STOP once a second), or end its jobs now; returns what was
    done."""
    if (run / FINISHED).exists():
        return f"{run} has finished already"
    (run / STOP).touch()  # keeps the rest of a chain from starting, too
    if now or launched_verb(run) == "prepare":  # a preparation loses only the pieces that it is working on
        return f"{run}: {end_jobs(run)}"
    return f"asked {run} to save and stop after its current step"


def end_jobs(run: Path) -> str:
    """End the jobs of the last launch at once; returns what was done."""
    done = []
    for job in last_jobs(run):
        states = _states(job)
        if states is None:
            done.append(f"{job.back_end} does not answer, so job {job.id} was not ended")
        elif any(is_living(state) for state in states.values()):
            _end(job)
            done.append(f"ended job {job.id}")
    return "; ".join(done) or "it has no job to end"


def _states(job: Job) -> dict[str, str] | None:
    if job.back_end == "slurm":
        return slurm.job_states(job.id)
    if job.back_end == "local":
        return {job.id: "RUNNING"} if _is_launcher(job.id) else {}
    try:
        _, namespace, kind = job.back_end.split("/")
        state = kubectl.object_state(namespace, kind, job.id)
    except IngotError:
        return None
    return {job.id: state} if state else {}


def _end(job: Job) -> None:
    if job.back_end == "slurm":
        slurm.cancel(job.id)
    elif job.back_end == "local":
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(job.id), signal.SIGKILL)  # its processes go with it
    else:
        _, namespace, kind = job.back_end.split("/")
        kubectl.delete(namespace, kind, job.id)


def _is_launcher(pid: str) -> bool:
    """Whether a process of this machine is still the launcher that was started under this number."""
    try:
        words = Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return False
    return b"launch" in words and b"local" in words
