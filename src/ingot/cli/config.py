"""`ingot config`"""

import json
from typing import Annotated

import typer

config_app = typer.Typer(help="Look at configs.", no_args_is_help=True)


@config_app.command("schema")
def schema() -> None:
    """The JSON Schema of a run config, for editors to complete from.

    Example: ingot config schema > ingot.schema.json
    """
    from ingot.config.run import RunConfig

    print(json.dumps(RunConfig.model_json_schema(), indent=2))


@config_app.command("show")
def show(
    arguments: Annotated[list[str], typer.Argument(metavar="RECIPE_OR_FILES [KEY=VALUE]...", help="As for train.")],
) -> None:
    """Check a config and print it with every default filled in.

    Example: ingot config show mpt-125m model.n_layers=6
    """
    from ingot.config.load import to_yaml
    from ingot.migrate import load_run_config

    print(to_yaml(load_run_config(arguments)), end="")


@config_app.command("convert")
def convert(
    arguments: Annotated[
        list[str], typer.Argument(metavar="FILES [KEY=VALUE]...", help="Files of another stack, overrides in its keys.")
    ],
    dialect: Annotated[str | None, typer.Option(help="foundry, neox or megatron. Default: seen from the keys.")] = None,
) -> None:
    """Print another stack's run description as a native recipe, with what became of each of its keys.

    Example: ingot config convert configs/pythia/1-4B.yml configs/local_setup.yml > 1-4B.yaml
    """
    import yaml

    from ingot.config.error_messages import Origins
    from ingot.config.load import validate
    from ingot.config.run import RunConfig
    from ingot.migrate import translate

    translation = translate(arguments, dialect)
    values = {key: translation.values[key] for key in RunConfig.model_fields if key in translation.values}
    print(yaml.safe_dump(values, sort_keys=False), end="")
    print(f"\n# What became of each key of {translation.dialect.title}:")
    print("\n".join(translation.comments()))
    translation.check()
    validate(RunConfig, translation.values, Origins(translation.origins))
