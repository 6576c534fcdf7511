"""`ingot import`"""

from pathlib import Path
from typing import Annotated

import typer


def import_(
    source: Annotated[
        Path, typer.Argument(help="A Hugging Face, GPT-NeoX or Megatron folder, or a Composer .pt file.")
    ],
    out: Annotated[Path, typer.Argument(help="New run folder.")],
    config: Annotated[
        str | None, typer.Option(help="The model's YAML or script, or a recipe, where the checkpoint lacks it.")
    ] = None,
) -> None:
    """Turn a checkpoint of another stack into a run folder, to generate from, evaluate, export or train on.

    Example: ingot import ./pythia-160m runs/pythia
    """
    from ingot.migrate.checkpoints.import_checkpoint import import_checkpoint

    import_checkpoint(source, out, config)
    print(f"wrote {out}; train on from it with: ingot train {out}/config.yaml data=... load_path={out} save_folder=...")
