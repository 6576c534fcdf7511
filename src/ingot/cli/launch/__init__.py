"""`ingot launch`: one file per command."""

import typer

from ingot.cli.commands import OptionGroup
from ingot.cli.launch import image, kubernetes, local, profiles, resume, slurm

app = typer.Typer(add_completion=False, cls=OptionGroup, no_args_is_help=True)
for commands in (slurm, kubernetes, local, resume, profiles):
    app.add_typer(commands.app)
app.add_typer(image.app, name="image")
