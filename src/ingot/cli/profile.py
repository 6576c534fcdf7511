"""`ingot profile`"""

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml

from ingot.cli.commands import OptionCommand
from ingot.cli.options import options_from
from ingot.cli.script_options import PANELS, RunArguments, ScriptSettings, script_arguments
from ingot.cli.train import start
from ingot.config.durations import StepRange
from ingot.config.load import to_yaml, validate
from ingot.config.recipes import check_recipe
from ingot.config.run import RunConfig
from ingot.data.formats.indexed_writer import default_dtype, write_idx
from ingot.errors import ConfigError, disk_error
from ingot.launch.agent.rank_main import prepare_torch
from ingot.migrate import load_run_config
from ingot.storage.atomic import whole_file, write_whole
from ingot.training.runtime.run_files import CONFIG

FILE, RANDOM_DATA = "profiled.yaml", "random-data"  # in the run folder
STEPS = "6-8"  # compilation and the choice of CUDA graphs are over by then
app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
@options_from(ScriptSettings, panels=PANELS)
def profile(
    arguments: RunArguments,
    steps: Annotated[
        str | None, typer.Option(help=f"Steps to profile, after some to warm up. Default: {STEPS}.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for the result. Default: runs/NAME-profile.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", help="Processes on this machine. Default: one per GPU.")
    ] = None,
    dialect: Annotated[
        str | None, typer.Option(help="Format of the config files: foundry, neox or megatron. Default: detected.")
    ] = None,
    **options: Any,
) -> None:
    """Show where the time of a training step goes, from a few steps.

    Trains as `ingot train` would, to the end of the profiled steps; saves
    no checkpoint and reports to no tracker. Prints a table by category and
    leaves a trace for ui.perfetto.dev. Without data it trains on random
    tokens. Cluster profiles are something else: `ingot launch profiles`.

    Examples:
      ingot profile mpt-125m
      ingot profile mpt-1b data=./my-data --nproc 8 parallel.tensor=2
    """
    prepare_torch()
    check_recipe(arguments)
    config = load_run_config([*arguments, *script_arguments(options)], dialect)
    folder = out or Path(f"{config.run_folder.rstrip('/')}-profile")
    chosen = _steps(steps) if steps is not None else config.profiler.steps or _steps(STEPS)
    _check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = _profiled(config, folder, chosen)
    except OSError as error:
        raise disk_error("write", folder, error) from None
    write_whole(folder / FILE, to_yaml(config, "# What `ingot profile` runs.\n"))
    sys.exit(start(config, ["train", "--fresh", "--", str(folder / FILE)], fresh=True, nproc=nproc))


def _steps(text: str) -> StepRange:
    try:
        return StepRange.parse(text)
    except ValueError as error:
        raise ConfigError(f"--steps: {error}") from None


def _check_free(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier profile: the run starts over in it."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        if yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))["profiler"]["end_run"] is True:
            return
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        pass
    if not (folder / FILE).is_file() or (folder / CONFIG).exists():
        raise ConfigError(f"{folder} is not empty and not of `ingot profile`; choose another folder with -o")


def _profiled(config: RunConfig, folder: Path, steps: StepRange) -> RunConfig:
    """The config of a run that ends after the profiled steps and leaves nothing else."""
    values = config.model_dump(mode="json")
    if config.data is None:
        values["data"] = {"train": {"path": str(_write_random_data(config, folder))}}
        values["tokenizer"] = None
    values["data"]["eval"] = None
    values |= {
        "save_folder": str(folder), "save_interval": "0ba", "remote_save_folder": None, "load_path": None, "eval": {},
        "eval_first": False, "loggers": {}, "max_duration": f"{steps.last + 1}ba", "max_wall_time": None,
        "profiler": values["profiler"] | {"steps": str(steps), "end_run": True},
    }  # fmt: skip
    return validate(RunConfig, values)


def _write_random_data(config: RunConfig, folder: Path) -> Path:
    """One batch of random tokens, which is trained on again and again."""
    path = folder / RANDOM_DATA
    count = config.global_train_batch_size * config.max_seq_len + 1
    dtype = np.dtype(default_dtype(config.model.vocab_size))
    tokens = np.random.default_rng(config.seed).integers(0, config.model.vocab_size, count, dtype=dtype)
    with whole_file(path.with_suffix(".bin")) as file:
        file.write(tokens.data)
    lengths = path.with_suffix(".lengths")
    np.array([count], dtype="<i4").tofile(lengths)
    write_idx(path.with_suffix(".idx"), dtype, [lengths])
    lengths.unlink()
    return path
