"""Images, with fakes of docker and enroot that record their arguments and create the file."""

import hashlib
import json
import multiprocessing
import os
from pathlib import Path

import pytest
from specs import put_on_path

from ingot.errors import ConfigError, DataError, DiskError
from ingot.launch import image
from ingot.launch.image import build_image, import_image, stage_image
from ingot.launch.programs import ProgramError

DIGEST = f"sha256:{'a' * 64}"
TAG = "registry.example/ingot:0.1.0"
DOCKER = """
if sys.argv[1] == "info":
    print("/nowhere")
elif sys.argv[1:3] == ["image", "inspect"]:
    if not os.path.exists({built!r}):
        sys.exit("Error response from daemon: No such image: " + sys.argv[-1])
    print("sha256:beef")
else:
    print("#1 building")
    open({built!r}, "w")
"""
ENROOT = "open(sys.argv[sys.argv.index('--output') + 1], 'wb').write({content!r})"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its calls."""
    return put_on_path(monkeypatch, tmp_path / "bin", "docker", DOCKER.format(built=str(tmp_path / "built")))


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "containers").mkdir()
    (tmp_path / "containers" / "Dockerfile").touch()
    return tmp_path


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_build_calls_docker_with_pinned_parts_and_shows_its_output(
    docker: Path, context: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert build_image(TAG, DIGEST, "efa", ["EFA_SHA256=b; touch x"], context, force=False) == "sha256:beef"
    (build,) = [call for call in calls(docker) if call[0] == "build"]
    assert build == [
        "build", "--file", str(context / "containers" / "Dockerfile"), "--tag", TAG, "--build-arg",
        f"BASE_DIGEST={DIGEST}", "--build-arg", "FABRIC=efa", "--build-arg", "EFA_SHA256=b; touch x", str(context),
    ]  # fmt: skip
    assert "#1 building" in capfd.readouterr().out
    with pytest.raises(ConfigError, match="already exists"):
        build_image(TAG, DIGEST, "efa", [], context, force=False)
    build_image(TAG, DIGEST, "efa", [], context, force=True)


@pytest.mark.parametrize(
    ("tag", "digest", "fabric", "arguments", "reason"),
    [
        ("ingot", DIGEST, "none", [], "different one tomorrow"),
        ("host:5000/ingot", DIGEST, "none", [], "different one tomorrow"),
        ("ingot:latest", DIGEST, "none", [], "different one tomorrow"),
        ("--push", DIGEST, "none", [], "not a valid image name"),
        (TAG, "latest", "none", [], "--base-digest"),
        (TAG, DIGEST, "token-ring", [], "none, efa, infiniband"),
        (TAG, DIGEST, "none", ["--network=host"], "NAME=VALUE"),
    ],
)
def test_build_refuses_what_is_not_pinned(
    docker: Path, context: Path, tag: str, digest: str, fabric: str, arguments: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_image(tag, digest, fabric, arguments, context, force=False)
    assert not docker.exists()


def test_build_outside_a_checkout_or_without_docker_says_so(
    tmp_path: Path, docker: Path, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="in a checkout of ingot"):
        build_image(TAG, DIGEST, "none", [], tmp_path / "elsewhere", force=False)
    put_on_path(monkeypatch, tmp_path / "bin", "docker", "sys.exit('Cannot connect to the Docker daemon')")
    with pytest.raises(ProgramError, match="Cannot connect"):
        build_image(TAG, DIGEST, "none", [], context, force=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="docker is not on this machine"):
        build_image(TAG, DIGEST, "none", [], context, force=False)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images, so that a test machine's disk will do."""
    monkeypatch.setattr(image, "SQUASH_BYTES", 1000)


def test_import_writes_the_file_and_its_checksum_or_nothing(
    tmp_path: Path, docker: Path, room: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "built").touch()
    log = put_on_path(monkeypatch, tmp_path / "bin", "enroot", ENROOT.format(content=b"squash"))
    output = tmp_path / "apps" / "ingot.sqsh"
    digest = import_image(f"dockerd://{TAG}", output, force=False)
    assert output.read_bytes() == b"squash"
    assert digest == hashlib.sha256(b"squash").hexdigest()
    assert (tmp_path / "apps" / "ingot.sqsh.sha256").read_text() == f"{digest}  ingot.sqsh\n"
    assert calls(log)[0][0::3] == ["import", f"dockerd://{TAG}"]
    with pytest.raises(ConfigError, match="already exists"):
        import_image(f"dockerd://{TAG}", output, force=False)
    put_on_path(monkeypatch, tmp_path / "bin", "enroot", ENROOT.format(content=b"half") + "; sys.exit(1)")
    with pytest.raises(ProgramError, match="enroot import failed with exit code 1"):
        import_image(f"dockerd://{TAG}", output, force=True)
    assert output.read_bytes() == b"squash"
    assert sorted(p.name for p in output.parent.iterdir()) == ["ingot.sqsh", "ingot.sqsh.sha256"]


