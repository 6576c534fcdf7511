"""`ingot export`"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand

app = typer.Typer(add_completion=False)


class ExportTarget(StrEnum):
    hf = "hf"


class Dtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@app.command(cls=OptionCommand)
def export(
    run: Annotated[Path, typer.Argument(help="Run folder or checkpoint.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    to: Annotated[
        ExportTarget, typer.Option("--to", help="hf: a folder that transformers loads without remote code.")
    ] = ExportTarget.hf,
    dtype: Annotated[Dtype | None, typer.Option(help="Convert weights. Default: as stored.")] = None,
    max_shard_gb: Annotated[float, typer.Option(min=0.001, help="Largest safetensors file, in GB.")] = 5.0,
) -> None:
    """Convert a checkpoint to a format that other libraries read.

    Examples:
      ingot export runs/first --to hf ./my-model
      ingot export runs/first/checkpoints/1000 ./my-model --dtype bf16
    """
    from ingot.checkpoint.hf.transfer import export_run  # loads torch

    name = export_run(run, out, dtype.value if dtype else None, int(max_shard_gb * 1e9))
    print(f"wrote {out}: {name}; load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")
