"""Optional packages: the name `ingot` on the package index is another project, so messages name the packages."""

import os
import re
import tomllib
from pathlib import Path

import pytest
from conftest import TINY, Ingot

from ingot.errors import EXTRAS, MissingExtra

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "eval": "pip install 'lm-eval>=0.4.13,<0.5'",
    "hf": "pip install 'transformers>=5.0' 'datasets>=4.0'",
    "tensorboard": "pip install 'tensorboard>=2.16'",
    "wandb": "pip install 'wandb>=0.19'",
    "mlflow": "pip install 'mlflow>=3.0'",
    "comet": "pip install 'comet_ml>=3.49'",
    "trackio": "pip install 'trackio>=0.20'",
}
INSTALL_INGOT = re.compile(r"pip3? install[^\n]*?[ \t'\"]ingot(?![\w./-])|[\s'\"]ingot\[")
NEVER_MISSING = ("dev", "docs", "gpu")  # no verb needs them; without gpu, our own kernel serves


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """An environment in which the optional packages are not installed, as far as imports can tell."""
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "names = ('transformers', 'datasets', 'tensorboard', 'wandb', 'mlflow', 'comet_ml', 'trackio', 'lm_eval')\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name in names else find(name, *a)\n"
        "class Hidden:\n"
        "    def find_spec(self, name, *a):\n"
        "        if name in names:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    return {**os.environ, "PYTHONPATH": str(hide)}


def test_the_packages_of_an_extra_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    assert project["name"] == "ingot-llm"
    assert {name: tuple(packages) for name, packages in declared.items() if name not in NEVER_MISSING} == EXTRAS


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_a_missing_extra_names_its_packages(extra: str) -> None:
    assert str(MissingExtra("this", extra)).endswith(f"which are not installed: {COMMANDS[extra]}")


def test_training_with_tensorboard_names_the_package_at_start_up(
    ingot: Ingot, data: Path, tmp_path: Path, without: dict[str, str]
) -> None:
    arguments = ["train", *TINY, f"data={data}", "save_folder=run", "loggers.tensorboard={}"]
    done = ingot(*arguments, check=False, env=without)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert COMMANDS["tensorboard"] in done.stderr and not (tmp_path / "run").exists()


def test_preparing_a_hub_dataset_names_the_packages(
    ingot: Ingot, data: Path, tmp_path: Path, without: dict[str, str]
) -> None:
    arguments = ["prepare", "--dataset", "some/dataset", "--out_root", "out", "--tokenizer", str(data / "tokenizer")]
    done = ingot(*arguments, "--num_workers", "1", check=False, env=without)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert COMMANDS["hf"] in done.stderr


def test_evaluating_with_the_harness_names_the_package(ingot: Ingot, without: dict[str, str]) -> None:
    done = ingot("eval", "run", "--harness", "piqa", check=False, env=without)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert COMMANDS["eval"] in done.stderr


def test_the_doctor_names_the_packages(ingot: Ingot, without: dict[str, str]) -> None:
    lines = ingot("doctor", check=False, env=without).stdout.splitlines()
    for extra, command in COMMANDS.items():
        (line,) = (line for line in lines if f"extra {extra} " in line)
        assert line.startswith("warn") and line.endswith(command), line


@pytest.mark.parametrize("text", ["pip install ingot", "pip install 'ingot[hf]'", "the extra 'ingot[hf]'"])
def test_the_scan_finds_the_other_project(text: str) -> None:
    assert INSTALL_INGOT.search(text)


def test_nothing_tells_anyone_to_install_the_other_project() -> None:
    files = [
        p for folder in ("src", "docs", "containers", "examples") for p in (ROOT / folder).rglob("*") if p.is_file()
    ]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")]
    for path in files:
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".yml", ".sh", "") and "__pycache__" not in path.parts:
            found = INSTALL_INGOT.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{path}: {found}"
