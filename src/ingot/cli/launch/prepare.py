"""`ingot launch slurm prepare`: its own options are those of the cluster; all others are `ingot prepare`'s."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.launch.common import PANELS, SLURM_PREPARE, DryRun, print_notes
from ingot.cli.launch.slurm import submit
from ingot.cli.options import options_from
from ingot.cli.prepare import read_arguments
from ingot.data.sources.input_files import find_files
from ingot.launch.build_spec import preparation_spec
from ingot.launch.spec import LaunchSpec

app = typer.Typer(add_completion=False)


class ForwardingCommand(OptionCommand):
    """Passes options that it does not know on as arguments."""

    ignore_unknown_options = True


@app.command("slurm prepare", cls=ForwardingCommand)
@options_from(LaunchSpec, fields=SLURM_PREPARE, panels=PANELS)
def slurm_prepare(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="PREPARE_OPTIONS...", help="See `ingot prepare`.")
    ] = None,
    dry_run: DryRun = False,
    **options: Any,
) -> None:
    """Prepare data on many nodes of a Slurm cluster.

    An array of NODES jobs shares the work, and one more job combines the
    parts. All other options are those of `ingot prepare`, and the output is
    byte-identical. After a killed job, the same command continues.

    Examples:
      ingot launch slurm prepare --path '/fsx/c4/*.json.gz' -N 16 \\
        --out_root /fsx/c4-tokens --tokenizer EleutherAI/gpt-neox-20b
      ingot launch slurm prepare --path /fsx/books --out_root /fsx/tokens \\
        --tokenizer /fsx/tokenizer -N 4 -p cpu --time 4:00:00
    """
    arguments = arguments or []
    request = read_arguments(arguments)
    first, dataset = request.splits[0], request.peer.dataset
    skipped: list[str] = []
    if not dataset:
        find_files(first.input, skipped.append)  # report missing files here, not in a job
    prefix, splits = first.output_prefix, "-".join(split.split for split in request.splits)
    label = re.sub(r"[^A-Za-z0-9_.-]", "-", Path(prefix).name if prefix else splits)
    spec, notes = preparation_spec(arguments, first.folder, label, options)
    if dataset:
        notes.append(f"each job reads all of {dataset} from the hub and tokenizes its share")
    print_notes([*notes, *skipped])
    submit(spec, dry_run)
