"""`ingot inspect`: what is in a dataset."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options import options_from

if TYPE_CHECKING:
    from ingot.data.loading.inspect import InspectOptions


def _load_options() -> "type[InspectOptions]":
    from ingot.data.loading.inspect import InspectOptions

    return InspectOptions


@options_from(_load_options)
def inspect(
    path: Annotated[str, typer.Argument(help="Folder, prefix of .bin/.idx, or URL of a dataset.")], **options: Any
) -> None:
    """What is in a dataset: counts, sizes and hashes verified, tokenizer, samples, a loader test.

    Example: ingot inspect my-data --split train --text --loader
    """
    from ingot.data.loading.inspect import inspect_dataset

    for line in inspect_dataset(path, options):
        print(line)
