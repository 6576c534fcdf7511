"""The wheel holds every file of the package, the sdist the whole project; pre-commit runs what CI runs."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone: what belongs to the project is what git tracks")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist and a wheel, built from what is under version control."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    code = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    return out


def test_the_wheel_holds_every_file_of_the_package(tracked: list[str], built: Path) -> None:
    (wheel,) = built.glob("ingot_llm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert {name.removeprefix("src/") for name in tracked if name.startswith("src/")} == {
        name for name in held if name.startswith("ingot/")
    }


def test_the_sdist_holds_documentation_examples_and_tests(tracked: list[str], built: Path) -> None:
    (sdist,) = built.glob("ingot_llm-*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in tracked if name not in held and not name.startswith((".git", ".ci/"))]


def test_pre_commit_runs_what_ci_runs() -> None:
    in_ci = re.findall(r"^make \w+$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert len(in_ci) > 3 and {hook["entry"] for hook in hooks} == set(in_ci)
