"""`ingot doctor`"""

from pathlib import Path
from typing import Annotated

import typer

from ingot.errors import ConfigError


def doctor(
    run: Annotated[Path | None, typer.Argument(help="With --cluster: the folder of a launched run.")] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check all nodes of this Slurm allocation, or this one alone.")
    ] = False,
    profile: Annotated[str | None, typer.Option(help="With --cluster: what the nodes are, without a run.")] = None,
) -> None:
    """What works on this machine, what is missing, and the command that fixes it. With --cluster: what is checked
    before each attempt of a launched run, on every node.

    Example: ingot doctor

    Example: salloc -N 16 --exclusive ingot doctor --cluster runs/mpt-30b
    """
    if run is not None and profile is not None:
        raise ConfigError("a launched run has its own profile; leave out --profile or the run folder")
    if (run is not None or profile is not None) and not cluster:
        raise ConfigError("a run folder or a profile is for `ingot doctor --cluster`")
    if cluster:
        from ingot.launch.preflight.doctor import check_nodes

        raise typer.Exit(check_nodes(run, profile))
    from ingot.report.environment_check import examine

    findings = examine()
    for finding in findings:
        fix = f"  ->  {finding.fix}" if finding.fix and finding.state != "ok" else ""
        print(f"{finding.state:>4}  {finding.what:<18} {finding.detail}{fix}")
    raise typer.Exit(1 if any(f.state == "fail" for f in findings) else 0)
