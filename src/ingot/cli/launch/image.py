"""`ingot launch image`"""

from pathlib import Path
from typing import Annotated

import typer

image_app = typer.Typer(help="Container images: build, import as a squash file, stage on a node.", no_args_is_help=True)
Force = Annotated[bool, typer.Option("--force", help="Replace an existing one.")]


@image_app.command("build")
def build(
    tag: Annotated[str, typer.Argument(help="Name and version, such as registry.example/ingot:0.1.0.")],
    base_digest: Annotated[str, typer.Option(help="sha256:... of the base image.")],
    fabric: Annotated[str, typer.Option(help="The cluster's network: none, efa or infiniband.")] = "none",
    build_arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the Dockerfile; repeatable.")] = None,
    context: Annotated[Path, typer.Option(help="A checkout of ingot.")] = Path("."),
    force: Force = False,
) -> None:
    """Build the image with docker, from containers/Dockerfile.

    Example: ingot launch image build registry.example/ingot:0.1.0 --base-digest sha256:... --fabric infiniband
    """
    from ingot.launch.image import build_image

    print(f"built {tag}: {build_image(tag, base_digest, fabric, build_arg or [], context, force)}")


@image_app.command("import")
def import_image(
    image: Annotated[str, typer.Argument(help="dockerd://NAME:VERSION, or docker://REGISTRY#NAME:VERSION.")],
    output: Annotated[Path, typer.Argument(help="Squash file to write.")],
    force: Force = False,
) -> None:
    """Convert an image to a squash file with enroot, for Slurm with pyxis.

    Example: ingot launch image import dockerd://registry.example/ingot:0.1.0 /apps/ingot-0.1.0.sqsh
    """
    from ingot.launch.image import import_image as run

    print(f"wrote {output}, sha256 {run(image, output, force)}")


@image_app.command("stage")
def stage(
    image: Annotated[Path, typer.Argument(help="Squash file, with its .sha256 next to it.")],
    folder: Annotated[Path, typer.Argument(help="Folder on the node's own disk.")],
    keep: Annotated[int, typer.Option(help="How many images to keep in the folder.", min=1)] = 2,
) -> None:
    """Copy a squash file to a node's own disk once, verify it, and print the path of the copy.

    Example: srun -N 16 --ntasks-per-node=1 ingot launch image stage /apps/ingot-0.1.0.sqsh /mnt/nvme/images
    """
    from ingot.launch.image import stage_image

    print(stage_image(image, folder, keep))
