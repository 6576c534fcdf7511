"""`ingot launch kubernetes`"""

from typing import Annotated, Any

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.launch.common import KUBERNETES, PANELS, Arguments, RunOptions, make_training_spec
from ingot.cli.options import options_from
from ingot.launch.kubernetes.objects import INSTANCE, adapt_to_pods, find_kind, new_launch_id, render
from ingot.launch.spec import LaunchSpec
from ingot.launch.submit import submit_to_kubernetes

app = typer.Typer(add_completion=False)


@app.command("kubernetes", cls=OptionCommand)
@options_from(RunOptions, LaunchSpec, fields={*RunOptions.model_fields, *KUBERNETES}, panels=PANELS)
def kubernetes(
    arguments: Arguments = None,
    kind: Annotated[
        str, typer.Option("--kind", help="What the cluster runs: jobset, trainjob or pytorchjob.")
    ] = "jobset",
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the manifest with kubectl instead of printing it.")
    ] = False,
    **options: Any,
) -> None:
    """Print a run's Kubernetes manifest, or apply it.

    Mount a volume claim with --mounts CLAIM:/PATH; the run folder must be
    on one.

    Examples:
      ingot launch kubernetes mpt-125m data=/data/c4 save_folder=/data/run \\
        -N 2 --image registry.example/ingot:0.1.0 --mounts fsx:/data
      ingot launch kubernetes mpt-30b data=/data/c4 save_folder=/data/30b \\
        -N 16 --profile aws-p5 --image registry.example/ingot:0.1.0 \\
        --mounts fsx:/data --queue research --apply
    """
    checked = find_kind(kind)
    mounts = [part for text in options.get("mounts", []) for part in text.split(",")]
    options["claims"] = [mount for mount in mounts if not mount.startswith("/")]
    options["mounts"] = [mount for mount in mounts if mount.startswith("/")]
    spec, files = adapt_to_pods(make_training_spec(arguments, options))
    if not apply:
        print(render(spec, checked, new_launch_id(), files), end="")
        return
    job, said = submit_to_kubernetes(spec, checked, files)
    print(said)
    print(f"follow it with `kubectl -n {spec.namespace} get {kind},pods -l {INSTANCE}={job}`")
