"""`ingot launch image`"""

from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand, OptionGroup
from ingot.launch import image as images

app = typer.Typer(
    add_completion=False, cls=OptionGroup, help="Build, convert and copy container images.", no_args_is_help=True
)
Force = Annotated[bool, typer.Option("--force", help="Replace an existing one.")]


@app.command("build", cls=OptionCommand)
def build(
    tag: Annotated[str, typer.Argument(help="Name and version, such as registry.example/ingot:0.1.0.")],
    base_digest: Annotated[str, typer.Option(help="sha256:... of the base image.")],
    fabric: Annotated[str, typer.Option(help="The cluster's network: none, efa or infiniband.")] = "none",
    build_arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the Dockerfile; repeatable.")] = None,
    context: Annotated[Path, typer.Option(help="A checkout of ingot.")] = Path("."),
    force: Force = False,
) -> None:
    """Build the image with docker, from containers/Dockerfile.

    Examples:
      ingot launch image build registry.example/ingot:0.1.0 \\
        --base-digest sha256:0123abc
      ingot launch image build registry.example/ingot:0.1.0 \\
        --base-digest sha256:0123abc --fabric infiniband
    """
    print(f"built {tag}: {images.build_image(tag, base_digest, fabric, build_arg or [], context, force)}")


@app.command("import", cls=OptionCommand)
def import_image(
    image: Annotated[str, typer.Argument(help="dockerd://NAME:VERSION, or docker://REGISTRY#NAME:VERSION.")],
    output: Annotated[Path, typer.Argument(help="Squash file to write.")],
    force: Force = False,
) -> None:
    """Convert an image to a squash file for Slurm with pyxis.

    Examples:
      ingot launch image import dockerd://ingot:0.1.0 /apps/ingot.sqsh
      ingot launch image import docker://registry.example#ingot:0.1.0 in.sqsh
    """
    print(f"wrote {output}, sha256 {images.import_image(image, output, force)}")


@app.command("stage", cls=OptionCommand)
def stage(
    image: Annotated[Path, typer.Argument(help="Squash file, with its .sha256 next to it.")],
    folder: Annotated[Path, typer.Argument(help="Folder on the node's own disk.")],
    keep: Annotated[int, typer.Option(help="How many images to keep in the folder.", min=1)] = 2,
) -> None:
    """Copy a squash file to a node's own disk, once, verified.

    Prints the path of the copy. Run it on each node with `srun
    --ntasks-per-node=1`.

    Examples:
      ingot launch image stage /apps/ingot.sqsh /mnt/nvme/images
      ingot launch image stage /apps/ingot.sqsh /mnt/nvme/images --keep 1
    """
    print(images.stage_image(image, folder, keep))
