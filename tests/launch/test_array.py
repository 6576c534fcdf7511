"""`ingot launch slurm prepare` on a real Slurm: shares are killed, run again, and the bytes are those of one process."""

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, cluster
from conftest import SENTENCES
from test_slurm import Launched

from ingot.launch.spec import read_spec
from ingot.launch.supervisor.failure_log import read_failures

__all__ = ["cluster"]
HOOK = str(Path(__file__).parent / "hook")


def content(folder: Path) -> dict[str, str]:
    """The files of a dataset and their hashes."""
    files = [p for p in folder.rglob("*") if p.is_file() and ".prepare-train" not in p.parts]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def process_of(*words: str) -> int:
    """The process whose command line has all these words, on whichever node."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if set(words) <= set(line):
            return int(path.parent.name)
    raise AssertionError(f"no process has {words}")


class Prepared(Launched):
    """A preparation that was given to the cluster."""

    def __init__(self, cluster: Cluster, data: Path, tmp_path: Path):
        text = tmp_path / "corpus.jsonl"
        text.write_text("".join(json.dumps({"text": line * (1 + i % 5)}) + "\n" for i, line in enumerate(SENTENCES)))
        self.out, self.hold, self.cluster = tmp_path / "out", tmp_path / "hold", cluster
        self.folder = self.out / ".prepare-train"
        self.hold.mkdir()
        self.out.mkdir()
        self.arguments = ["--path", str(text), "--tokenizer", str(data / "tokenizer"), "--concat_tokens", "64",
                          "--size_limit", "4096", "--num_workers", "0"]  # fmt: skip
        self.env = cluster.env | {"PYTHONPATH": HOOK, "INGOT_TEST_HOLD": str(self.hold)}

    def submit(self, code: int = 0) -> "Prepared":
        options = ["-N", "3", "--profile", "cpu", "--time", "10"]
        self.said = self.ingot("launch", "slurm", "prepare", *self.arguments, "--out_root", str(self.out), *options)
        return self

    def jobs(self) -> list[str]:
        return [json.loads(line)["id"] for line in (self.folder / "launch" / "jobs.jsonl").read_text().splitlines()]

    def states(self) -> list[str]:
        """Of the elements, by number, and of the last job."""
        found = [
            self.cluster.ask("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%i %T") for job in self.jobs()[-2:]
        ]
        return [line.split()[1] for text in found for line in sorted(text.splitlines())]


def test_killed_shares_are_run_again_and_the_bytes_are_those_of_a_local_preparation(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    run = Prepared(cluster, data, tmp_path)
    run.ingot("prepare", *run.arguments, "--out_root", str(tmp_path / "whole"))
    for share in ("1", "2"):
        (run.hold / f"hold.{share}").touch()
    run.submit()
    array, last = run.jobs()
    run.wait(lambda: (run.hold / "started.1").exists() and (run.hold / "started.2").exists())
    assert "state: running" in run.ingot("status", str(run.folder))

    os.kill(process_of("ingot.cli.main", "prepare", "1/3", str(run.out)), signal.SIGKILL)
    (run.hold / "hold.1").unlink()  # its second attempt, in the same allocation, goes through
    run.wait(lambda: run.states()[:2] == ["COMPLETED"] * 2)
    cluster.ask("scancel", f"{array}_2")
    run.wait_for_end()
    assert run.states() == ["COMPLETED", "COMPLETED", "CANCELLED", "CANCELLED"], run.output()
    (failure,) = read_failures(run.folder)
    assert (failure["rank"], failure["kind"]) == (1, "machine") and "signal 9" in failure["message"]
    assert not (run.out / "train").exists()
    assert "state: not running" in run.ingot("status", last)  # by the id of a job

    (run.hold / "hold.2").unlink()
    run.submit()
    run.wait_for_end()
    assert run.states() == ["COMPLETED"] * 4, run.output()
    assert "already done" in run.ingot("logs", str(run.folder), "--rank", "2")  # it continued, and did not start over
    assert "state: finished" in run.ingot("status", str(run.folder))
    assert content(run.out) == content(tmp_path / "whole")


@pytest.mark.slow
def test_a_bad_record_ends_all_with_its_line_and_a_stop_ends_the_jobs(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    run = Prepared(cluster, data, tmp_path)
    text = Path(run.arguments[1])
    lines = text.read_text().splitlines()
    text.write_text("\n".join([*lines[:-1], "{", ""]))
    run.submit()
    run.wait_for_end()
    assert "FAILED" in run.states() and run.states()[-1] == "CANCELLED"
    said = run.ingot("status", str(run.folder))
    assert "state: halted" in said and "corpus.jsonl" in said

    text.write_text("\n".join([*lines, ""]))
    (run.hold / "hold.0").touch()
    run.submit()
    run.wait(lambda: (run.hold / "started.0").exists())
    assert "ended job" in run.ingot("stop", str(run.folder))
    run.wait_for_end()
    assert run.states()[0] == run.states()[-1] == "CANCELLED"
    (run.hold / "hold.0").unlink()
    run.ingot("launch", "resume", str(run.folder))
    run.wait_for_end()
    assert run.states() == ["COMPLETED"] * 4, run.output()


def test_a_dry_run_prints_both_scripts_and_the_spec_and_touches_nothing(
    data: Path, tmp_path: Path, ingot: Callable[..., Any]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    command = ["launch", "slurm", "prepare", "--path", "a.txt", "--out_root", "out", "--splits", "val", "-N", "5",
               "--profile", "cpu", "-p", "cpu", "--dry-run"]  # fmt: skip
    printed = ingot(*command).stdout
    assert printed.count("#SBATCH --partition=cpu") == 2 and printed.count("#SBATCH --array=0-4") == 1
    path = tmp_path / "spec.json"
    path.write_text(printed[printed.index("\n{") :])
    spec = read_spec(path)
    assert spec.arguments == ["--path", "a.txt", "--out_root", "out", "--splits", "val"]
    assert (spec.verb, spec.nodes, spec.run_folder) == ("prepare", 5, str(tmp_path / "out" / ".prepare-val"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--path", "absent.txt", "--out_root", "out"], "absent.txt: no such file"),
        (["--out_root", "out"], "name what to prepare"),
        (["--path", "a.txt"], "give either --out"),
        (["--path", "a.txt", "--out_root", "out", "--concat_token", "3"], "--concat_token"),
        (["--path", "a.txt", "--out_root", "out", "--split", "../x"], "one plain name"),
        (["--path", "a.txt", "--out_root", "out", "--splits", "train", "val"], "the same documents"),
        (["--path", "a.txt", "--out_root", "o;ut"], "run_folder"),
        (["--path", "a.txt", "--out_root", "out", "-p", "a b"], "partition"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_queued(
    arguments: list[str], reason: str, tmp_path: Path, ingot: Callable[..., Any]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    refused = ingot("launch", "slurm", "prepare", *arguments, "-N", "2", check=False)
    assert refused.returncode == 2 and reason in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
