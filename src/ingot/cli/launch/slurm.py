"""`ingot launch slurm`"""

from typing import TYPE_CHECKING, Any

from ingot.cli.launch.common import SLURM, Arguments, Config, Dialect, DryRun, Updates, load_spec, training_spec
from ingot.cli.options import SectionCommand, options_from

if TYPE_CHECKING:
    from ingot.launch.spec import LaunchSpec


class SlurmCommand(SectionCommand):
    """`ingot launch slurm`, and `ingot launch slurm prepare`, which has the options of `ingot prepare`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args[:1] != ["prepare"]:
            return super().make_context(info_name, args, parent, **extra)
        from ingot.cli.launch.prepare import slurm_prepare

        command = slurm_prepare.build_command()  # type: ignore[attr-defined]  # set by options_from
        return command.make_context("slurm prepare", args[1:], parent, **extra)


@options_from(load_spec, fields=SLURM)
def slurm(
    arguments: Arguments = None,
    config: Config = None,
    updates: Updates = None,
    dialect: Dialect = None,
    dry_run: DryRun = False,
    **options: Any,
) -> None:
    """Submit a run to Slurm. The job saves before its time limit, and continues after faults.

    Example: ingot launch slurm mpt-30b data=/fsx/c4 save_folder=/fsx/runs/30b -N 16 -p gpu -i /apps/ingot.sqsh
    --mounts /fsx:/fsx --profile azure-ndv5 --time 24:00:00 --chain 5

    `ingot launch slurm prepare --help`: prepare data on many nodes.
    """
    submit(training_spec(arguments, config, updates, dialect, options), dry_run)


def submit(spec: "LaunchSpec", dry_run: bool) -> None:
    """Submit a run, or print its script and spec."""
    from ingot.launch.slurm.script import render_scripts
    from ingot.launch.submit import submit_to_slurm

    if dry_run:
        print(
            "\n".join(render_scripts(spec).values()) + f"\n# {spec.folder}/spec.json\n" + spec.model_dump_json(indent=1)
        )
        return
    job = submit_to_slurm(spec)
    print(f"job {job}; follow it with `ingot status {spec.run_folder}` and `ingot logs -f {spec.run_folder}`")
