"""`ingot eval`"""

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder, checkpoint or Hugging Face folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Loss, perplexity and bits per byte of a model on its validation data.

    Example: ingot eval runs/first data.eval.path=./my-copy-c4 data.eval.split=val
    """
    from ingot.evaluation.run import evaluate_run

    result, data = evaluate_run(run, overrides or [])
    if as_json:
        print(json.dumps(result.metrics()))
        return
    print(f"evaluated on {data}")
    for name, value in result.metrics().items():
        print(f"{name}: {value:.4f}")
