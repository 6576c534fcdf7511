"""`ingot launch`"""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.launch.spec import LaunchSpec

# options that go into the spec as they are named
FIELDS = ("nodes", "gpus_per_node", "processes_per_node", "cpus_per_task", "image", "stage", "mounts", "profile",
          "name", "time", "partition", "account", "qos", "constraint", "exclude", "reservation", "chain", "spares",
          "signal_seconds", "preflight", "env", "secret")  # fmt: skip
launch_app = typer.Typer(help="Run on a cluster, and back after every fault.", no_args_is_help=True)

Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="RECIPE_OR_FILES [KEY=VALUE]...", help="Recipe, config files, overrides.")
]
Config = Annotated[str | None, typer.Option("--config", "-c", help="The recipe, as in the Azure guide's launch.sb.")]
Updates = Annotated[str | None, typer.Option("--updates", "-y", help="Overrides in one string, as in that guide.")]
Nodes = Annotated[int | None, typer.Option("--nodes", "-N", help="Nodes.")]
Gpus = Annotated[int | None, typer.Option("--gpus-per-node", help="GPUs per node. Default: the profile's.")]
Processes = Annotated[int | None, typer.Option("--processes-per-node", help="Default: one per GPU, or one.")]
Cpus = Annotated[int | None, typer.Option("--cpus-per-task", help="Cores of each node's task.")]
Image = Annotated[str | None, typer.Option("--image", "-i", help="Container image: IMAGE.sqsh or a registry name.")]
Stage = Annotated[str | None, typer.Option("--stage", help="Folder of the nodes' own to copy IMAGE.sqsh to first.")]
Mounts = Annotated[list[str] | None, typer.Option("--mounts", "-m", help="SOURCE:TARGET, several by commas.")]
ProfileName = Annotated[str | None, typer.Option("--profile", help="Cluster profile; see `ingot launch profiles`.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the job. Default: the run's.")]
Env = Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE on the nodes; may be given again.")]
Secret = Annotated[list[str] | None, typer.Option("--secret", help="Variable to pass on by name; written nowhere.")]
Preflight = Annotated[bool | None, typer.Option(help="Check the nodes before each attempt.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print script and spec; touch nothing.")]
Time = Annotated[str | None, typer.Option("--time", "-t", help="Limit of one job, such as 24:00:00.")]
Partition = Annotated[str | None, typer.Option("--partition", "-p", help="Slurm partition.")]
Account = Annotated[str | None, typer.Option("--account", "-A", help="Slurm account.")]
Qos = Annotated[str | None, typer.Option("--qos", help="Slurm quality of service.")]
Constraint = Annotated[str | None, typer.Option("--constraint", "-C", help="Node features.")]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", "-x", help="Nodes not to use.")]
Reservation = Annotated[str | None, typer.Option("--reservation", help="Slurm reservation.")]
SignalSeconds = Annotated[int | None, typer.Option(help="Ask to save so long before the limit.")]
Dialect = Annotated[str | None, typer.Option(help="Whose keys the files have: foundry, neox, megatron.")]


def common_options(values: dict[str, Any]) -> dict[str, Any]:
    """Options as fields of the spec."""
    from ingot.launch.build_spec import parse_env

    values["mounts"] = [part for text in values["mounts"] or [] for part in text.split(",")]
    values["env"] = parse_env(values.pop("env") or [])
    values["secrets"] = values.pop("secret") or []
    return values


def run_arguments(arguments: list[str] | None, config: str | None, updates: str | None) -> list[str]:
    """What describes the run, of all three ways to say it."""
    found = [*([config] if config else []), *(arguments or []), *shlex.split(updates or "")]
    if not found:
        raise ConfigError("nothing to launch: name a recipe, for example `ingot launch slurm mpt-125m -N 2`")
    return found


