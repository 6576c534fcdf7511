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


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--time", "1h", "time = '1h': must be MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, "
                         "DAYS-HOURS:MINUTES[:SECONDS] or UNLIMITED, as Slurm reads it; one hour is 1:00:00"),
        ("--time", "1:2:3:4", "one hour is 1:00:00"),
        ("--time", "2-", "one hour is 1:00:00"),
        ("--time", "", "one hour is 1:00:00"),
        ("--chain", "0", "chain = 0: must be at least 1"),
        ("--nodes", "0", "nodes = 0: must be at least 1"),
        ("--nodes", "100001", "nodes = 100001: must be at most 100000"),
        ("--spares", "-1", "spares = -1: must be at least 0"),
        ("--gpus-per-node", "-1", "gpus_per_node = -1: must be at least 0"),
        ("--processes-per-node", "0", "processes_per_node = 0: must be at least 1"),
        ("--signal-seconds", "5", "signal_seconds = 5: must be at least 10"),
        ("--signal-seconds", "x", "invalid value for '--signal-seconds': it must be a whole number"),
        ("--mounts", "fsx", "mounts.0 = 'fsx': must be SOURCE:TARGET or SOURCE:TARGET:ro, two absolute paths"),
        ("--name", "a/b", "name = 'a/b': must be letters, digits and _ . -, beginning with a letter or digit"),
        ("--name", "a" * 64, "of at most 63 characters"),
        ("--constraint", "a;b", "constraint = 'a;b': must be node features of Slurm"),
    ],
)  # fmt: skip
def test_a_value_of_another_form_says_which_forms_are_taken(
    ingot_here: Callable[..., Any], option: str, value: str, says: str
) -> None:
    refused = ingot_here("launch", "slurm", "mpt-125m", "data=/d", "--dry-run", f"{option}={value}", check=False)
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert refused.returncode == 2 and says in line and "Input should" not in line and "pattern" not in line


@pytest.mark.parametrize("limit", ["1440", "90:30", "1:00:00", "1:5:0", "200:00:00", "2-12", "10-0:30", "1-2:3:4", "0",
                                   "UNLIMITED", "infinite"])  # fmt: skip
def test_a_time_limit_may_be_whatever_slurm_takes(ingot_here: Callable[..., Any], limit: str) -> None:
    command = ["launch", "slurm", "mpt-125m", "data=/d", "save_folder=/fsx/x", "--local-folder", "--profile", "cpu"]
    assert f"#SBATCH --time={limit}\n" in ingot_here(*command, "--dry-run", "--time", limit).stdout


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--namespace", "A_b", "namespace = 'A_b': must be a namespace of Kubernetes: lower-case letters"),
     ("--queue", "a_b", "queue = 'a_b': must be a name of Kubernetes: lower-case letters"),
     ("--mounts", "A_b:/data", "claims.0 = 'A_b:/data': must be CLAIM:TARGET or CLAIM:TARGET:ro"),
     ("--restarts", "-1", "restarts = -1: must be at least 0")],
)  # fmt: skip
def test_so_does_one_for_kubernetes(ingot_here: Callable[..., Any], option: str, value: str, says: str) -> None:
    refused = ingot_here("launch", "kubernetes", "mpt-125m", "data=/d", f"{option}={value}", check=False)
    assert refused.returncode == 2 and says in refused.stderr


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
