"""`ingot checkpoint`: what a run has saved, locally or at a URL."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ingot.checkpoint.location import CheckpointLocation, find_checkpoints, find_incomplete
from ingot.checkpoint.manifest import CHECKPOINTS, ITEM_BYTES, MANIFEST, MODEL, Manifest, verify
from ingot.cli.commands import AsJson, OptionCommand, OptionGroup, OutOption, output
from ingot.errors import CheckpointError, disk_error
from ingot.migrate import load_run_config
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import StepShape, estimate_memory
from ingot.plurals import count_of
from ingot.storage.byte_sizes import format_bytes
from ingot.storage.object_store import is_url

app = typer.Typer(add_completion=False, cls=OptionGroup, no_args_is_help=True)
Where = Annotated[str, typer.Argument(metavar="RUN_OR_URL", help="Run folder, checkpoint, or the URL of either.")]
Step = Annotated[int | None, typer.Option(help="Step of the checkpoint. Default: the newest.")]


@app.command("list", cls=OptionCommand)
def show_list(where: Where, as_json: AsJson = False) -> None:
    """List all checkpoints of a run.

    Examples:
      ingot checkpoint list runs/first
      ingot checkpoint list s3://bucket/first --json
    """
    found = [(location, location.manifest()) for location in _locations(where)]
    if as_json:
        _print_json([_facts(location, manifest) for location, manifest in found])
        return
    rows = []
    for location, manifest in found:
        held = "weights and training state" if manifest.has_training_state else "weights"
        progress, files = manifest.state.get("progress", {}), f"{len(manifest.files)}"
        rows.append([str(manifest.step), _tokens(progress), format_bytes(manifest.bytes), files, held, str(location)])
    _print(["step", "tokens", "size", "files", "holds", "where"], rows)


@app.command("verify", cls=OptionCommand)
def verify_all(where: Where, as_json: AsJson = False) -> None:
    """Check the size and hash of every file of every checkpoint.

    The exit code is 2 if one is damaged or has no manifest.

    Examples:
      ingot checkpoint verify runs/first
      ingot checkpoint verify s3://bucket/first
    """
    locations, problems, rows = _locations(where), [], []

    def report(location: CheckpointLocation, line: str, problem: str = "") -> None:
        rows.append({"where": str(location), "intact": not problem, "problem": problem})
        if problem:
            problems.append(problem)
        if not as_json:
            print(f"{location}: {line}")

    for location in find_incomplete(where):
        missing = "it has no manifest.json"
        line = f"INCOMPLETE: {missing}, which was deleted or not yet uploaded"
        report(location, line, f"{location} is incomplete: {missing}")
    for location in locations:
        try:
            manifest = location.manifest()
            for name, file in manifest.files.items():
                location.check(name, file)
            files = count_of(len(manifest.files), "file")
            report(location, f"{files}, {format_bytes(manifest.bytes)}, all intact")
        except CheckpointError as error:
            report(location, f"DAMAGED: {error}", str(error))
    if as_json:
        _print_json(rows)
    if problems:
        raise CheckpointError(f"{len(problems)} damaged or incomplete: {problems[0]}")


@app.command("show", cls=OptionCommand)
def show(
    where: Where,
    step: Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor with type, shape and parts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is in a checkpoint.

    Examples:
      ingot checkpoint show runs/first
      ingot checkpoint show runs/first --step 1000 --tensors
    """
    location = _pick(where, step)
    manifest = location.manifest()
    config, state = manifest.state.get("config", {}), manifest.state
    model = config.get("model", {})
    parameters = sum(math.prod(entry.shape) for entry in manifest.tensors.get("model", {}).values())
    if as_json:
        _print_json({
            **_facts(location, manifest), "run": config.get("name"), "parameters": parameters, "model": model,
            "versions": state.get("versions", {}), "processes": manifest.parts,
            "file_hashes": {name: {"bytes": file.bytes, "xxh3": file.xxh3} for name, file in manifest.files.items()},
            "tensors": {f"{kind}/{name}": {"type": entry.dtype, "shape": list(entry.shape)}
                        for kind, entries in manifest.tensors.items() for name, entry in entries.items()},
        })  # fmt: skip
        return
    facts = {
        "where": location,
        "step": manifest.step,
        "tokens": _tokens(state.get("progress", {})),
        "size": f"{format_bytes(manifest.bytes)} in {count_of(len(manifest.files), 'file')}, written by "
        f"{count_of(manifest.parts, 'process', 'es')}",
        "run": config.get("name", "?"),
        "model": f"{model.get('family', '?')}, {parameters:,} parameters",
        "optimizer": config.get("optimizer", {}).get("name", "?") if manifest.has_training_state else "not saved",
        "versions": ", ".join(f"{name} {version}" for name, version in state.get("versions", {}).items()),
    }
    for name, value in facts.items():
        print(f"{name:<10} {value}")
    _print(["file", "size", "xxh3"], [[n, format_bytes(f.bytes), f.xxh3] for n, f in manifest.files.items()])
    if tensors:
        rows = [
            [kind, name, entry.dtype, "x".join(map(str, entry.shape)),
             format_bytes(math.prod(entry.shape) * ITEM_BYTES[entry.dtype]), str(entry.count())]
            for kind, entries in manifest.tensors.items() for name, entry in entries.items()
        ]  # fmt: skip
        _print(["kind", "tensor", "type", "shape", "size", "parts"], rows)


