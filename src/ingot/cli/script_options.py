"""Options for shell scripts of other stacks, wherever a config is accepted."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from pydantic import Field

from ingot.cli.config_keys import config_fields
from ingot.config.base import Section
from ingot.config.recipes import recipe_names
from ingot.migrate.shell.source import option_arguments


def complete_run(incomplete: str) -> list[str]:
    """Recipes and config keys for the shell; it completes file names by itself."""
    keys = ["data=", *(f"{key}=" for key, _, _ in config_fields())] if incomplete else []
    return [word for word in [*recipe_names(), *keys] if word.startswith(incomplete)]


RUN_ARGUMENTS = typer.Argument(
    metavar="RECIPE_OR_FILES [KEY=VALUE]...", help="Recipe, config files, overrides.", autocompletion=complete_run
)
RunArguments = Annotated[list[str], RUN_ARGUMENTS]
PANELS = {"Scripts of other stacks": ["supplied", "pick"]}


class ScriptSettings(Section):
    """What a script leaves open."""

    supplied: list[str] = Field([], json_schema_extra={"flags": ["--set"], "several": True})
    """NAME=VALUE of a variable that the script leaves open; repeatable."""
    pick: int | None = None
    """The line of the run, if the script starts several."""


def script_arguments(options: Mapping[str, Any]) -> list[str]:
    """The options that were given, as arguments."""
    return option_arguments(options.get("supplied"), options.get("pick"))
