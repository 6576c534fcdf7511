"""`ingot launch resume` and `ingot launch profiles`"""

from typing import Annotated

import typer

from ingot.cli.launch.common import DryRun
from ingot.errors import ConfigError


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN_OR_JOB", help="Run folder, or id of a job.")],
    dry_run: DryRun = False,
) -> None:
    """Launch a run again as it was, without the nodes that failed; it continues from its last checkpoint.

    Example: ingot launch resume runs/mpt-30b
    """
    from ingot.cli.launch.local import run_here
    from ingot.cli.launch.slurm import submit
    from ingot.launch.kubernetes.objects import find_kind, new_launch_id, render
    from ingot.launch.protocol import LaunchFolder
    from ingot.launch.status import find_run
    from ingot.launch.submit import spec_to_resume, submit_to_kubernetes

    folder = find_run(run).absolute()
    spec, back_end = spec_to_resume(folder)
    if back_end == "slurm":
        submit(spec, dry_run)
    elif back_end == "local":
        run_here(spec, dry_run)
    else:
        kind, files = find_kind(back_end.rpartition("/")[2]), LaunchFolder(folder).kept_files()
        if dry_run:
            print(render(spec, kind, new_launch_id(), files), end="")
        else:
            print(submit_to_kubernetes(spec, kind, files)[1])


def profiles(
    action: Annotated[str, typer.Argument(help="list, or show.")] = "list",
    name: Annotated[str | None, typer.Argument(help="Profile to show.")] = None,
) -> None:
    """List the cluster profiles, or show what each variable of one is for.

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
