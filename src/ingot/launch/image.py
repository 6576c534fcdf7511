"""Container images, made with docker and enroot: built from pinned parts, imported as one file, staged once per node.

The published guides run these commands by hand, and a full disk, a floating tag or a half-written file shows up on the
cluster. Here those are checked first, and a file appears under its name only when it is complete. Its SHA-256 is in
`NAME.sha256`, in the format of `sha256sum`.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ingot.errors import ConfigError, DataError, DiskError, disk_error
from ingot.launch.programs import ProgramError, output_of, run_on_terminal
from ingot.launch.slurm.script import script_body
from ingot.storage.atomic import write_whole

DOCKERFILE = Path("containers") / "Dockerfile"
FABRICS = ("none", "efa", "infiniband")
BUILD_BYTES, SQUASH_BYTES = 40 * 10**9, 25 * 10**9  # an image with torch and its libraries needs less
WRONG_DIGEST = 3  # the exit code of stage_image.sh


def build_image(tag: str, base_digest: str, fabric: str, arguments: Sequence[str], context: Path, force: bool) -> str:
    """Build an image; returns its id."""
    check_pinned(tag)
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", base_digest):
        raise ConfigError(f"--base-digest {base_digest!r} must be sha256: and 64 hexadecimal digits")
    if fabric not in FABRICS:
        raise ConfigError(f"--fabric {fabric} does not exist; choose one of {', '.join(FABRICS)}")
    for argument in arguments:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*=.+", argument):
            raise ConfigError(f"--build-arg {argument!r} must be NAME=VALUE")
    if not (context / DOCKERFILE).is_file():
        raise ConfigError(f"{context / DOCKERFILE} does not exist; run this in a checkout of ingot, or set --context")
    if _image_id(tag) and not force:
        raise ConfigError(f"the image {tag} already exists; choose another version, or replace it with --force")
    root = Path(output_of(["docker", "info", "--format", "{{.DockerRootDir}}"]))
    if root.is_dir():  # otherwise docker runs on another machine
        _check_space(root, BUILD_BYTES)
    values = [f"BASE_DIGEST={base_digest}", f"FABRIC={fabric}", *arguments]
    options = [part for value in values for part in ("--build-arg", value)]
    run_on_terminal(["docker", "build", "--file", str(context / DOCKERFILE), "--tag", tag, *options, str(context)])
    return _image_id(tag)


def import_image(image: str, output: Path, force: bool) -> str:
    """Make a squash file of an image; returns its SHA-256."""
    scheme, _, name = image.partition("://")
    if scheme not in ("docker", "dockerd"):
        raise ConfigError(f"{image} must begin with dockerd:// (this machine) or docker:// (a registry)")
    check_pinned(name)
    if output.suffix != ".sqsh":
        raise ConfigError(f"{output} must end in .sqsh, by which pyxis recognizes a squash file")
    if output.exists() and not force:
        raise ConfigError(f"{output} already exists; choose another name, or replace it with --force")
    if scheme == "dockerd" and not _image_id(name):
        raise ConfigError(f"docker has no image {name} here; build it first with `ingot launch image build`")
    draft = output.with_name(f".{output.stem}.{os.getpid()}.sqsh")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _check_space(output.parent, SQUASH_BYTES)
        run_on_terminal(["enroot", "import", "--output", str(draft), image])
        if not draft.is_file() or not draft.stat().st_size:
            raise ProgramError(f"enroot reported success but did not write {output}")
        with draft.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        _sum_file(output).unlink(missing_ok=True)  # never an old checksum next to a new file
        os.replace(draft, output)
        write_whole(_sum_file(output), f"{digest}  {output.name}\n")
    except OSError as error:
        raise disk_error("write", output, error) from None
    finally:
        draft.unlink(missing_ok=True)
    return digest


def stage_image(image: Path, folder: Path, keep: int = 2) -> Path:
    """Copy a squash file to a node's own disk, as job scripts do; returns the path of the copy."""
    if not image.is_file():
        raise ConfigError(f"{image} does not exist; make it with `ingot launch image import`")
    digest = expected_sum(image)
    command = [script_body("stage_image.sh") + 'stage_image "$@"', "stage", str(image), str(folder), digest, str(keep)]
    done = subprocess.run(["bash", "-c", *command], capture_output=True, text=True)
    if done.returncode == WRONG_DIGEST:
        raise DataError(f"the SHA-256 of {image} is not the one in {_sum_file(image)}; import it again")
    if done.returncode:
        raise DiskError(f"cannot copy {image} to {folder}: {' '.join(done.stderr.split())}")
    return folder / f"{digest}.sqsh"


def _sum_file(image: Path) -> Path:
    return image.with_name(f"{image.name}.sha256")


def expected_sum(image: Path) -> str:
    """The SHA-256 recorded next to an image."""
    path = _sum_file(image)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; write it with: sha256sum {image.name} > {path.name}")
    digest = path.read_text(encoding="utf-8", errors="replace").partition(" ")[0].strip()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise DataError(f"{path} does not begin with a SHA-256")
    return digest


def check_pinned(name: str) -> None:
    """Refuse an image name without a version or digest: `latest` may be a different image tomorrow."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:#@-]*", name):
        raise ConfigError(f"{name[:60]!r} is not a valid image name")
    last = re.split("[/#]", name)[-1]
    if "@sha256:" not in name and (":" not in last or last.endswith(":latest")):
        raise ConfigError(f"the image {name} may be a different one tomorrow; name its version (:0.1.0) or its digest")


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskError(f"{folder} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB are needed; free some space")


def _image_id(tag: str) -> str:
    """The id of a local docker image; empty if docker does not have it."""
    try:
        return output_of(["docker", "image", "inspect", "--format", "{{.Id}}", tag])
    except ProgramError as error:
        if "no such image" not in str(error).lower():
            raise
        return ""