class SlurmCommand(TyperCommand):
    """A preparation has options of its own: those of `ingot prepare`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args[:1] != ["prepare"]:
            return super().make_context(info_name, args, parent, **extra)
        from ingot.cli.launch.prepare import command

        return command().make_context("slurm prepare", args[1:], parent, **extra)


@launch_app.command("slurm", cls=SlurmCommand)
def slurm(
    arguments: Arguments = None,
    config: Config = None,
    updates: Updates = None,
    nodes: Nodes = None,
    gpus_per_node: Gpus = None,
    processes_per_node: Processes = None,
    cpus_per_task: Cpus = None,
    image: Image = None,
    stage: Stage = None,
    mounts: Mounts = None,
    profile: ProfileName = None,
    name: Name = None,
    time: Time = None,
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    constraint: Constraint = None,
    exclude: Exclude = None,
    reservation: Reservation = None,
    chain: Annotated[int | None, typer.Option("--chain", help="Jobs queued at once, one after another.")] = None,
    spares: Annotated[int | None, typer.Option("--spares", help="Nodes that step in for a failed one.")] = None,
    signal_seconds: SignalSeconds = None,
    preflight: Preflight = None,
    env: Env = None,
    secret: Secret = None,
    dialect: Dialect = None,
    dry_run: DryRun = False,
) -> None:
    """Submit a run to Slurm. The job saves before its time limit, and continues after faults.

    Example: ingot launch slurm mpt-30b data=/fsx/c4 save_folder=/fsx/runs/30b -N 16 -p gpu -i /apps/ingot.sqsh
    --mounts /fsx:/fsx --profile azure-ndv5 --time 24:00:00 --chain 5

    `ingot launch slurm prepare --help`: a preparation, divided over jobs.
    """
    from ingot.launch.build_spec import place_training

    given = {key: value for key, value in locals().items() if key in FIELDS}
    spec, notes = place_training(run_arguments(arguments, config, updates), common_options(given), dialect)
    hand_over(spec, notes, dry_run)


def hand_over(spec: "LaunchSpec", notes: list[str], dry_run: bool) -> None:
    """Submit, or print what would be."""
    from ingot.launch.slurm.script import render_scripts
    from ingot.launch.submit import submit_to_slurm

    for note in notes:
        print(note, file=sys.stderr)
    if dry_run:
        print(
            "\n".join(render_scripts(spec).values()) + f"\n# {spec.folder}/spec.json\n" + spec.model_dump_json(indent=1)
        )
        return
    job = submit_to_slurm(spec)
    print(f"job {job}; follow it with `ingot status {spec.run_folder}` and `ingot logs -f {spec.run_folder}`")


@launch_app.command("profiles")
def profiles(
    action: Annotated[str, typer.Argument(help="list, or show.")] = "list",
    name: Annotated[str | None, typer.Argument(help="Profile to show.")] = None,
) -> None:
    """The cluster profiles, and what each variable is for.

    Example: ingot launch profiles show azure-ndv5
    """
    from ingot.launch.profiles import find_profile, profile_names

    if action == "list":
        for each in profile_names():
            print(f"{each:12} {find_profile(each).description}")
    elif action == "show" and name is not None:
        profile = find_profile(name)
        print(f"{profile.description}; {profile.gpus_per_node} GPUs per node, transport {profile.transport}")
        for variable, content in profile.env.items():
            print(f"{variable}={content.value}\n    {content.reason}")
    else:
        raise ConfigError("write `ingot launch profiles` or `ingot launch profiles show NAME`")


@launch_app.command("resume")
def resume(
    run: Annotated[str, typer.Argument(metavar="RUN_OR_JOB", help="Run folder, or id of a job.")],
    dry_run: DryRun = False,
) -> None:
    """Launch a run again as it was, without the nodes that failed; it continues from its last checkpoint.

    Example: ingot launch resume runs/mpt-30b
    """
    from ingot.cli.launch.local import run_here
    from ingot.launch.kubernetes.objects import new_launch_id, render
    from ingot.launch.protocol import LaunchFolder
    from ingot.launch.status import find_run
    from ingot.launch.submit import spec_to_resume, submit_to_kubernetes

    folder = find_run(run).absolute()
    spec, back_end = spec_to_resume(folder)
    if back_end == "slurm":
        hand_over(spec, [], dry_run)
    elif back_end == "local":
        run_here(spec, dry_run)
    else:
        kind, files = back_end.rpartition("/")[2], LaunchFolder(folder).kept_files()
        if dry_run:
            print(render(spec, kind, new_launch_id(), files), end="")  # type: ignore[arg-type]  # written down by us
        else:
            print(submit_to_kubernetes(spec, kind, files)[1])  # type: ignore[arg-type]
