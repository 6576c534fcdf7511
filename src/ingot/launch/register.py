"""One job per run folder: whoever starts a run notes its job in `launch/jobs.jsonl`, and is refused while another job
is queued or running."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ingot.errors import ConfigError, disk_error
from ingot.launch.monitor.job_states import has_ended, is_living, job_states
from ingot.launch.monitor.owner import living_owner
from ingot.launch.protocol import LOCAL, TRAIN, LaunchFolder
from ingot.launch.slurm.queue import SCRIPTS, jobs_of_folder
from ingot.launch.spec import LaunchSpec, read_spec
from ingot.launch.supervisor.records import Launched
from ingot.launch.supervisor.state_file import STATE, read_state
from ingot.storage.small_files import move_away
from ingot.training.runtime.run_files import FINISHED


def register_local(spec: LaunchSpec) -> None:
    """Note that this process runs a launch spec here; refused while a job of the run is queued or running."""
    launch = LaunchFolder(Path(spec.run_folder))
    try:
        with only_job(launch):
            spec.write()
            launch.add_job(LOCAL, str(os.getpid()))
    except OSError as error:
        raise disk_error("write the run folder", launch.run, error) from None


def register_train(run: Path) -> None:
    """The same for `ingot train`, which has no spec. An owner on another machine may be dead, and the ranks wait until
    that is certain."""
    launch = LaunchFolder(run)
    read_state(launch.path / STATE)  # refuses a damaged one before anything is written
    try:
        with only_job(launch, waits_for_owner=True):
            launch.add_job(TRAIN, str(os.getpid()))
    except OSError as error:
        raise disk_error("write the run folder", run, error) from None


def note_train(run: Path) -> None:
    """Note that this process alone continues a run: until it owns the folder, `ingot stop` and `ingot status` could not
    see it. A second one is refused by the folder's lease. The folder of a new run is only created once nothing can be
    refused any more, and that of a finished one stays as it is."""
    if not run.is_dir() or (run / FINISHED).exists():
        return
    launch = LaunchFolder(run)
    try:
        with launch.lock():
            launch.add_job(TRAIN, str(os.getpid()))
    except OSError as error:
        raise disk_error("write the run folder", run, error) from None


@contextmanager
def only_job(launch: LaunchFolder, waits_for_owner: bool = False) -> Iterator[None]:
    """Refuse a second job of a run; of two launchers at the same moment, the second finds the job of the first."""
    run = launch.run
    refuse_state_of_another(launch)
    with launch.lock():
        if not _add_lost_jobs(launch):
            killed = "cannot tell whether Slurm has taken a job whose launcher was killed: it does not answer"
            raise ConfigError(f"{run}: {killed}; if its cluster is gone, remove {launch.submitting}")
        states = job_states(run)
        if states is None:
            gone = f"if its cluster is gone, remove it from {launch.path}/jobs.jsonl"
            raise ConfigError(f"cannot tell whether a job of {run} still runs: the cluster does not answer; {gone}")
        if living := sorted((job for job in states if job.is_living), key=lambda job: job.is_ending):
            end = f"stop it first with `ingot stop {run}`, which saves, or end it at once with `ingot stop --now {run}`"
            end = "wait until Slurm has cleaned up after it, then try again" if living[0].is_ending else end
            raise ConfigError(f"{run} already has a job: {living[0]}; {end}")
        owner = living_owner(run)
        if owner is not None and waits_for_owner and owner.host != socket.gethostname():
            owner = None
        if owner is not None and not (owner.job and has_ended(owner.job)):  # the next job deals with an orphan
            then = f"stop it first with `ingot stop {run}`, or wait a minute if it has been killed"
            raise ConfigError(f"{run} is in use by {owner}; {then}")
        yield


def refuse_state_of_another(launch: LaunchFolder) -> None:
    """Refuse a state file that was copied from another run alone: failures of that run would count against this one. A
    whole run that was copied has the launch spec of the other one, too, and a run that was moved is where it was."""
    path = launch.path / STATE
    launched = next((record for record in reversed(read_state(path)) if isinstance(record, Launched)), None)
    if launched is None or not launched.run:
        return
    other = Path(launched.run)
    is_here = other.is_dir() and launch.run.is_dir() and other.samefile(launch.run)
    if is_here or not (LaunchFolder(other).path / STATE).is_file():
        return
    if not launch.spec_file.is_file() or read_spec(launch.spec_file).run_folder != launched.run:
        then = f"move it away with `{move_away(path)}`, then launch the run again"
        raise ConfigError(f"{path} belongs to another run, {other}; {then}")


def find_lost_jobs(run: Path) -> None:
    """The same for somebody who only looks; nothing while a launcher is at work, or if the folder is not theirs."""
    launch = LaunchFolder(run)
    if launch.submitting.exists():
        with suppress(OSError), launch.lock(wait=False):
            _add_lost_jobs(launch)


def _add_lost_jobs(launch: LaunchFolder) -> bool:
    """Note jobs that Slurm has taken though their launcher was killed before it could write that down. Returns False
    if there may be one and Slurm does not answer."""
    if not any((launch.path / script).exists() for script in SCRIPTS):
        return True
    found = jobs_of_folder(launch.path)
    if found is None:
        return not launch.submitting.exists()
    known = {job.id for job in launch.jobs()}
    living = {job.id.partition("_")[0] for job in found if is_living(job.state)}
    for job in sorted(living - known, key=int):
        launch.add_job("slurm", job)
    launch.submitting.unlink(missing_ok=True)
    return True