@app.command("size", cls=OptionCommand)
def size(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE_OR_FILE...", help="Recipes or config files.")],
    as_json: AsJson = False,
) -> None:
    """Estimate the size of checkpoints before training.

    Examples:
      ingot checkpoint size mpt-30b mpt-70b
      ingot checkpoint size my-run.yaml
    """
    needed = {}
    for recipe in recipes:
        config = load_run_config([recipe])
        needed[recipe] = estimate_memory(config.model, Layout(), config.parallel, StepShape.of(config))
    if as_json:
        _print_json([
            {"recipe": recipe, "parameters": round(needs.weights / 4), "weights_bytes": round(needs.weights),
             "training_state_bytes": round(needs.saved)} for recipe, needs in needed.items()
        ])  # fmt: skip
        return
    rows = []
    for recipe, needs in needed.items():
        sizes = [f"{count / 2**30:,.1f} GiB" for count in (needs.weights, needs.saved)]
        rows.append([recipe, f"{needs.weights / 4:,.0f}", *sizes])
    _print(["recipe", "parameters", "weights only", "with training state"], rows)


@app.command("copy", cls=OptionCommand)
def copy(
    where: Where,
    to: Annotated[str | None, typer.Argument(help="Run folder or URL to copy to.")] = None,
    out_option: Annotated[str | None, typer.Option("-o", "--out", help="Another way to give it.")] = None,
    step: Step = None,
) -> None:
    """Verify a checkpoint and copy it with the run's config and tokenizer.

    Examples:
      ingot checkpoint copy runs/first s3://bucket/first
      ingot checkpoint copy s3://bucket/first runs/second --step 1000
    """
    from ingot.checkpoint.remote_copy import copy_checkpoint  # loads torch

    print(f"copied {copy_checkpoint(_pick(where, step), output(to, out_option))}")


@app.command("consolidate", cls=OptionCommand)
def consolidate(
    run: Annotated[Path, typer.Argument(help="Run folder or checkpoint.")],
    out: Annotated[Path | None, typer.Argument(help="New run folder.")] = None,
    out_option: OutOption = None,
    step: Step = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Skip the training state.")] = False,
) -> None:
    """Merge the files of many ranks into one of each kind.

    Writes one file of weights and one of training state.

    Examples:
      ingot checkpoint consolidate runs/first -o runs/first-whole
      ingot checkpoint consolidate runs/first out --step 1000 --weights-only
    """
    from ingot.checkpoint.store import consolidate as write  # loads torch

    out = output(out, out_option)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} already exists and is not empty; choose another folder")
    manifest = _pick(str(run), step).manifest()
    verify(manifest)
    try:
        print(f"wrote {write(manifest, out, [MODEL] if weights_only else list(manifest.tensors))}")
    except OSError as error:
        raise disk_error("write", out, error) from None


def _locations(where: str) -> list[CheckpointLocation]:
    if not is_url(where) and not Path(where).exists():
        raise CheckpointError(f"no such run or checkpoint: {where}")
    if not (locations := find_checkpoints(where)):
        if incomplete := find_incomplete(where):
            named = ", ".join(map(str, incomplete))
            raise CheckpointError(f"{where} holds no complete checkpoint: there is no {MANIFEST} in {named}")
        raise CheckpointError(f"{where} holds no checkpoint: neither {MANIFEST} nor {CHECKPOINTS}/STEP/{MANIFEST}")
    return locations


def _pick(where: str, step: int | None) -> CheckpointLocation:
    locations = _locations(where)
    chosen = [found for found in locations if step is None or (found.prefix and found.step == step)]
    if not chosen:
        raise CheckpointError(f"{where} has no checkpoint of step {step}; it has {', '.join(map(str, locations))}")
    return chosen[-1]


def _print(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table: aligned on a terminal, otherwise tab-separated, one line per row."""
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            print("\t".join(row))
        return
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")  # a narrow terminal cuts nothing off
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _facts(location: CheckpointLocation, manifest: Manifest) -> dict[str, Any]:
    """A row of a listing, for programs."""
    progress = manifest.state.get("progress", {})
    return {
        "step": manifest.step, "tokens": progress.get("time/token"), "bytes": manifest.bytes,
        "files": len(manifest.files), "training_state": manifest.has_training_state, "where": str(location),
    }  # fmt: skip


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _tokens(progress: dict[str, Any]) -> str:
    return f"{progress['time/token']:,}" if "time/token" in progress else "-"
