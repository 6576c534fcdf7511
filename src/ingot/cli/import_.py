"""`ingot import`"""

from pathlib import Path
from typing import Annotated

import typer


def import_(
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder with safetensors.")],
    out: Annotated[Path, typer.Argument(help="New run folder.")],
) -> None:
    """Turn a Hugging Face folder into a run folder, to generate from, evaluate, export or train on.

    Example: ingot import ./pythia-160m runs/pythia
    """
    from ingot.checkpoint.transfer import import_hf

    import_hf(folder, out)
    print(f"wrote {out}; train on from it with: ingot train {out}/config.yaml data=... load_path={out} save_folder=...")
