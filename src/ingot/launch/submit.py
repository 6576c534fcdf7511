"""Submitting a run to its back end, for the first time or again."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ingot.errors import ConfigError, IngotError
from ingot.launch.agent.environment import read_secret
from ingot.launch.build_spec import strikes
from ingot.launch.image import expected_sum
from ingot.launch.kubernetes import kubectl, objects
from ingot.launch.measured_times import read_times
from ingot.launch.protocol import LOCAL, TRAIN, LaunchFolder
from ingot.launch.register import only_job
from ingot.launch.slurm.commands import cancel, submit
from ingot.launch.slurm.queue import jobs_of_folder
from ingot.launch.slurm.script import render_scripts
from ingot.launch.spec import LaunchSpec, make_spec, read_spec
from ingot.launch.supervisor.failure_log import mark_start
from ingot.launch.supervisor.records import Launched
from ingot.launch.supervisor.state_file import STATE, StateFile, now, read_state
from ingot.storage.small_files import move_away, read_bytes
from ingot.training.runtime.run_files import FAILURES, FINISHED


def submit_to_slurm(spec: LaunchSpec) -> str:
    """Queue a run; refused while an earlier job of it is queued or running, or cannot be asked about. Returns the job
    id, or several separated by commas."""
    run = Path(spec.run_folder)
    launch = LaunchFolder(run)
    with only_job(launch):
        if spec.stage and spec.image:
            expected_sum(Path(spec.image))
        spec.write()
        scripts = [launch.write_script(name, text) for name, text in render_scripts(spec).items()]
        # a container sees no home folder: secrets from there travel with the job's environment
        hidden = {name: read_secret(name) for name in spec.secrets} if spec.image else {}
        leftovers = [*launch.leftovers(), *([run / FINISHED] if spec.verb == "prepare" else [])]
        ids: list[str] = []
        record = Launched(time=now(), launch=objects.new_launch_id(), back_end="slurm", nodes=spec.nodes,
                          spares=spec.spares, chain=spec.chain, run=spec.run_folder)  # fmt: skip
        with _recorded(record, launch, leftovers):  # first: the job may start at once
            launch.begin_submission()
            try:
                for script in scripts:
                    after = [f"--dependency=afterok:{ids[-1]}", "--kill-on-invalid-dep=yes"] if ids else []
                    ids.append(submit(script, after, hidden))
            except IngotError as error:
                for job in ids:
                    cancel(job)
                if isinstance(error, ConfigError) or jobs_of_folder(launch.path) == []:
                    launch.submitting.unlink()  # otherwise Slurm may have taken one without an answer
                raise
        for job in ids:
            launch.add_job("slurm", job)
        launch.submitting.unlink()
    return ",".join(ids)


def submit_to_kubernetes(spec: LaunchSpec, kind: objects.Kind, files: Mapping[str, str]) -> tuple[str, str]:
    """Apply a run's manifest; returns the name of its object and what kubectl printed."""
    launch = objects.new_launch_id()
    text, name = objects.render(spec, kind, launch, files), objects.object_name(spec, launch)
    folder = LaunchFolder(Path(spec.run_folder))
    if not folder.run.is_dir():  # the volume is not mounted here
        return name, kubectl.apply(text)
    with only_job(folder):
        record = Launched(time=now(), launch=launch, back_end="kubernetes", nodes=spec.nodes, run=spec.run_folder)
        with _recorded(record, folder, folder.leftovers()):
            said = kubectl.apply(text)
        spec.write()
        folder.keep_files(files)
        folder.add_job(f"kubernetes/{spec.namespace}/{kind}", name)
    return name, said


@contextmanager
def _recorded(record: Launched, launch: LaunchFolder, leftovers: Sequence[Path]) -> Iterator[None]:
    """Note that a user starts the run, and remove what would end it again. If it cannot be submitted, all is as
    before."""
    run, folder = launch.run, launch.path
    states = [StateFile(folder), *(StateFile(path.parent) for path in sorted(folder.glob(f"shares/*/{STATE}")))]
    changed = [*leftovers, *(state.path for state in states), run / FAILURES]
    before = {path: _content(path) for path in changed}
    try:
        for path in leftovers:
            path.unlink(missing_ok=True)
        mark_start(run)
        for state in states:  # each share of a preparation has a supervisor
            if not state.append(record if state is states[0] else msgspec.structs.replace(record, nodes=1)):
                raise ConfigError(f"cannot write {state.path}: is its disk full?")
        yield
    except BaseException:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)
        raise


def _content(path: Path) -> bytes | None:
    try:
        return read_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; move it away with `{move_away(path)}`") from None


def spec_to_resume(
    run: Path, time: str | None = None, exclude: Sequence[str] = (), use: Sequence[str] = ()
) -> tuple[LaunchSpec, str]:
    """The spec of a launched run, without the nodes that have failed since, and the back end that it ran on.

    time: another time limit
    exclude, use: nodes to leave out in addition, and nodes to use in spite of their failures
    """
    launch = LaunchFolder(run)
    spec, back_end = read_spec(launch.spec_file), _back_end(launch)
    if not (Path(spec.run_folder).exists() and Path(spec.run_folder).samefile(run)):
        again = f"move it back, or launch it again with save_folder={run}"
        raise ConfigError(f"{run} was launched as {spec.run_folder}; {again}")
    seconds = read_times(run).signal_seconds
    changes: dict[str, Any] = {"exclude": sorted({*spec.exclude, *strikes(run), *exclude} - set(use))}
    changes |= {"signal_seconds": seconds} if spec.verb == "train" else {}
    changes |= {"time": time} if time is not None else {}
    return make_spec(spec.model_dump() | changes), back_end


def _back_end(launch: LaunchFolder) -> str:
    """What a run was last launched on."""
    if jobs := [job.back_end for job in launch.jobs() if job.back_end != TRAIN]:
        return jobs[-1]
    records = read_state(launch.path / STATE)  # its launcher was killed before it noted its job
    launched = [record.back_end for record in records if isinstance(record, Launched)]
    if launched and launched[-1] in ("slurm", LOCAL):
        return launched[-1]
    again = "launch it again with the command that it was launched with"
    raise ConfigError(f"{launch.path} does not say what {launch.run} was launched on: it names no job; {again}")
