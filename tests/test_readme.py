"""Every command of the README runs, in order, in one folder, as a reader would type it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README assumes it: with some texts, and with `ingot` on the path."""
    folder = tmp_path_factory.mktemp("reader")
    texts = folder / "my-texts"
    texts.mkdir()
    for split, names in (("train", ["ast", "os", "json/decoder"]), ("val", ["shlex"])):
        documents = [(Path(os.__file__).parent / f"{name}.py").read_text() for name in names]
        (texts / f"{split}.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return folder


def shell(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_of_the_readme_runs(folder: Path) -> None:
    ran, cut = [], "max_duration=12ba eval_subset_num_batches=2"
    for language, block in BLOCKS:
        if language == "python":
            (folder / "snippet.py").write_text(block)
            shell("python snippet.py", folder)
            continue
        for command in block.strip().splitlines():
            if command == "make demo":  # the same, cut to a few steps
                shell(f"make -s -C {shlex.quote(str(ROOT))} demo ARGS='--out {folder}/demo {cut}'", folder)
            elif command == "make test":
                assert os.environ.get("PYTEST_CURRENT_TEST")  # this is it
            else:
                shell(command, folder)
            ran.append(command)
    assert len(ran) > 10
    for result in ("demo/loss.png", "demo/hf/config.json", "demo/run/metrics.jsonl", "my-model/model.safetensors"):
        assert (folder / result).stat().st_size > 100, result

    before = (folder / "demo" / "run" / "metrics.jsonl").read_bytes()
    again = shell(f"ingot demo --out {folder}/demo {cut}", folder)  # a second time: quick and harmless
    assert "has finished its 12 batches" in again
    assert (folder / "demo" / "run" / "metrics.jsonl").read_bytes() == before


def test_the_readme_shows_a_picture_that_exists() -> None:
    picture = re.search(r"!\[.*?\]\((.*?)\)", README)
    assert picture is not None
    content = (ROOT / picture[1]).read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_the_makefile_has_what_the_readme_names() -> None:
    assert shutil.which("make")
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
