"""Talking to Slurm: sbatch, squeue, scancel, scontrol. An error is one sentence."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.errors import EXIT_FAULT, ConfigError, IngotError
from ingot.launch.protocol import folder_of_output


class SlurmError(IngotError):
    """Slurm refused, or cannot be reached."""

    exit_code = EXIT_FAULT


def submit(script: Path, options: Sequence[str], env: Mapping[str, str]) -> str:
    """Submit a script, with variables for the job; returns the job id."""
    own = dict(os.environ)
    if "SLURM_JOB_ID" in own:  # inside a job: its size, memory and array are not the new one's
        own = {name: value for name, value in own.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    answer = run_command(["sbatch", "--parsable", *options, str(script)], f"the script is {script}", env={**own, **env})
    return answer.strip().partition(";")[0]


def job_states(job: str) -> dict[str, str] | None:
    """Ids and states of a job and its array elements; empty if Slurm no longer knows the job, None if Slurm cannot be
    reached or prints nothing at all."""
    try:
        found = run_command(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%i %T"])
    except SlurmError as error:
        return {} if "Invalid job id" in str(error) else None
    return dict(line.split()[:2] for line in found.splitlines() if line.strip()) or None


def cancel(job: str) -> None:
    """End a job: TERM, on which it saves, and KILL when Slurm's KillWait is over."""
    run_command(["scancel", job])


def host_names(node_list: str) -> list[str]:
    """The hosts of a Slurm node list."""
    return run_command(["scontrol", "show", "hostnames", node_list]).split()


def run_folder_of(job: str) -> Path | None:
    """The run folder that one of our jobs writes to, if Slurm still knows the job."""
    return folder_of_output(run_command(["scontrol", "show", "job", job]))


def run_command(command: Sequence[str], hint: str = "", env: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm prints."""
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not on this machine; run this where Slurm's commands are")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within a minute: is slurmctld running? {hint}") from None
    if done.returncode:
        text = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(f"{command[0]} refused: {text}" + (f"; {hint}" if hint else ""))
    return done.stdout
