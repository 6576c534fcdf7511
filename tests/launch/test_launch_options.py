"""The options of `ingot launch`: fields of the spec, with the spellings that they have always had."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.launch.slurm.script import srun_options
from ingot.launch.spec import make_spec

TRAIN = {"--config", "-c", "--updates", "-y", "--dialect", "--set", "--pick"}
LOCAL = {"--profile", "--name", "--env", "--secret"}
PROCESSES = {"--gpus-per-node", "--processes-per-node"}
CLUSTER = {"--nodes", "-N", "--cpus-per-task", "--image", "-i", "--mounts", "-m", "--exclude", "-x", "--preflight",
           "--no-preflight", "--signal-seconds"}  # fmt: skip
SLURM = {"--stage", "--time", "-t", "--partition", "-p", "--account", "-A", "--qos", "--constraint", "-C", "--reservation",
         "--mail-user", "--mail-type", "--cpu-bind", "--srun-args", "--sbatch-args", "--dry-run", "--local-folder"}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("slurm", TRAIN | LOCAL | PROCESSES | CLUSTER | SLURM | {"--chain", "--spares"}),
        ("slurm prepare", LOCAL | CLUSTER | SLURM),
        ("kubernetes", TRAIN | LOCAL | PROCESSES | CLUSTER
         | {"--kind", "--namespace", "--queue", "--secret-name", "--restarts", "--apply"}),
        ("local", TRAIN | LOCAL | PROCESSES | {"--dry-run"}),
    ],
)  # fmt: skip
def test_every_command_has_its_options(
    command: str, expected: set[str], ingot_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = ingot_here("launch", *command.split(), "--help").stdout
    table = "\n".join(line for line in text.splitlines() if re.match(r"│ -", line))
    assert set(re.findall(r"(?<![\w-])--?[a-zA-Z][a-z-]*", table)) == expected | {"--help", "-h"}
    assert max(map(len, text.splitlines())) <= 80


def test_a_wrong_value_names_its_field(ingot: Callable[..., Any]) -> None:
    for option, value, reason in (
        ("--env", "HF_HOME", "'HF_HOME' has no value; write --env NAME=VALUE"),
        ("--mounts", "/a:/b,c", "mounts"),
        ("--nodes", "0", "nodes"),
        ("--secret", "A-B", "not a valid environment variable name"),
    ):
        refused = ingot("launch", "slurm", "demo", "data=d", "--dry-run", option, value, check=False)
        assert refused.returncode == 2 and reason in refused.stderr, refused.stderr


def test_mounts_and_variables_may_be_given_together_or_one_by_one(ingot: Callable[..., Any]) -> None:
    command = ["launch", "slurm", "mpt-125m", "data=/data", "save_folder=/runs/x", "--profile", "cpu", "--dry-run"]
    options = ["-i", "/apps/ingot.sqsh", "-m", "/a:/a,/b:/b:ro", "-m", "/c:/c", "--env", "A=1=2", "--env", "B="]
    printed = ingot(*command, *options).stdout
    for expected in ('"/a:/a",\n  "/b:/b:ro",\n  "/c:/c"', '"A": "1=2"', '"B": ""'):
        assert expected in printed


def test_options_of_slurm_reach_srun_and_sbatch(ingot: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text\n")
    options = ["--cpu-bind", "no", "--mail-user", "me@example.org", "--srun-args", "--mpi=pmix --cpus-per-gpu 4",
               "--sbatch-args", "--nice=5 --licenses a,b"]  # fmt: skip
    for verb in ([], ["prepare"]):
        command = ["prepare", "--path", "x.txt", "--out_root", "out", "--concat_tokens", "8", "--tokenizer", "gpt2"]
        what = command if verb else ["mpt-125m", "data=/data", "save_folder=/runs/x"]
        printed = ingot("launch", "slurm", *what, "--profile", "cpu", "--dry-run", *options).stdout
        chosen = make_spec(json.loads(printed[printed.index("\n{") :]))
        assert srun_options(chosen) == ["--cpu-bind=no", "--mpi=pmix", "--cpus-per-gpu=4"]
        for line in ("mail-type=END,FAIL,REQUEUE", "mail-user=me@example.org", "nice=5", "licenses=a,b"):
            assert f"\n#SBATCH --{line}\n" in printed


@pytest.mark.parametrize(
    ("value", "reason"),
    [("--nodes 3", "--nodes is set by ingot"), ("-N4", "'-N4' is not an option"), ("pmix", "'pmix' is not an option"),
     ("--mpi=$(x)", "'--mpi=$(x)' is not"), ("--a 'b c'", "'b c' is not"), ("--a b c", "'c' is not an option")],
)  # fmt: skip
def test_options_that_ingot_sets_or_a_shell_could_read_are_refused(
    ingot: Callable[..., Any], value: str, reason: str
) -> None:
    refused = ingot("launch", "slurm", "demo", "data=d", "--dry-run", "--srun-args", value, check=False)
    assert refused.returncode == 2 and reason in refused.stderr and refused.stdout == ""
