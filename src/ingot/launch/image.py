"""Container images, by way of docker and enroot: built with pinned parts, imported whole, staged once per node.

The published guides run these commands by hand and find out about a full disk, a floating tag or a half-written file on
the cluster. Here what can be checked is checked first, their output is passed through, and a file appears under its
name only when it is complete. Its SHA-256 goes into `NAME.sha256`, in the form of the tool `sha256sum`.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ingot.errors import EXIT_FAULT, ConfigError, DataError, DiskError, IngotError, disk_error
from ingot.storage.atomic import write_whole

DOCKERFILE = Path("containers") / "Dockerfile"
FABRICS = ("none", "efa", "infiniband")
BUILD_BYTES, SQUASH_BYTES = 40 * 10**9, 25 * 10**9  # more than an image of torch and its libraries has needed
BLOCK = 1 << 24


class ImageError(IngotError):
    """docker or enroot failed."""

    exit_code = EXIT_FAULT


def build_image(tag: str, base_digest: str, fabric: str, arguments: Sequence[str], context: Path, force: bool) -> str:
    """Build an image; gives its id."""
    check_pinned(tag)
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", base_digest):
        raise ConfigError(f"--base-digest {base_digest!r} must be sha256: and 64 hexadecimal digits")
    if fabric not in FABRICS:
        raise ConfigError(f"--fabric {fabric}: there are {', '.join(FABRICS)}")
    for argument in arguments:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*=.+", argument):
            raise ConfigError(f"--build-arg {argument!r} must be NAME=VALUE")
    if not (context / DOCKERFILE).is_file():
        raise ConfigError(
            f"{context / DOCKERFILE} is not there; run this in a checkout of ingot, or name it (--context)"
        )
    if _image_id(tag) and not force:
        raise ConfigError(f"the image {tag} exists already; choose another version, or replace it with --force")
    root = Path(_output(["docker", "info", "--format", "{{.DockerRootDir}}"]))
    if root.is_dir():  # else docker runs on another machine
        _check_space(root, BUILD_BYTES)
    values = [f"BASE_DIGEST={base_digest}", f"FABRIC={fabric}", *arguments]
    build = [part for value in values for part in ("--build-arg", value)]
    _run(["docker", "build", "--file", str(context / DOCKERFILE), "--tag", tag, *build, str(context)])
    return _image_id(tag)


def import_image(image: str, output: Path, force: bool) -> str:
    """Make a squash file of an image; gives its SHA-256."""
    scheme, _, name = image.partition("://")
    if scheme not in ("docker", "dockerd"):
        raise ConfigError(f"{image} must begin with dockerd:// (of this machine) or docker:// (of a registry)")
    check_pinned(name)
    if output.suffix != ".sqsh":
        raise ConfigError(f"{output} must end in .sqsh, by which pyxis knows a squash file")
    if output.exists() and not force:
        raise ConfigError(f"{output} exists already; choose another name, or replace it with --force")
    if scheme == "dockerd" and not _image_id(name):
        raise ConfigError(f"docker has no image {name} here; build it first with `ingot launch image build`")
    draft = output.with_name(f".{output.stem}.{os.getpid()}.sqsh")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _check_space(output.parent, SQUASH_BYTES)
        _run(["enroot", "import", "--output", str(draft), image])
        if not draft.is_file() or not draft.stat().st_size:
            raise ImageError(f"enroot said that all is well, but wrote no {output}")
        with draft.open("rb") as file:
            digest = _copy(file, None)
            os.fsync(file.fileno())
        _sum_file(output).unlink(missing_ok=True)  # never an old sum beside a new file
        os.replace(draft, output)
        write_whole(_sum_file(output), f"{digest}  {output.name}\n")
    except OSError as error:
        raise disk_error("write", output, error) from None
    finally:
        draft.unlink(missing_ok=True)
    return digest


def stage_image(image: Path, folder: Path, keep: int = 2) -> Path:
    """Copy a squash file into a node's own folder, under its hash; the `keep` last used stay. Gives the path there.

    Whoever comes second waits for the first and finds the file there. It is hashed as it is copied; one that lies
    there complete has been.
    """
    if not image.is_file():
        raise ConfigError(f"{image} is not there; make it with `ingot launch image import`")
    digest = expected_sum(image)
    target = folder / f"{digest}.sqsh"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in folder.glob(".*.draft"):  # of a process that was killed: the lock is ours
                leftover.unlink()
            size = image.stat().st_size
            if not target.is_file() or target.stat().st_size != size:
                _check_space(folder, size)
                _copy_checked(image, target, digest)
            os.utime(target)
            staged = sorted(folder.glob("*.sqsh"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
            for old in [path for path in staged if path != target][keep - 1 :]:
                old.unlink()
    except OSError as error:
        raise disk_error(f"stage {image} in", folder, error) from None
    return target


def _copy_checked(image: Path, target: Path, digest: str) -> None:
    draft = target.with_name(f".{target.stem}.draft")
    with image.open("rb") as source, draft.open("xb") as copy:
        found = _copy(source, copy)
        copy.flush()
        os.fsync(copy.fileno())
    if found != digest:
        draft.unlink()
        raise DataError(f"{image} has SHA-256 {found[:12]}..., and {_sum_file(image)} says {digest[:12]}...: import it "
                        "again")  # fmt: skip
    os.replace(draft, target)


def _copy(source: BinaryIO, target: BinaryIO | None) -> str:
    """Read to the end, write if there is a target; gives the SHA-256."""
    sha = hashlib.sha256()
    while block := source.read(BLOCK):
        sha.update(block)
        if target is not None:
            target.write(block)
    return sha.hexdigest()


def _sum_file(image: Path) -> Path:
    return image.with_name(f"{image.name}.sha256")


def expected_sum(image: Path) -> str:
    """What stands in the file beside an image."""
    path = _sum_file(image)
    if not path.is_file():
        raise ConfigError(f"{path} is not there; write it with: sha256sum {image.name} > {path.name}")
    digest = path.read_text(encoding="utf-8", errors="replace").partition(" ")[0].strip()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise DataError(f"{path} does not begin with a SHA-256")
    return digest


def check_pinned(name: str) -> None:
    """A name with a version or a digest: `latest` is another image tomorrow."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:#@-]*", name):
        raise ConfigError(f"{name[:60]!r} is no name of an image")
    last = re.split("[/#]", name)[-1]
    if "@sha256:" not in name and (":" not in last or last.endswith(":latest")):
        raise ConfigError(f"the image {name} may be another one tomorrow; name its version (:0.1.0) or its digest")


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskError(f"{folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed; make room first")


def _image_id(tag: str) -> str:
    """The id of an image that docker has, or nothing."""
    return _output(["docker", "image", "inspect", "--format", "{{.Id}}", tag], missing="No such image")


def _output(command: Sequence[str], missing: str | None = None) -> str:
    _find(command[0])
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not (missing and missing.lower() in done.stderr.lower()):
        raise ImageError(f"{command[0]} does not work here: {' '.join(done.stderr.split())}")
    return "" if done.returncode else done.stdout.strip()


def _run(command: Sequence[str]) -> None:
    """Run with its output passed through."""
    _find(command[0])
    if code := subprocess.run(command).returncode:
        raise ImageError(f"{command[0]} {command[1]} ended with {code}; what it said is above")


def _find(program: str) -> None:
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not on this machine; install it, or run this where it is")
