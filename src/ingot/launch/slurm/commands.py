"""Talking to Slurm: sbatch, squeue, scancel, scontrol."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.launch.programs import ProgramError, output_of
from ingot.launch.protocol import folder_of_output


def submit(script: Path, options: Sequence[str], env: Mapping[str, str]) -> str:
    """Submit a script, with variables for the job; returns the job id."""
    own = dict(os.environ)
    if "SLURM_JOB_ID" in own:  # inside a job: its size, memory and array are not the new one's
        own = {name: value for name, value in own.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    command = ["sbatch", "--parsable", *options, str(script)]
    return output_of(command, env={**own, **env}, hint=f"the script is {script}").partition(";")[0]


def job_states(job: str) -> dict[str, str] | None:
    """Ids and states of a job and its array elements; empty if Slurm no longer knows the job, None if Slurm cannot be
    reached or prints nothing at all."""
    try:
        found = output_of(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%i %T"])
    except ProgramError as error:
        return {} if "Invalid job id" in str(error) else None
    return dict(line.split()[:2] for line in found.splitlines() if line.strip()) or None


def cancel(job: str) -> None:
    """End a job: TERM, on which it saves, and KILL when Slurm's KillWait is over."""
    output_of(["scancel", job])


def host_names(node_list: str) -> list[str]:
    """The hosts of a Slurm node list."""
    return output_of(["scontrol", "show", "hostnames", node_list]).split()


def run_folder_of(job: str) -> Path | None:
    """The run folder that one of our jobs writes to, if Slurm still knows the job."""
    return folder_of_output(output_of(["scontrol", "show", "job", job]))
