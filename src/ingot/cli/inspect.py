"""`ingot inspect`: what is in a dataset."""

import json
from typing import Annotated, Any

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.options import options_from
from ingot.data.loading.inspect import InspectOptions, inspect_as_json, inspect_dataset

app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
@options_from(InspectOptions)
def inspect(
    path: Annotated[str, typer.Argument(help="Folder, prefix of .bin/.idx, or URL of a dataset.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with an object for each split.")] = False,
    **options: Any,
) -> None:
    """Describe and verify a dataset.

    Prints counts and the tokenizer, and checks sizes and hashes; on request
    also shows samples and reads batches as training does.

    Examples:
      ingot inspect my-data
      ingot inspect s3://bucket/c4 --split val --text --loader
    """
    if as_json:
        print(json.dumps(inspect_as_json(path, options)))
        return
    for line in inspect_dataset(path, options):
        print(line)
