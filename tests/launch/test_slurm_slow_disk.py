"""A shared disk that hangs, or that shows new files late, on a real Slurm.

Neither can be caused for real here: `slow_disk.c` does it one level above the kernel, in the processes of the job. A
process that waits there can still be killed; one in the kernel cannot (see the test with the freezer)."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from runs import assert_as_if_nothing_happened
from test_slurm import whole
from test_slurm_faults import ALL, Watched, usual

from ingot.launch.supervisor import judge
from ingot.launch.supervisor.records import Excluded, StopRequested

__all__ = ["cluster", "usual", "whole"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("usual")]
NEGATIVE_SECONDS = 8.0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler for the library that delays files")
    path = tmp_path_factory.mktemp("library") / "slow_disk.so"
    source = str(Path(__file__).parent / "slow_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(path), source, "-ldl", "-lpthread"], check=True)
    return path


class OnSlowDisk(Watched):
    def slow_down(self, library: Path, **settings: str) -> "OnSlowDisk":
        self.env |= {"LD_PRELOAD": str(library), "SLOW_DISK": str(self.folder), **settings}
        return self


def run_that_can_hang(cluster: Cluster, data: Path, folder: Path, library: Path) -> tuple[OnSlowDisk, Path]:
    """A run that trains, and the file with which its disk hangs: on the node that it names, or everywhere if empty."""
    run, hangs = OnSlowDisk(cluster, data, folder / "run", "hang_timeout=5", "--spares", "1", **ALL), folder / "hangs"
    run.slow_down(library, SLOW_DISK_HANGS=str(hangs)).submit()
    run.wait_for_batch(6)
    return run, hangs


def test_a_disk_that_hangs_everywhere_blames_no_node_and_the_run_goes_on_when_it_answers(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path, library: Path
) -> None:
    """D2f. Not even the supervisor can write; Slurm tells what it waits for."""
    run, hangs = run_that_can_hang(cluster, data, tmp_path, library)
    hangs.touch()
    try:
        run.wait(lambda: "for the site to recover" in cluster.ask("scontrol", "show", "job", run.job), 150)
        said = cluster.ask("scontrol", "show", "job", run.job)
    finally:
        hangs.unlink()
    assert "not answered" in said
    run.end()
    assert {kind for kind, _ in run.causes[:-1]} == {"site"} and run.causes[-1] == ("finished", "")
    assert not run.of(Excluded) and judge.strikes(run.records) == {}
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_disk_that_hangs_on_one_node_costs_that_node(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path, library: Path
) -> None:
    """D2f."""
    run, hangs = run_that_can_hang(cluster, data, tmp_path, library)
    hangs.write_text("n2")
    run.wait(lambda: ("n1", "n3") in run.nodes, 120)
    hangs.unlink()
    run.end()
    assert [record.node for record in run.of(Excluded)] == ["n2"], run.output()
    assert_as_if_nothing_happened(run.folder, whole)


def test_files_that_others_see_late_change_nothing(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path, library: Path
) -> None:
    """Section 3: no decision depends on seeing a file in time. Every process looks for what is not there yet (STOP,
    checkpoints, owner.json) and does not see it for eight seconds."""
    run = OnSlowDisk(
        cluster, data, tmp_path / "run", "--spares", "1", kind="device", node="n2", batch=11, attempts="all"
    )
    run.slow_down(library, SLOW_DISK_NEGATIVE=str(NEGATIVE_SECONDS)).submit().end()
    assert run.causes == [("device", "n2"), ("finished", "")] and run.nodes == [("n1", "n2"), ("n1", "n3")]
    assert "checkpoints/8 at batch 8 of 24" in run.output(), "the supervisor may not have seen it yet"
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_stop_that_is_seen_late_is_not_lost(cluster: Cluster, data: Path, tmp_path: Path, library: Path) -> None:
    run = OnSlowDisk(cluster, data, tmp_path / "run", **(ALL | {"seconds": 2.0}))
    run.slow_down(library, SLOW_DISK_NEGATIVE=str(NEGATIVE_SECONDS)).submit()
    run.wait_for_batch(3)
    (run.folder / "STOP").touch()
    began = time.monotonic()
    run.wait(lambda: run.of(StopRequested), 60)
    assert time.monotonic() - began < NEGATIVE_SECONDS + 10
    run.end()
    assert [stop.reason for stop in run.of(StopRequested)] == ["user"]
    assert list((run.folder / "checkpoints").glob("*/manifest.json"))
