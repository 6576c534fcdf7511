"""Handing a run to its back end, and handing it over again."""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ingot.errors import ConfigError, IngotError
from ingot.launch.build_spec import signal_seconds, strikes
from ingot.launch.image import expected_sum
from ingot.launch.job_states import is_living, job_states
from ingot.launch.jobs import add_job, read_jobs
from ingot.launch.kubernetes import kubectl, objects
from ingot.launch.slurm.prepare_array import ARRAY, LAST, render_array, render_last
from ingot.launch.slurm.script import ENDS, SCRIPT, STARTS, cancel, render, submit, write_script
from ingot.launch.spec import LAUNCH, SPEC, LaunchSpec, read_spec
from ingot.launch.supervisor.node_agent import HALT, read_secret
from ingot.launch.supervisor.restart_policy import mark_start
from ingot.training.runtime.run_files import FINISHED, STOP

FILES = "files"  # in the launch folder: config files that travel with a Kubernetes job


def scripts(spec: LaunchSpec) -> dict[str, str]:
    """Names and texts of the scripts that are handed to Slurm, in order; each waits for the one before."""
    if spec.verb == "prepare":
        return {ARRAY: render_array(spec), LAST: render_last(spec)}
    return {SCRIPT: render(spec)}


def submit_to_slurm(spec: LaunchSpec) -> str:
    """Queue a run; refused while an earlier job of it is still queued or running, or cannot be asked about. Gives the
    job id, or several with commas."""
    run = Path(spec.run_folder)
    with _alone(spec):
        if spec.stage and spec.image:
            expected_sum(Path(spec.image))
        written = [write_script(spec, name, text) for name, text in scripts(spec).items()]
        # a container sees no home folder: secrets that lie there go with the job's environment
        hidden = {name: read_secret(name) for name in spec.secrets} if spec.image else {}
        leftovers = [
            run / STOP,
            *(run / LAUNCH / name for name in (HALT, STARTS, ENDS)),
            *([run / FINISHED] if spec.verb == "prepare" else []),
        ]
        before = {path: path.read_text(encoding="utf-8") for path in leftovers if path.exists()}
        for path in before:  # first: the job may start at once
            path.unlink()
        mark_start(run)
        ids: list[str] = []
        try:
            for script in written:
                after = [f"--dependency=afterok:{ids[-1]}", "--kill-on-invalid-dep=yes"] if ids else []
                ids.append(submit(script, after, hidden))
        except IngotError:
            for job in ids:
                cancel(job)
            for path, text in before.items():
                path.write_text(text, encoding="utf-8")
            raise
        for job in ids:
            add_job(run, "slurm", job)
    return ",".join(ids)


def submit_to_kubernetes(spec: LaunchSpec, kind: objects.Kind, files: Mapping[str, str]) -> tuple[str, str]:
    """Apply a run's manifest; gives the name of its object and what kubectl said."""
    launch = objects.new_launch_id()
    text, name = objects.render(spec, kind, launch, files), objects.object_name(spec, launch)
    run = Path(spec.run_folder)
    if not run.is_dir():  # the volume may be out of sight here
        return name, kubectl.apply(text)
    with _alone(spec):
        said = kubectl.apply(text)
        spec.write()
        for file, content in files.items():
            (spec.folder / FILES).mkdir(exist_ok=True)
            (spec.folder / FILES / file).write_bytes(content.encode())
        add_job(run, f"kubernetes/{spec.namespace}/{kind}", name)
    return name, said


@contextmanager
def _alone(spec: LaunchSpec) -> Iterator[None]:
    """Of two launchers at the same moment, the second finds the job of the first."""
    run = Path(spec.run_folder)
    spec.folder.mkdir(parents=True, exist_ok=True)
    with (spec.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        states = job_states(run)
        if states is None:
            raise ConfigError(f"nobody can be asked whether a job of {run} is still running; try again later")
        if living := [f"{job} is {state}" for job, state in states.items() if is_living(state)]:
            raise ConfigError(f"{run} has a job already: {living[0]}; stop it first with `ingot stop {run}`")
        yield


def again(run: Path) -> tuple[LaunchSpec, str]:
    """The spec of a launched run, without the nodes that have failed since, and the back end that it ran on."""
    spec = read_spec(run / LAUNCH / SPEC)
    jobs = read_jobs(run)
    seconds, _ = signal_seconds(run)
    exclude = sorted({*spec.exclude, *strikes(run)})
    changes = {"exclude": exclude, **({"signal_seconds": seconds} if spec.verb == "train" else {})}
    return spec.model_copy(update=changes), jobs[-1].back_end if jobs else "slurm"


def kept_files(run: Path) -> dict[str, str]:
    """Config files that went with a Kubernetes job."""
    return {path.name: path.read_bytes().decode() for path in sorted((run / LAUNCH / FILES).glob("*"))}
