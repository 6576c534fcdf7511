"""`ingot config`"""

import json
from typing import Annotated

import typer
import yaml

from ingot.cli.commands import OptionCommand, OptionGroup
from ingot.config.error_messages import Origins
from ingot.config.load import to_yaml, validate
from ingot.config.run import RunConfig
from ingot.migrate import load_run_config, translate

app = typer.Typer(add_completion=False, cls=OptionGroup, no_args_is_help=True)


@app.command("schema", cls=OptionCommand)
def schema() -> None:
    """Print the JSON Schema of a run config, for editors.

    Examples:
      ingot config schema
      ingot config schema > ingot.schema.json
    """
    print(json.dumps(RunConfig.model_json_schema(), indent=2))


@app.command("show", cls=OptionCommand)
def show(
    arguments: Annotated[list[str], typer.Argument(metavar="RECIPE_OR_FILES [KEY=VALUE]...", help="As for train.")],
) -> None:
    """Check a config and print it with every default filled in.

    Examples:
      ingot config show mpt-125m model.n_layers=6
      ingot config show my-run.yaml optimizer.lr=1e-4
    """
    print(to_yaml(load_run_config(arguments)), end="")


@app.command("convert", cls=OptionCommand)
def convert(
    arguments: Annotated[
        list[str], typer.Argument(metavar="FILES [KEY=VALUE]...", help="Files of another stack, overrides in its keys.")
    ],
    dialect: Annotated[
        str | None, typer.Option(help="foundry, neox or megatron. Default: detected from the keys.")
    ] = None,
) -> None:
    """Convert another stack's config to a native one.

    Ends with what became of each of its keys.

    Examples:
      ingot config convert mpt-125m.yaml max_duration=100ba > mine.yaml
      ingot config convert 1-4B.yml local_setup.yml --dialect neox > 1-4B.yaml
    """
    translation = translate(arguments, dialect)
    values = {key: translation.values[key] for key in RunConfig.model_fields if key in translation.values}
    print(yaml.safe_dump(values, sort_keys=False), end="")
    print(f"\n# What became of each key of {translation.dialect.title}:")
    print("\n".join(translation.comments()))
    translation.check()
    validate(RunConfig, translation.values, Origins(translation.origins))
