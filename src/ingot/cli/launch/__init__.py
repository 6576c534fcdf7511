"""`ingot launch`: one file per command."""

import typer

from ingot.cli.launch.image import image_app
from ingot.cli.launch.kubernetes import kubernetes
from ingot.cli.launch.local import local
from ingot.cli.launch.resume import profiles, resume
from ingot.cli.launch.slurm import SlurmCommand, slurm
from ingot.cli.options import SectionCommand

launch_app = typer.Typer(help="Run on a cluster, and restart after every fault.", no_args_is_help=True)
launch_app.command("slurm", cls=SlurmCommand)(slurm)
launch_app.command("kubernetes", cls=SectionCommand)(kubernetes)
launch_app.command("local", cls=SectionCommand)(local)
launch_app.command("resume")(resume)
launch_app.command("profiles")(profiles)
launch_app.add_typer(image_app, name="image")
