"""`ingot launch slurm prepare`: its own options are those of the cluster; all others are `ingot prepare`'s."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import typer

from ingot.cli.launch.slurm import (
    FIELDS,
    Account,
    Constraint,
    Cpus,
    DryRun,
    Env,
    Exclude,
    Image,
    Mounts,
    Name,
    Nodes,
    Partition,
    Preflight,
    ProfileName,
    Qos,
    Reservation,
    Secret,
    SignalSeconds,
    Stage,
    Time,
    common_options,
    hand_over,
)
from ingot.cli.prepare import read_arguments


@cache
def command() -> Any:
    """The command, whose rest is not looked at until it has run."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(slurm_prepare)
    return typer.main.get_command(app)


def slurm_prepare(
    context: typer.Context,
    nodes: Nodes = None,
    cpus_per_task: Cpus = None,
    image: Image = None,
    stage: Stage = None,
    mounts: Mounts = None,
    profile: ProfileName = None,
    name: Name = None,
    time: Time = None,
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    constraint: Constraint = None,
    exclude: Exclude = None,
    reservation: Reservation = None,
    signal_seconds: SignalSeconds = None,
    preflight: Preflight = None,
    env: Env = None,
    secret: Secret = None,
    dry_run: DryRun = False,
) -> None:
    """Divide a preparation over NODES jobs of a Slurm array; a last job, once all are done, puts it together.

    All other options are those of `ingot prepare`, and so is the result, to the byte. A job that was killed goes on
    where it was when the same command is given again.

    Example: ingot launch slurm prepare --path '/fsx/c4/*.json.gz' --out_root /fsx/c4-tokens
    --tokenizer EleutherAI/gpt-neox-20b -N 16 -p cpu --time 4:00:00
    """
    from ingot.data.prepare.input_files import find_files
    from ingot.launch.build_spec import place_preparation

    given = {key: value for key, value in locals().items() if key in FIELDS}
    request = read_arguments(list(context.args))
    options, dataset = request.splits[0], request.peer.dataset
    skipped: list[str] = []
    if not dataset:
        find_files(options.input, skipped.append)  # what is not there should be said here, not in a job
    prefix, splits = options.output_prefix, "-".join(split.split for split in request.splits)
    label = re.sub(r"[^A-Za-z0-9_.-]", "-", Path(prefix).name if prefix else splits)
    launch = common_options({"mounts": None, **given})
    spec, notes = place_preparation(list(context.args), options.folder, label, launch)
    notes += skipped
    if dataset:
        notes.append(f"each job reads all of {dataset} from the hub, and tokenizes its share of it")
    hand_over(spec, notes, dry_run)
