"""`make docs` fails if a link, a heading, a menu entry or a name in the code does not exist."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("tools", "docs", "examples", "containers", "benchmarks/results")
DEFECTS = {
    "no-such-page.md": "A [link](no-such-page.md).",
    "no-such-heading": "A [heading](guides/train.md#no-such-heading).",
    "no-such-picture.png": "![A picture](no-such-picture.png)",
    "guides/no-such-entry": "```{toctree}\nguides/no-such-entry\n```",
    "no_such_function": "```{eval-rst}\n.. autofunction:: ingot.no_such_function\n```",
}


@pytest.mark.slow
def test_each_broken_link_or_reference_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    for name in PARTS:
        shutil.copytree(ROOT / name, tmp_path / name)
    for page in [*ROOT.glob("*.md"), ROOT / "LICENSE"]:
        shutil.copy(page, tmp_path)
    (tmp_path / "docs" / "orphan.md").write_text("# A page that no menu names\n")
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write("\n" + "\n\n".join(DEFECTS.values()) + "\n")
    words = [sys.executable, str(tmp_path / "tools" / "docs" / "build.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    warnings = done.stderr.splitlines()
    for defect in [*DEFECTS, "orphan.md"]:
        assert any(defect in line for line in warnings), f"{defect}\n{done.stderr}"
