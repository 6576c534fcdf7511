"""Every command of the README runs, in order, in one folder, as a reader would type it."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from commands import blocks, missing_line, run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CUT = "max_duration=12ba eval_subset_num_batches=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README assumes it: with some text, and the examples."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my-texts").mkdir()
    documents = [(Path(os.__file__).parent / f"{name}.py").read_text() for name in ("ast", "os", "json/decoder")]
    (folder / "my-texts" / "train.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def test_every_command_of_the_readme_runs(folder: Path) -> None:
    ran, demo = [], ""
    for block in blocks(ROOT / "README.md"):
        assert not block.not_run
        for command, _ in block.commands:
            if command.startswith("make demo"):  # the same, cut to a few steps
                demo = run(f"make -s -C {shlex.quote(str(ROOT))} demo ARGS='--out {folder}/demo {CUT}'", folder)
            elif command.startswith("make test"):
                assert os.environ.get("PYTEST_CURRENT_TEST")  # this is it
            else:
                run(command, folder)
            ran.append(command)
    assert len(ran) > 8
    for result in ("demo/loss.png", "demo/hf/config.json", "demo/run/metrics.jsonl", "my-model/model.safetensors"):
        assert (folder / result).stat().st_size > 100, result

    shown = re.search(r"^```text\n\$ make demo\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert shown is not None
    printed = re.sub(
        r"^\$ ingot train .*", "$ ingot train demo data=demo/data save_folder=demo/run", demo, flags=re.MULTILINE
    )
    assert (missing := missing_line(shown[1].splitlines(), printed.replace(f"{folder}/demo", "demo"))) is None, missing

    before = (folder / "demo" / "run" / "metrics.jsonl").read_bytes()
    again = run(f"ingot demo --out {folder}/demo {CUT}", folder)  # a second time: quick and harmless
    assert "has finished its 12 batches" in again
    assert (folder / "demo" / "run" / "metrics.jsonl").read_bytes() == before


def test_the_readme_shows_a_picture_that_exists() -> None:
    picture = re.search(r"!\[.*?\]\((.*?)\)", README)
    assert picture is not None
    content = (ROOT / picture[1]).read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_the_makefile_has_what_the_readme_names() -> None:
    assert shutil.which("make")
    for target in re.findall(r"make ([\w-]+)", README):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
