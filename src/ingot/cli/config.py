"""`ingot config`"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ingot.cli.commands import AsJson, OptionCommand, OptionGroup
from ingot.cli.config_keys import print_keys
from ingot.cli.options import options_from
from ingot.cli.script_options import PANELS, RunArguments, ScriptSettings, script_arguments
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


@app.command("keys", cls=OptionCommand)
def keys(
    section: Annotated[str, typer.Argument(help="Section such as optimizer, or a key. Default: all keys.")] = "",
    as_json: AsJson = False,
) -> None:
    """List config keys with their defaults and meanings.

    Examples:
      ingot config keys
      ingot config keys optimizer
      ingot config keys data.train --json
    """
    print_keys(section, as_json)


@app.command("show", cls=OptionCommand)
@options_from(ScriptSettings, panels=PANELS)
def show(
    arguments: RunArguments,
    **options: Any,
) -> None:
    """Check a config and print it with every default filled in.

    Examples:
      ingot config show mpt-125m model.n_layers=6
      ingot config show my-run.yaml optimizer.lr=1e-4
    """
    print(to_yaml(load_run_config([*arguments, *script_arguments(options)])), end="")


@app.command("convert", cls=OptionCommand)
@options_from(ScriptSettings, panels=PANELS)
def convert(
    arguments: Annotated[
        list[str], typer.Argument(metavar="FILES [KEY=VALUE]...", help="Files of another stack, overrides in its keys.")
    ],
    dialect: Annotated[
        str | None, typer.Option(help="foundry, neox or megatron. Default: detected from the keys.")
    ] = None,
    peer_version: Annotated[
        str | None,
        typer.Option("--peer-version", help="Release that the files are for, such as core_v0.15. Default: the latest."),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--conf_dir", "-d", help="Folder of the files, as NeoX's -d.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write what became of each key to this file, as a Markdown table.")
    ] = None,
    **scripts: Any,
) -> None:
    """Convert another stack's config to a native one.

    Ends with what became of each of its keys. A config that cannot be
    translated exactly is refused, and no recipe is printed. A script is read,
    never run: --set gives what it takes from its caller or environment.

    Examples:
      ingot config convert gpt3.sh --set NNODES=2 > gpt3.yaml
      ingot config convert mpt-125m.yaml max_duration=100ba > mine.yaml
      ingot config convert -d configs 1-4B local_setup train_batch_size=1024
    """
    options = {"peer_version": peer_version, "conf_dir": folder}
    translation = translate(
        [*arguments, *(f"{key}={value}" for key, value in options.items() if value), *script_arguments(scripts)],
        dialect,
    )
    if report is not None:
        report.write_text(translation.report(), encoding="utf-8")
    for warning in translation.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    translation.check()
    validate(RunConfig, translation.values, Origins(translation.origins))
    values = {key: translation.values[key] for key in RunConfig.model_fields if key in translation.values}
    print(yaml.safe_dump(values, sort_keys=False), end="")
    print(f"\n# What became of each key of {translation.dialect.title} (defaults: those of {translation.release}):")
    print("\n".join(translation.comments()))
