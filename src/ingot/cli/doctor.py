"""`ingot doctor`: what works on this machine or on the nodes of a cluster."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.commands import AsJson, OptionCommand
from ingot.errors import ConfigError
from ingot.report.environment_check import check_environment

app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def doctor(
    run: Annotated[Path | None, typer.Argument(help="With --cluster: the folder of a launched run.")] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check every node of this Slurm allocation, or only this node.")
    ] = False,
    profile: Annotated[
        str | None, typer.Option(help="With --cluster: the cluster profile of the nodes, without a run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, or the nodes of a cluster.

    Says what works, what is missing, and the command that fixes it. With
    --cluster it runs the checks that precede each attempt of a launched run,
    on every node of the current Slurm allocation (inside `salloc`), in the
    same way: the first node leads, an agent on each node answers.

    Examples:
      ingot doctor
      ingot doctor --cluster runs/mpt-30b
      ingot doctor --cluster --profile infiniband --json
    """
    if run is not None and profile is not None:
        raise ConfigError("a launched run has its own profile; omit --profile or the run folder")
    if (run is not None or profile is not None) and not cluster:
        raise ConfigError("a run folder or a profile needs --cluster: ingot doctor --cluster ...")
    if cluster:
        from ingot.launch.preflight.doctor import check_nodes

        found = check_nodes(run, profile)
        print(json.dumps(asdict(found), indent=1) if as_json else str(found))
        raise typer.Exit(found.exit_code)
    results = check_environment()
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        for result in results:
            fix = f"  ->  {result.fix}" if result.fix and result.state != "ok" else ""
            print(f"{result.state:>4}  {result.what:<18} {result.detail}{fix}")
    raise typer.Exit(1 if any(result.state == "fail" for result in results) else 0)
