"""What `make` installs: no development tools for the demo, and no CUDA packages for machines without a GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def planned(folder: Path, *arguments: str, with_driver: bool = False) -> str:
    """What make would run in a new clone."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("sh", "make", "python3.11", "python3.12", "python3.13", "python3"):
        if (found := shutil.which(name)) and not (tools / name).exists():
            (tools / name).symlink_to(found)
    if with_driver:
        (tools / "nvidia-smi").touch(mode=0o755)
    env = {**os.environ, "PATH": str(tools)}
    return subprocess.run(
        ["make", "-n", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_the_demo_installs_no_development_tools(tmp_path: Path) -> None:
    assert "--editable .\n" in planned(tmp_path, "demo") and "[dev" not in planned(tmp_path, "demo")
    assert "--editable '.[dev]'" in planned(tmp_path, "setup")


@pytest.mark.parametrize(("with_driver", "takes_cpu_build"), [(False, True), (True, False)])
def test_without_nvidias_driver_make_takes_the_cpu_build_of_torch(
    tmp_path: Path, with_driver: bool, takes_cpu_build: bool
) -> None:
    commands = planned(tmp_path, "demo", with_driver=with_driver)
    assert ("--extra-index-url https://download.pytorch.org/whl/cpu" in commands) == takes_cpu_build
    assert "extra-index-url" not in planned(tmp_path, "demo", "TORCH_INDEX=")


def test_the_demo_says_how_to_call_ingot_where_it_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.cli.walkthrough import path_hint

    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert path_hint().startswith("To type `ingot` as below, first run: source ") and "bin/activate" in path_hint()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert path_hint() == ""
