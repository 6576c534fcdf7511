"""Scripts as people write them convert to what the training program would get, or are refused with a remedy."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from migration_case import check_case
from random_scripts import write_tools
from test_random_scripts import with_effect

from ingot.migrate.shell.script import read_script
from ingot.migrate.shell.source import take_options

CONTENT = yaml.safe_load((Path(__file__).parent / "scripts.yaml").read_text())
CASES = [pytest.param(case, id=name) for name, case in CONTENT["cases"].items()]


def written(case: dict[str, Any], folder: Path) -> Path:
    """The files of a case, with their lists filled in."""
    for name, text in {**case.get("files", {}), "run.sh": case["text"]}.items():
        for short, words in CONTENT["lists"].items():
            text = (
                text.replace(short + " ", words + " ")
                .replace(short + "\n", words + "\n")
                .replace(short + '"', words + '"')
            )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder / "run.sh"


def passed_by_bash(case: dict[str, Any], folder: Path) -> list[list[str]]:
    """The arguments of each run when bash runs the script."""
    tools, record = write_tools(folder / "tools"), folder / "record"
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(record), "HOME": str(folder)}
    environment |= case.get("variables", {})
    words = ["bash", "run.sh", *case.get("positional", [])]
    subprocess.run(words, cwd=folder, env=environment, capture_output=True, timeout=60, check=False)
    return [run.split("\037")[1:-1] for run in record.read_text().split("\036")[:-1]]


@pytest.mark.parametrize("case", CASES)
def test_a_script_means_the_same_here_or_is_refused_with_a_remedy(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check_case(case, [str(written(case, tmp_path).name), *case.get("arguments", [])])


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.values[0].get("bash", True) and "becomes" in case.values[0]]
)  # type: ignore[attr-defined]
def test_a_script_passes_the_arguments_that_bash_passes(case: dict[str, Any], tmp_path: Path) -> None:
    """What a command would put out is not known here, and stands as `$...` in its word."""
    path = written(case, tmp_path)
    options, _ = take_options(case.get("arguments", []))
    words = [word for word, _ in read_script(path, options.supplied, options.pick).words]
    while words[:1] in (["--nproc_per_node"], ["--nnodes"]):  # from the launcher
        del words[:2]
    runs = passed_by_bash(case, tmp_path)
    assert runs
    for run in runs:
        ours, theirs = with_effect(words), with_effect(run)
        assert len(ours) == len(theirs), (ours, theirs)
        assert all(mine == other or "$" in mine for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)
