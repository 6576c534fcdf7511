"""`ingot train`"""

from typing import Annotated

import typer

from ingot.config.load import load_config
from ingot.train.config import RunConfig


def train(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RECIPE_OR_FILES [KEY=VALUE]...", help="Recipe, config files, overrides.")
    ],
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing the run.")] = False,
) -> None:
    """Train a model. The same command again continues an interrupted run.

    Example: ingot train mpt-125m data=./my-copy-c4 max_duration=4800ba save_folder=runs/first
    """
    config = load_config(RunConfig, arguments)
    from ingot.report.run import train as run

    result = run(config, fresh)
    print(f"run folder: {result.folder}")
