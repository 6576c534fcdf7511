"""`ingot recipes`"""

from typing import Annotated

import typer

recipes_app = typer.Typer(help="The recipes that ship with ingot.", invoke_without_command=True)


@recipes_app.callback()
def default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        show_list()


@recipes_app.command("list")
def show_list() -> None:
    """All recipes, with size and token budget."""
    from rich.console import Console
    from rich.table import Table

    from ingot.config.load import load_config
    from ingot.config.recipes import recipe_names
    from ingot.config.run import RunConfig

    table = Table(
        "recipe", "parameters", "layers", "width", "heads", "sequence", "batch", "peak lr", "duration", box=None
    )
    for name in recipe_names():
        config = load_config(RunConfig, [name])
        model = config.model
        table.add_row(
            name, f"{model.parameters:,}", str(model.n_layers), str(model.d_model), str(model.n_heads),
            str(config.max_seq_len), str(config.global_train_batch_size), f"{config.optimizer.lr:g}",
            str(config.max_duration),
        )  # fmt: skip
    console = Console()
    console.width = max(console.width, 110)  # a narrow terminal wraps lines rather than losing digits
    console.print(table)


@recipes_app.command("show")
def show(name: Annotated[str, typer.Argument(help="Recipe name.")]) -> None:
    """Print a recipe, to read or to start a file of your own from."""
    from ingot.config.recipes import find_recipe

    print(find_recipe(name).read_text(encoding="utf-8"), end="")
