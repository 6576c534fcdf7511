"""Copying the image to each node, as the supervisor has srun do it: once and checked, before any agent starts.

srun is a substitute that runs the command for each node. (A Slurm without the pyxis plugin does not know the options of
containers, so the real one cannot be asked.)
"""

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from specs import put_on_path, spec

from ingot.errors import ConfigError
from ingot.launch.slurm.allocation import SlurmCluster
from ingot.launch.spec import LaunchSpec
from ingot.launch.submit import submit_to_slurm

# runs `bash -c` on each node of the job at the same time, as srun would
SRUN = """
import subprocess
words = sys.argv[1:]
command = words[next(i for i, word in enumerate(words) if not word.startswith("--")):]
running = []
for node in ("n1", "n2", "n3"):
    own = [word + "/of-" + node if node == os.environ.get("BROKEN") and i == 5 else word for i, word in enumerate(command)]
    running.append(subprocess.Popen(own, env={**os.environ, "SLURMD_NODENAME": node}))
for process in running:
    process.wait()
"""


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchSpec:
    image = tmp_path / "ingot.sqsh"
    image.write_bytes(os.urandom(100_000))
    (tmp_path / "ingot.sqsh.sha256").write_text(f"{hashlib.sha256(image.read_bytes()).hexdigest()}  ingot.sqsh\n")
    put_on_path(monkeypatch, tmp_path / "bin", "srun", SRUN)
    put_on_path(monkeypatch, tmp_path / "bin", "scontrol", "print('n1\\nn2\\nn3') if 'hostnames' in sys.argv else None")
    run = tmp_path / "run"
    run.mkdir()
    return spec(image=str(image), stage=str(tmp_path / "nvme"), run_folder=str(run), workdir=str(tmp_path), nodes=2,
                spares=1)  # fmt: skip


def stage(staged: LaunchSpec, **env: str) -> tuple[dict[str, str], SlurmCluster]:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
    cluster = SlurmCluster(staged, {**os.environ, **job, **env})
    return asyncio.run(cluster.stage()), cluster


def calls(staged: LaunchSpec) -> list[list[str]]:
    """How srun was called."""
    path = Path(staged.workdir) / "bin" / "srun.calls"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_image_is_copied_once_per_node_and_the_agents_use_the_copy(staged: LaunchSpec) -> None:
    nvme = Path(str(staged.stage))
    nvme.mkdir()
    (nvme / ".left.draft").write_text("half a file, of a job that was killed")
    for age, name in enumerate(("a", "b", "c"), 1):
        (nvme / f"{name}.sqsh").write_text("of an earlier day")
        os.utime(nvme / f"{name}.sqsh", (age, age))
    failed, cluster = stage(staged)
    digest = hashlib.sha256(Path(str(staged.image)).read_bytes()).hexdigest()
    assert failed == {} and cluster._image == [f"--container-image={nvme}/{digest}.sqsh"]
    assert hashlib.sha256((nvme / f"{digest}.sqsh").read_bytes()).hexdigest() == digest
    assert sorted(path.name for path in nvme.iterdir()) == sorted([".lock", f"{digest}.sqsh", "c.sqsh"])
    (staging,) = calls(staged)
    assert not any("container" in word for word in staging)


def test_an_existing_copy_is_reused(staged: LaunchSpec) -> None:
    digest = hashlib.sha256(Path(str(staged.image)).read_bytes()).hexdigest()
    copy = Path(str(staged.stage)) / f"{digest}.sqsh"
    copy.parent.mkdir()
    copy.write_bytes(bytes(100_000))  # complete, by its name and size
    assert stage(staged)[0] == {} and copy.read_bytes() == bytes(100_000)


def test_a_node_that_cannot_be_given_the_image_is_named_with_the_reason(staged: LaunchSpec) -> None:
    in_the_way = Path(str(staged.stage)) / "of-n2"
    in_the_way.parent.mkdir()
    in_the_way.write_text("a file where a folder should be")
    failed, _ = stage(staged, BROKEN="n2")
    assert list(failed) == ["n2"] and "File exists" in failed["n2"]


def test_an_image_with_another_checksum_is_not_used(staged: LaunchSpec) -> None:
    with Path(str(staged.image)).open("r+b") as file:
        file.write(b"another beginning")
    failed, _ = stage(staged)
    assert failed == dict.fromkeys(("n1", "n2", "n3"), "with another checksum")
    assert not list(Path(str(staged.stage)).glob("*.sqsh"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"image": "registry.example/ingot:0.1.0"}, "only a squash file"), ({"image": None}, "only a squash file")],
)
def test_only_a_file_can_be_staged(staged: LaunchSpec, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        spec(**(staged.model_dump() | changes))


def test_an_image_without_a_sum_is_refused_before_anything_is_queued(staged: LaunchSpec) -> None:
    Path(f"{staged.image}.sha256").unlink()
    with pytest.raises(ConfigError, match="sha256sum"):
        submit_to_slurm(staged)
    assert not (staged.folder / "job.sh").exists()
