"""Ending a run from outside, wherever it runs."""

from pathlib import Path

from ingot.launch.jobs import read_jobs
from ingot.launch.slurm import cancel, job_states
from ingot.launch.submit import LIVING
from ingot.train.run_files import FINISHED, STOP


def stop_run(run: Path, now: bool) -> str:
    """Ask a run to save and end (it looks for the file STOP once a second), or end its job now; says what was done."""
    if (run / FINISHED).exists():
        return f"{run} has finished already"
    (run / STOP).touch()  # keeps the rest of a chain from starting, too
    jobs = [job for job in read_jobs(run) if job.back_end == "slurm"]
    if not now or not jobs:
        return f"asked {run} to save and stop after its present step"
    states = job_states(jobs[-1].id)
    if states is None:
        return f"asked {run} to stop; Slurm does not answer, so job {jobs[-1].id} was not cancelled"
    if any(state in LIVING for state in states.values()):
        cancel(jobs[-1].id)
    return f"cancelled job {jobs[-1].id} of {run}"
