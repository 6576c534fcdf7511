"""`ingot config`"""

import json
from typing import Annotated

import typer

from ingot.config.load import load_config, to_yaml
from ingot.train.config import RunConfig

config_app = typer.Typer(help="Look at configs.", no_args_is_help=True)


@config_app.command("schema")
def schema() -> None:
    """The JSON Schema of a run config, for editors to complete from.

    Example: ingot config schema > ingot.schema.json
    """
    print(json.dumps(RunConfig.model_json_schema(), indent=2))


@config_app.command("show")
def show(
    arguments: Annotated[list[str], typer.Argument(metavar="RECIPE_OR_FILES [KEY=VALUE]...", help="As for train.")],
) -> None:
    """Check a config and print it with every default filled in.

    Example: ingot config show mpt-125m model.d_model=512
    """
    print(to_yaml(load_config(RunConfig, arguments)), end="")