def test_import_refuses_floating_names_missing_images_and_full_disks(
    tmp_path: Path, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "ingot.sqsh"
    with pytest.raises(ConfigError, match="different one tomorrow"):
        import_image("docker://nvcr.io#nvidia/pytorch", output, force=False)
    with pytest.raises(ConfigError, match="must begin with"):
        import_image(TAG, output, force=False)
    with pytest.raises(ConfigError, match=r"must end in \.sqsh"):
        import_image(f"dockerd://{TAG}", tmp_path / "image", force=False)
    with pytest.raises(ConfigError, match="docker has no image"):
        import_image(f"dockerd://{TAG}", output, force=False)
    monkeypatch.setattr(image, "SQUASH_BYTES", 10**18)
    with pytest.raises(DiskError, match="GB are needed"):
        import_image("docker://nvcr.io#nvidia/pytorch:25.06-py3", output, force=False)


def squash(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    (folder / f"{name}.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    return path


def test_stage_copies_once_and_keeps_the_last_used(tmp_path: Path) -> None:
    images = [squash(tmp_path, f"{n}.sqsh", bytes([n]) * 5000) for n in range(3)]
    local = tmp_path / "nvme"
    staged = [stage_image(path, local, keep=2) for path in images]
    assert [path.exists() for path in staged] == [False, True, True]
    assert staged[2].read_bytes() == images[2].read_bytes()
    inode = staged[1].stat().st_ino
    assert stage_image(images[1], local, keep=2).stat().st_ino == inode  # it was there
    assert stage_image(images[0], local, keep=2).exists()
    assert not staged[2].exists()  # the one that was used longest ago
    assert {p.name for p in local.iterdir()} == {staged[0].name, staged[1].name, ".lock"}


def test_stage_refuses_a_damaged_image_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    path = squash(tmp_path, "a.sqsh", b"x" * 5000)
    path.write_bytes(b"y" * 5000)
    with pytest.raises(DataError, match="import it again"):
        stage_image(path, tmp_path / "nvme")
    assert [p.name for p in (tmp_path / "nvme").iterdir()] == [".lock"]
    (tmp_path / "a.sqsh.sha256").write_text("no sum")
    with pytest.raises(DataError, match="does not begin with a SHA-256"):
        stage_image(path, tmp_path / "nvme")
    (tmp_path / "a.sqsh.sha256").unlink()
    with pytest.raises(ConfigError, match=r"sha256sum a\.sqsh"):
        stage_image(path, tmp_path / "nvme")
    with pytest.raises(ConfigError, match="does not exist"):
        stage_image(tmp_path / "b.sqsh", tmp_path / "nvme")


def test_stage_after_a_killed_copy_starts_over(tmp_path: Path) -> None:
    path = squash(tmp_path, "a.sqsh", b"x" * 5000)
    digest = hashlib.sha256(b"x" * 5000).hexdigest()
    local = tmp_path / "nvme"
    local.mkdir()
    (local / f".{digest}.draft").write_bytes(b"x" * 10)
    (local / f"{digest}.sqsh").write_bytes(b"x" * 10)  # a file that was cut short
    assert stage_image(path, local).read_bytes() == b"x" * 5000


def test_two_stagings_at_once_make_one_copy(tmp_path: Path) -> None:
    path = squash(tmp_path, "a.sqsh", os.urandom(3_000_000))
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=stage_image, args=(path, tmp_path / "nvme")) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    (staged,) = (tmp_path / "nvme").glob("*.sqsh")
    assert staged.read_bytes() == path.read_bytes()


def test_the_dockerfile_is_pinned_keyless_and_not_root() -> None:
    text = (Path(__file__).parents[2] / "containers" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert "FROM ${BASE_IMAGE}@${BASE_DIGEST} AS base" in lines
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER ingot"
    code = "\n".join(lines)
    assert ":latest" not in code and "ssh" not in code and "id_rsa" not in code
    assert "| sh" not in code.replace("| sha256sum", "") and "| bash" not in code
    assert code.count("https://") == code.count("sha256sum --check")
