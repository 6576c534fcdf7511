"""`ingot import`"""

from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand, OutOption, output

app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def import_(
    source: Annotated[
        Path, typer.Argument(help="A Hugging Face, GPT-NeoX or Megatron folder, or a Composer .pt file.")
    ],
    out: Annotated[Path | None, typer.Argument(help="New run folder.")] = None,
    out_option: OutOption = None,
    config: Annotated[
        str | None, typer.Option(help="The model's YAML or script, or a recipe, where the checkpoint lacks it.")
    ] = None,
) -> None:
    """Convert another stack's checkpoint to a run folder.

    Generate from the run folder, evaluate it, export it, or continue training.

    Examples:
      ingot import ./pythia-160m -o runs/pythia
      ingot import ./global_step1000 runs/neox --config 1-4B.yml
    """
    out = output(out, out_option)
    from ingot.migrate.checkpoints.import_checkpoint import import_checkpoint  # loads torch

    import_checkpoint(source, out, config)
    print(f"wrote {out}; continue training from it with:")
    print(f"  ingot train {out}/config.yaml data=... load_path={out} save_folder=...")
