"""`ingot recipes`"""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ingot.cli.commands import AsJson, OptionCommand, OptionGroup
from ingot.config.durations import Duration
from ingot.config.load import load_config
from ingot.config.recipes import find_recipe, recipe_names
from ingot.config.run import RunConfig

app = typer.Typer(add_completion=False, cls=OptionGroup, invoke_without_command=True)


@app.callback()
def default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        show_list(as_json=False)


@app.command("list", cls=OptionCommand)
def show_list(as_json: AsJson = False) -> None:
    """List all recipes with size and training budget.

    Examples:
      ingot recipes
      ingot recipes list --json
    """
    configs = {name: load_config(RunConfig, [name]) for name in recipe_names()}
    if as_json:
        print(json.dumps([_facts(name, config) for name, config in configs.items()], indent=1))
        return
    columns = ("recipe", "size", "layers", "width", "heads", "length", "batch", "peak lr", "duration")
    table = Table(*columns, box=None, pad_edge=False)
    for name, config in configs.items():
        model = config.model
        table.add_row(
            name, _short(model.parameters), str(model.n_layers), str(model.d_model), str(model.n_heads),
            str(config.max_seq_len), str(config.global_train_batch_size), f"{config.optimizer.lr:g}",
            _budget(config.max_duration),
        )  # fmt: skip
    Console().print(table)
    print("\nsize in parameters, length in tokens, batch in sequences")


@app.command("show", cls=OptionCommand)
def show(name: Annotated[str, typer.Argument(help="Recipe name.")]) -> None:
    """Print a recipe, as a start for your own config file.

    Examples:
      ingot recipes show mpt-125m
      ingot recipes show pythia-1b > mine.yaml
    """
    print(find_recipe(name).read_text(encoding="utf-8"), end="")


def _facts(name: str, config: RunConfig) -> dict[str, Any]:
    model = config.model
    return {
        "recipe": name, "parameters": model.parameters, "layers": model.n_layers, "width": model.d_model,
        "heads": model.n_heads, "max_seq_len": config.max_seq_len,
        "global_train_batch_size": config.global_train_batch_size, "learning_rate": config.optimizer.lr,
        "max_duration": str(config.max_duration),
    }  # fmt: skip


def _budget(duration: Duration) -> str:
    return f"{_short(duration.value)}tok" if duration.unit == "tok" else str(duration)


def _short(number: float) -> str:
    """Four digits at most, such as 125.3M."""
    for suffix in ("", "K", "M", "B", "T"):
        if number < 1000 or suffix == "T":
            break
        number /= 1000
    return f"{number:.4g}{suffix}"
