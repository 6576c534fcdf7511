"""What the commands of `ingot launch` share. Their options are fields of the launch spec."""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.launch.spec import LaunchSpec

# Which fields each command takes. Those of no command are decided by the launcher or come from the defaults file.
_EVERYWHERE = {"profile", "name", "env", "secrets"}
_ON_CLUSTERS = {*_EVERYWHERE, "nodes", "cpus_per_task", "image", "mounts", "exclude", "preflight", "signal_seconds"}
LOCAL = {*_EVERYWHERE, "gpus_per_node", "processes_per_node"}
KUBERNETES = {*LOCAL, *_ON_CLUSTERS, "namespace", "queue", "secret_name", "restarts"}
SLURM_PREPARE = {*_ON_CLUSTERS, "stage", "time", "partition", "account", "qos", "constraint", "reservation"}
SLURM = {*LOCAL, *SLURM_PREPARE, "chain", "spares"}

Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="RECIPE_OR_FILES [KEY=VALUE]...", help="Recipe, config files, overrides.")
]
Config = Annotated[str | None, typer.Option("--config", "-c", help="The recipe, as in the Azure guide's launch.sb.")]
Updates = Annotated[str | None, typer.Option("--updates", "-y", help="Overrides in one string, as in that guide.")]
Dialect = Annotated[str | None, typer.Option(help="Format of the config files: foundry, neox or megatron.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted or run; change nothing.")]


def load_spec() -> "type[LaunchSpec]":
    from ingot.launch.spec import LaunchSpec

    return LaunchSpec


def training_spec(
    arguments: list[str] | None,
    config: str | None,
    updates: str | None,
    dialect: str | None,
    options: dict[str, Any],
) -> "LaunchSpec":
    """The spec of a training run, whose arguments may come in three ways; prints what was decided."""
    from ingot.launch.build_spec import place_training

    found = [*([config] if config else []), *(arguments or []), *shlex.split(updates or "")]
    if not found:
        raise ConfigError("nothing to launch: name a recipe, for example `ingot launch slurm mpt-125m -N 2`")
    spec, notes = place_training(found, options, dialect)
    print_notes(notes)
    return spec


def print_notes(notes: list[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)
