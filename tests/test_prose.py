"""The prose check finds what it forbids."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "tools" / "check_prose.py"


def check(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    page = folder / "page.md"
    page.write_text(text)
    return subprocess.run([sys.executable, str(PROGRAM), str(page)], capture_output=True, text=True)


@pytest.mark.parametrize(
    "phrase",
    ["the loss is no number", "made anew", "a kernel of ours", "mend it first", "it stands beside the other", "4 would do",
     "the bytes lie in a file", "tried to no avail", "the behaviour of the licence"],
)  # fmt: skip
def test_a_phrase_is_found_with_its_line_and_what_to_write(phrase: str, tmp_path: Path) -> None:
    done = check(f"A first line.\nHere {phrase}.\n", tmp_path)
    assert done.returncode == 1 and "page.md:2: " in done.stdout and "write " in done.stdout


def test_plain_english_passes(tmp_path: Path) -> None:
    done = check("There is no GPU here. The value is no longer used; what would do so is gone.\n", tmp_path)
    assert done.returncode == 0, done.stdout


def test_a_phrase_is_found_across_lines_of_a_comment_or_a_message(tmp_path: Path) -> None:
    for text in ("# the loss is\n    # no number\n", 'raise Error(\n    "the loss is "\n    f"no number")\n'):
        done = check(f"x = 1\n{text}", tmp_path)
        assert done.returncode == 1 and "'is no number'" in done.stdout, text


def test_code_messages_and_documentation_are_checked() -> None:
    sys.path.insert(0, str(PROGRAM.parent))
    from check_prose import CHECKED, ROOT, files

    names = {path.relative_to(ROOT).as_posix() for name in CHECKED for path in files(ROOT / name)}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    prose = {n for n in tracked if n.endswith((".py", ".md", ".sh", ".yaml")) and (ROOT / n).exists()}
    assert len(prose) > 100 and prose <= names | {".pre-commit-config.yaml"}
