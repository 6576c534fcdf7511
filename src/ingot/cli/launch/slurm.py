"""`ingot launch slurm`"""

import shlex
from pathlib import Path
from typing import Any

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.launch.common import PANELS, SLURM, Arguments, DryRun, RunOptions, make_training_spec, print_notes
from ingot.cli.options import options_from
from ingot.launch.protocol import CLUSTER_AGENT, LaunchFolder
from ingot.launch.slurm.script import node_python, render_scripts, srun_options
from ingot.launch.spec import LaunchSpec
from ingot.launch.submit import submit_to_slurm
from ingot.launch.submit_checks import check_submission

app = typer.Typer(add_completion=False)


class SlurmCommand(OptionCommand):
    """`ingot launch slurm`, and `ingot launch slurm prepare`, which has the options of `ingot prepare`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args[:1] != ["prepare"]:
            return super().make_context(info_name, args, parent, **extra)
        from ingot.cli.launch.prepare import app

        return typer.main.get_command(app).make_context("slurm prepare", args[1:], parent, **extra)


@app.command("slurm", cls=SlurmCommand)
@options_from(RunOptions, LaunchSpec, fields={*RunOptions.model_fields, *SLURM}, panels=PANELS)
def slurm(arguments: Arguments = None, dry_run: DryRun = False, **options: Any) -> None:
    """Submit a run to Slurm.

    The job saves before its time limit, and continues after faults.
    `ingot launch slurm prepare --help`: prepare data on many nodes.

    Examples:
      ingot launch slurm mpt-125m data=/fsx/c4 -N 2 -p gpu --profile aws-p5
      ingot launch slurm mpt-30b data=/fsx/c4 save_folder=/fsx/runs/30b \\
        -N 16 -i /apps/ingot.sqsh -m /fsx:/fsx --time 24:00:00 --chain 5
    """
    submit(make_training_spec(arguments, options), dry_run)


def submit(spec: LaunchSpec, dry_run: bool) -> None:
    """Submit a run, or print its scripts and spec; refused if it cannot work."""
    print_notes(check_submission(spec))
    if dry_run:
        print(*render_scripts(spec).values(), sep="\n")
        agent = ["srun", *srun_options(spec), node_python(spec), "-m", CLUSTER_AGENT]
        print(f"# the supervisor starts on each node:\n# {shlex.join(agent)}\n")
        print(f"# {LaunchFolder(Path(spec.run_folder)).spec_file}\n{spec.model_dump_json(indent=1)}")
        return
    job = submit_to_slurm(spec)
    print(f"job {job}; follow it with `ingot status {spec.run_folder}` and `ingot logs -f {spec.run_folder}`")
