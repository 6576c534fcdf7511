"""`ingot stop`: ask a run to save and stop, or end its jobs now. A run that is not running is left as it is: a file
STOP would hide why it ended, and a later start might obey it."""

import getpass
import socket
from datetime import datetime
from pathlib import Path

from ingot.launch.monitor.job_states import ENDING, RUNNING, SUSPENDED, end_jobs, is_living
from ingot.launch.monitor.status import AFTER, Status, read_status
from ingot.training.runtime.run_files import STOP


def stop_run(run: Path, now: bool) -> str:
    """Ask a run to stop (the file STOP is looked for once a second), or end its jobs now; returns what was done."""
    status = read_status(run)
    waiting = [job for job, state in status.jobs.items() if is_living(state)]
    if (status.over or status.state == "never started") and all(status.jobs[job] == ENDING for job in waiting):
        return _nothing_to_stop(run, status)
    asked = datetime.now().astimezone().isoformat(timespec="seconds")
    # keeps the rest of a chain from starting, too
    (run / STOP).write_text(f"{getpass.getuser()}@{socket.gethostname()}, {asked}\n", encoding="utf-8")
    if now or status.verb == "prepare":  # a preparation loses only the pieces that it is working on
        return f"{run}: {end_jobs(run)}"
    if waiting and not any(status.jobs[job] in RUNNING for job in waiting):
        return _asked_while_it_waits(run, status, waiting)
    return f"asked {run} to save and stop after its current step"


def _asked_while_it_waits(run: Path, status: Status, waiting: list[str]) -> str:
    # before the rest of its chain, or before what Slurm cleans up
    job = min(waiting, key=lambda job: (status.jobs[job] not in SUSPENDED, status.jobs[job] == ENDING))
    why = f" ({status.waits_for[job]})" if job in status.waits_for else ""
    now = f"`ingot stop --now {run}`"
    if status.jobs[job] in SUSPENDED:
        then = f"it stops after it has been resumed; {now} ends it at once"
    elif status.jobs[job] == ENDING:
        then = "Slurm cleans up after it; if that queues it again, it will end when it starts"
    else:
        then = f"it will end when it starts; {now} takes it out of the queue"
    return f"job {job}: {status.jobs[job]}{why}: {then}"


def _nothing_to_stop(run: Path, status: Status) -> str:
    if status.state == "finished":
        return f"{run} has finished already"
    state = "" if status.state == "not running" else f" ({status.state})"
    again = f"`{status.advice}` continues" if status.advice else "the same command continues"
    if AFTER in status.next:
        again = f"after `{status.advice}`, {status.next.partition(AFTER)[2]}"
    return f"{run} is not running{state}, so there is nothing to stop; {again} it"
