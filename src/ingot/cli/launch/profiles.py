"""`ingot launch profiles`"""

import json
from typing import Annotated

import typer

from ingot.cli.commands import AsJson, OptionCommand
from ingot.errors import ConfigError
from ingot.launch.profiles import find_profile, profile_names

app = typer.Typer(add_completion=False)


@app.command("profiles", cls=OptionCommand)
def profiles(
    action: Annotated[str, typer.Argument(help="list, or show.")] = "list",
    name: Annotated[str | None, typer.Argument(help="Profile to show.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the cluster profiles, or show what one sets and why.

    Examples:
      ingot launch profiles
      ingot launch profiles show azure-ndv5
    """
    if as_json and (action == "list" or name is not None):
        names = profile_names() if action == "list" else [str(name)]
        print(json.dumps([{"name": each, **find_profile(each).model_dump(mode="json")} for each in names], indent=1))
    elif action == "list":
        for each in profile_names():
            print(f"{each:12} {find_profile(each).description}")
    elif action == "show" and name is not None:
        profile = find_profile(name)
        print(f"{profile.description}; {profile.gpus_per_node} GPUs per node, transport {profile.transport}")
        for variable, content in profile.env.items():
            print(f"{variable}={content.value}\n    {content.reason}")
    else:
        raise ConfigError("write `ingot launch profiles` or `ingot launch profiles show NAME`")
