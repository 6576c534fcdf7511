"""`ingot export`"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ingot.checkpoint.location import model_folder
from ingot.cli.commands import OptionCommand, OutOption, output

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
    out: Annotated[Path | None, typer.Argument(help="New folder.")] = None,
    out_option: OutOption = None,
    to: Annotated[
        ExportTarget, typer.Option("--to", help="hf: a folder that transformers loads without remote code.")
    ] = ExportTarget.hf,
    dtype: Annotated[Dtype | None, typer.Option(help="Convert weights. Default: as stored.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint. Default: the newest.")] = None,
    max_shard_gb: Annotated[float, typer.Option(min=0.001, help="Largest safetensors file, in GB.")] = 5.0,
) -> None:
    """Convert a checkpoint to a format that other libraries read.

    Examples:
      ingot export runs/first -o my-model
      ingot export runs/first --to hf my-model --step 1000 --dtype bf16
    """
    out, folder = output(out, out_option), model_folder(run, step)
    from ingot.checkpoint.hf.transfer import export_run  # loads torch

    name = export_run(folder, out, dtype.value if dtype else None, int(max_shard_gb * 1e9))
    print(f"wrote {out}: {name}; load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")
