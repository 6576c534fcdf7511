"""Handing a run to its back end, and handing it over again."""

from pathlib import Path

from ingot.errors import ConfigError
from ingot.launch.jobs import Job, add_job, read_jobs
from ingot.launch.ladder import mark_start
from ingot.launch.place import signal_seconds, strikes
from ingot.launch.slurm import job_states, submit, write_script
from ingot.launch.spec import LAUNCH, SPEC, LaunchSpec, read_spec
from ingot.launch.worker import HALT
from ingot.train.run_files import STOP

LIVING = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SIGNALING")


def submit_to_slurm(spec: LaunchSpec) -> Job:
    """Queue a run; refused while an earlier job of it is still queued or running, or cannot be asked about."""
    run = Path(spec.run_folder)
    refuse_if_living(run)
    script = write_script(spec)
    job = submit(script)
    for leftover in (run / STOP, run / LAUNCH / HALT):
        leftover.unlink(missing_ok=True)
    mark_start(run)
    return add_job(run, "slurm", job)


def refuse_if_living(run: Path) -> None:
    jobs = [job for job in read_jobs(run) if job.back_end == "slurm"]
    if not jobs:
        return
    states = job_states(jobs[-1].id)
    if states is None:
        raise ConfigError(
            f"Slurm cannot be asked whether job {jobs[-1].id} of {run} is still running; try again when it answers"
        )
    if living := [f"{job} is {state}" for job, state in states.items() if state in LIVING]:
        raise ConfigError(f"{run} has a job already: {living[0]}; stop it first with `ingot stop {run}`")


def again(run: Path) -> LaunchSpec:
    """The spec of a launched run, without the nodes that have failed since."""
    spec = read_spec(run / LAUNCH / SPEC)
    seconds, _ = signal_seconds(run)
    exclude = sorted({*spec.exclude, *strikes(run)})
    return spec.model_copy(update={"exclude": exclude, "signal_seconds": seconds})
