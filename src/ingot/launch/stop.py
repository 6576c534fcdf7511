"""Ending a run from outside, wherever it runs."""

from pathlib import Path

from ingot.launch.job_states import end_jobs, launched_verb
from ingot.training.runtime.run_files import FINISHED, STOP


def stop_run(run: Path, now: bool) -> str:
    """Ask a run to save and end (it looks for the file STOP once a second), or end its job now; says what was done."""
    if (run / FINISHED).exists():
        return f"{run} has finished already"
    (run / STOP).touch()  # keeps the rest of a chain from starting, too
    if now or launched_verb(run) == "prepare":  # a preparation loses only the pieces that it is at
        return f"{run}: {end_jobs(run)}"
    return f"asked {run} to save and stop after its present step"
