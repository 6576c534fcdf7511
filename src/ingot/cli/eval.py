"""`ingot eval`"""

import json
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand

app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder, checkpoint or Hugging Face folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute loss, perplexity and bits per byte of a model.

    The data is the validation data of the run, unless overrides name other
    data.

    Examples:
      ingot eval runs/first
      ingot eval runs/first data.eval.path=./my-data data.eval.split=val
    """
    from ingot.evaluation.run import evaluate_run  # loads torch

    result, data = evaluate_run(run, overrides or [])
    if as_json:
        print(json.dumps(result.metrics()))
        return
    print(f"evaluated on {data}")
    for name, value in result.metrics().items():
        print(f"{name}: {value:.4f}")
