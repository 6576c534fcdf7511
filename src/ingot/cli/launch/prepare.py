"""`ingot launch slurm prepare`: its own options are those of the cluster; all others are `ingot prepare`'s."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.cli.launch.common import SLURM_PREPARE, DryRun, load_spec, print_notes
from ingot.cli.launch.slurm import submit
from ingot.cli.options import OptionCommand, options_from
from ingot.cli.prepare import read_arguments


class ForwardingCommand(OptionCommand):
    """Passes options that it does not know on as arguments."""

    ignore_unknown_options = True


@options_from(load_spec, fields=SLURM_PREPARE, cls=ForwardingCommand)
def slurm_prepare(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="PREPARE_OPTIONS...", help="See `ingot prepare`.")
    ] = None,
    dry_run: DryRun = False,
    **options: Any,
) -> None:
    """Divide a preparation over NODES jobs of a Slurm array; one more job then assembles the result.

    All other options are those of `ingot prepare`, and the result is the same, to the byte. After a killed job, the
    same command continues where it stopped.

    Example: ingot launch slurm prepare --path '/fsx/c4/*.json.gz' --out_root /fsx/c4-tokens
    --tokenizer EleutherAI/gpt-neox-20b -N 16 -p cpu --time 4:00:00
    """
    from ingot.data.prepare.input_files import find_files
    from ingot.launch.build_spec import place_preparation

    arguments = arguments or []
    request = read_arguments(arguments)
    first, dataset = request.splits[0], request.peer.dataset
    skipped: list[str] = []
    if not dataset:
        find_files(first.input, skipped.append)  # report missing files here, not in a job
    prefix, splits = first.output_prefix, "-".join(split.split for split in request.splits)
    label = re.sub(r"[^A-Za-z0-9_.-]", "-", Path(prefix).name if prefix else splits)
    spec, notes = place_preparation(arguments, first.folder, label, options)
    if dataset:
        notes.append(f"each job reads all of {dataset} from the hub and tokenizes its share")
    print_notes([*notes, *skipped])
    submit(spec, dry_run)
