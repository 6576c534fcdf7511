"""`ingot export`"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ExportTarget(StrEnum):
    hf = "hf"


class Dtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def export(
    run: Annotated[Path, typer.Argument(help="Run folder or checkpoint.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    to: Annotated[
        ExportTarget, typer.Option("--to", help="hf: a folder that transformers loads without remote code.")
    ] = ExportTarget.hf,
    dtype: Annotated[Dtype | None, typer.Option(help="Convert weights. Default: as stored.")] = None,
    max_shard_gb: Annotated[float, typer.Option(min=0.001, help="Largest safetensors file.")] = 5.0,
) -> None:
    """Export a model in a format that other libraries read.

    Example: ingot export runs/first --to hf ./my-model
    """
    from ingot.checkpoint.hf.transfer import export_run

    name = export_run(run, out, dtype.value if dtype else None, int(max_shard_gb * 1e9))
    print(f"wrote {out}: {name}; load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")
