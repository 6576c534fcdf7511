"""Talking to Slurm: sbatch, scancel, scontrol; squeue is in queue.py."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.launch.programs import output_of
from ingot.launch.protocol import folder_of_output


def submit(script: Path, options: Sequence[str], env: Mapping[str, str]) -> str:
    """Submit a script, with variables for the job; returns the job id."""
    own = dict(os.environ)
    if "SLURM_JOB_ID" in own:  # inside a job: its size, memory and array are not the new one's
        own = {name: value for name, value in own.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    command = ["sbatch", "--parsable", *options, str(script)]
    return output_of(command, env={**own, **env}, hint=f"the script is {script}").partition(";")[0]


def cancel(job: str) -> None:
    """End a job: TERM, on which it saves, and KILL when Slurm's KillWait is over."""
    output_of(["scancel", job])


def host_names(node_list: str) -> list[str]:
    """The hosts of a Slurm node list."""
    return output_of(["scontrol", "show", "hostnames", node_list]).split()


def run_folder_of(job: str) -> Path | None:
    """The run folder that one of our jobs writes to, if Slurm still knows the job."""
    return folder_of_output(output_of(["scontrol", "show", "job", job]))
