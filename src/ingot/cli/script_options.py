"""Options for shell scripts of other stacks, wherever a config is accepted."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ingot.config.base import Section
from ingot.migrate.shell.source import option_arguments

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
