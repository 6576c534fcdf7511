"""`ingot launch kubernetes`"""

import sys
from typing import Annotated

import typer

from ingot.cli.launch.slurm import (
    FIELDS,
    Arguments,
    Config,
    Cpus,
    Dialect,
    Env,
    Gpus,
    Image,
    Mounts,
    Name,
    Nodes,
    Preflight,
    Processes,
    ProfileName,
    Secret,
    Updates,
    common_options,
    run_arguments,
)
from ingot.errors import ConfigError

KINDS = ("jobset", "trainjob", "pytorchjob")
OWN = ("namespace", "queue", "secret_name", "restarts")


def kubernetes(
    arguments: Arguments = None,
    config: Config = None,
    updates: Updates = None,
    kind: Annotated[str, typer.Option("--kind", help=f"{', '.join(KINDS)}: what the cluster has.")] = "jobset",
    nodes: Nodes = None,
    gpus_per_node: Gpus = None,
    processes_per_node: Processes = None,
    cpus_per_task: Cpus = None,
    image: Image = None,
    mounts: Mounts = None,
    profile: ProfileName = None,
    name: Name = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", "-x", help="Nodes not to use.")] = None,
    signal_seconds: Annotated[int | None, typer.Option(help="How long a pod may take to save and end.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Namespace. Default: default.")] = None,
    queue: Annotated[str | None, typer.Option("--queue", help="Kueue queue, which admits all pods at once.")] = None,
    env: Env = None,
    secret: Secret = None,
    preflight: Preflight = None,
    secret_name: Annotated[str | None, typer.Option(help="The cluster's Secret with those variables.")] = None,
    restarts: Annotated[int | None, typer.Option("--restarts", help="How often all pods are made anew.")] = None,
    dialect: Dialect = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Hand the manifest to kubectl instead of printing it.")
    ] = False,
) -> None:
    """Print a run's manifest, or apply it. Mount a claim with --mounts CLAIM:/PATH; the run folder must be on one.

    Example: ingot launch kubernetes mpt-30b data=/data/c4 save_folder=/data/runs/30b -N 16 --profile aws-p5
    --image registry.example/ingot:0.1.0 --mounts fsx:/data --queue research --apply
    """
    from ingot.launch.build_spec import place_training
    from ingot.launch.kubernetes import objects
    from ingot.launch.submit import submit_to_kubernetes

    given = {key: value for key, value in locals().items() if key in (*FIELDS, *OWN)}
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind}: there are {', '.join(KINDS)}")
    options = common_options(given)
    options["claims"] = [mount for mount in options["mounts"] if not mount.startswith("/")]
    options["mounts"] = [mount for mount in options["mounts"] if mount.startswith("/")]
    spec, notes = place_training(run_arguments(arguments, config, updates), options, dialect)
    spec, files = objects.adapt_to_pods(spec)
    for note in notes:
        print(note, file=sys.stderr)
    if not apply:
        print(objects.render(spec, kind, objects.new_launch_id(), files), end="")  # type: ignore[arg-type]  # checked above
        return
    job, said = submit_to_kubernetes(spec, kind, files)  # type: ignore[arg-type]
    print(said)
    print(f"follow it with `kubectl -n {spec.namespace} get {kind},pods -l {objects.INSTANCE}={job}`")
