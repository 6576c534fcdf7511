"""What the commands of `ingot launch` share. Their options are fields of the launch spec."""

import shlex
import sys
from typing import Annotated, Any

import typer
from pydantic import Field

from ingot.cli.script_options import RUN_ARGUMENTS, ScriptSettings, script_arguments
from ingot.errors import ConfigError
from ingot.launch.build_spec import training_spec
from ingot.launch.spec import LaunchSpec

# Which fields each command takes. Those of no command are decided by the launcher or come from the defaults file.
_EVERYWHERE = {"profile", "name", "env", "secrets"}
_ON_CLUSTERS = {*_EVERYWHERE, "nodes", "cpus_per_task", "image", "mounts", "exclude", "preflight", "signal_seconds"}
LOCAL = {*_EVERYWHERE, "gpus_per_node", "processes_per_node"}
KUBERNETES = {*LOCAL, *_ON_CLUSTERS, "namespace", "queue", "secret_name", "restarts"}
_QUEUE = ["time", "partition", "account", "qos", "constraint", "reservation", "mail_user", "mail_type", "cpu_bind",
          "srun_args", "sbatch_args"]  # fmt: skip
SLURM_PREPARE = {*_ON_CLUSTERS, "stage", "local_folder", *_QUEUE}
SLURM = {*LOCAL, *SLURM_PREPARE, "chain", "spares"}

PANELS = {
    "Nodes and processes": ["nodes", "spares", "gpus_per_node", "processes_per_node", "cpus_per_task", "exclude",
                            "preflight"],
    "Container and environment": ["image", "stage", "mounts", "env", "secrets", "secret_name"],
    "Queue": [*_QUEUE, "chain", "signal_seconds", "local_folder", "namespace", "queue", "restarts"],
    "Spellings of other stacks": ["config", "updates", "dialect", "supplied", "pick"],
}  # fmt: skip

Arguments = Annotated[list[str] | None, RUN_ARGUMENTS]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted or run; change nothing.")]


class RunOptions(ScriptSettings):
    """Ways to say what to train other than `RECIPE_OR_FILES [KEY=VALUE]...`."""

    config: str | None = Field(None, json_schema_extra={"flags": ["--config", "-c"]})
    """Recipe or config file, as an option (LLM Foundry's launch scripts)."""
    updates: str | None = Field(None, json_schema_extra={"flags": ["--updates", "-y"]})
    """Overrides as one string, with --config."""
    dialect: str | None = None
    """Format of the config files: foundry, neox or megatron."""


def make_training_spec(arguments: list[str] | None, options: dict[str, Any], is_here: bool = False) -> LaunchSpec:
    """The spec of a training run; prints what was decided."""
    given = {name: options.pop(name, None) for name in RunOptions.model_fields}
    found = [*([given["config"]] if given["config"] else []), *(arguments or []), *shlex.split(given["updates"] or "")]
    if not found:
        raise ConfigError("nothing to launch: name a recipe, for example `ingot launch slurm mpt-125m -N 2`")
    found += script_arguments(given)
    spec, notes = training_spec(found, options, given["dialect"], is_here)
    print_notes(notes)
    return spec


def print_notes(notes: list[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)
