"""The launch protocol is documented whole, and one file knows its names."""

import re
from importlib import resources
from pathlib import Path

import pytest

from ingot.launch import protocol
from ingot.launch.protocol import LaunchFolder
from ingot.launch.slurm.script import render_scripts, script_body
from ingot.launch.spec import make_spec
from ingot.launch.supervisor.state_file import EPOCHS, RESERVE, STATE

SOURCE = Path(str(resources.files("ingot")))
TABLES = protocol.__doc__ or ""
FILES = [protocol._JOBS, protocol._HALT, protocol._LOST, protocol.SPEC, protocol._FILES, protocol._OUTPUT,
         ".lock", STATE, RESERVE, EPOCHS]  # fmt: skip
SERIES = [protocol._RESULT]
SPEC = {"name": "x", "run_folder": "/runs/x", "workdir": "/"}


@pytest.mark.parametrize("name", [*FILES, *(f"{prefix}." for prefix in SERIES)])
def test_every_file_is_in_the_tables(name: str) -> None:
    assert re.search(rf"^\| {re.escape(name)}", TABLES, re.M), name


def test_each_of_our_variables_that_reaches_another_process_is_in_the_tables() -> None:
    texts = [
        path.read_text() for folder in ("launch", "parallel", "training") for path in (SOURCE / folder).rglob("*.py")
    ]
    names = {name for text in texts for name in re.findall(r'"(INGOT_[A-Z_]+)"', text)}
    assert {"INGOT_JOB_ATTEMPT", "INGOT_FAILURE_FILE", "INGOT_HEARTBEAT_FILE"} <= names
    own = {
        "INGOT_LAUNCH_DEFAULTS",
        "INGOT_RESTART",
    }  # read on the login node; a part of INGOT_JOB_ATTEMPT in a manifest
    assert not [name for name in names - own if name not in TABLES]


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_the_job_script_uses_no_variable_that_nobody_sets(verb: str) -> None:
    """shellcheck takes names in capitals for variables of the environment."""
    body = script_body("job.sh")
    text = next(iter(render_scripts(make_spec({**SPEC, "verb": verb})).values()))
    used = set(re.findall(r"\$\{?#?([A-Z][A-Z_]+)", body)) | set(re.findall(r"\(\(.*?\b([A-Z]{3}[A-Z_]+)", body))
    assigned = set(re.findall(r"^ *(?:export .*)?\b([A-Z][A-Z_]+)\+?=", text, re.M))
    assert {"SUPERVISOR_PYTHON", "SPEC_FILE"} <= used
    assert {name for name in used - assigned if not name.startswith("SLURM")} == set()


def test_no_file_of_the_launch_folder_is_named_elsewhere() -> None:
    code = re.sub(r"#.*", "", script_body("job.sh"))
    assert not re.search(r"/(code|bad|stop|HALT|STOP|FINISHED|starts|ends|down|output|checkpoints)\b", code)


def test_of_two_results_the_first_stands(tmp_path: Path) -> None:
    launch = LaunchFolder(tmp_path)
    launch.path.mkdir()
    assert launch.result("7.0.1") is None
    launch.record_result("7.0.1", 1, 3)
    launch.record_result("7.0.1", 75, 0)
    assert launch.result("7.0.1") == 1
    assert [path.name for path in launch.path.iterdir()] == ["code.7.0.1"]
