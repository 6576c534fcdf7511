"""`ingot launch kubernetes`"""

from typing import Annotated, Any

import typer

from ingot.cli.launch.common import KUBERNETES, Arguments, Config, Dialect, Updates, load_spec, training_spec
from ingot.cli.options import options_from


@options_from(load_spec, fields=KUBERNETES)
def kubernetes(
    arguments: Arguments = None,
    config: Config = None,
    updates: Updates = None,
    dialect: Dialect = None,
    kind: Annotated[
        str, typer.Option("--kind", help="What the cluster runs: jobset, trainjob or pytorchjob.")
    ] = "jobset",
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the manifest with kubectl instead of printing it.")
    ] = False,
    **options: Any,
) -> None:
    """Print a run's manifest, or apply it. Mount a claim with --mounts CLAIM:/PATH; the run folder must be on one.

    Example: ingot launch kubernetes mpt-30b data=/data/c4 save_folder=/data/runs/30b -N 16 --profile aws-p5
    --image registry.example/ingot:0.1.0 --mounts fsx:/data --queue research --apply
    """
    from ingot.launch.kubernetes.objects import INSTANCE, adapt_to_pods, find_kind, new_launch_id, render
    from ingot.launch.submit import submit_to_kubernetes

    checked = find_kind(kind)
    mounts = [part for text in options.get("mounts", []) for part in text.split(",")]
    options["claims"] = [mount for mount in mounts if not mount.startswith("/")]
    options["mounts"] = [mount for mount in mounts if mount.startswith("/")]
    spec, files = adapt_to_pods(training_spec(arguments, config, updates, dialect, options))
    if not apply:
        print(render(spec, checked, new_launch_id(), files), end="")
        return
    job, said = submit_to_kubernetes(spec, checked, files)
    print(said)
    print(f"follow it with `kubectl -n {spec.namespace} get {kind},pods -l {INSTANCE}={job}`")
