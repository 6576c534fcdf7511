"""The page for a user's own text, followed literally: from an empty folder, in a terminal of 80 columns."""

import fcntl
import os
import pydoc_data.topics
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from commands import blocks
from warm_process import warm_shell

PAGE = Path(__file__).parents[2] / "docs" / "get-started" / "own-text.md"
COLUMNS = 80


def type_command(command: str, folder: Path) -> str:
    """Run a command in a pseudo-terminal; what the terminal received."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    env = {n: v for n, v in os.environ.items() if n not in ("COLUMNS", "LINES", "NO_COLOR")} | {
        **warm_shell(), "TERM": "xterm-256color",
    }  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-euc", command],
        cwd=folder,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    received = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # how Linux reports that the other side is closed
            break
        if not data:
            break
        received += data
    os.close(ours)
    text = received.decode(errors="replace")
    assert process.wait() == 0, f"$ {command}\n{text}"
    return text


SHORT = {"quickstart": " --minutes 0.01", "train": " max_duration=10ba"}


@pytest.mark.parametrize("more", [SHORT, pytest.param({}, marks=pytest.mark.slow)], ids=["short", "literal"])
def test_the_page_leads_from_text_to_a_model(more: dict[str, str], tmp_path: Path) -> None:
    """Each command as written; the short form cuts the time of training and nothing else."""
    (tmp_path / "my-texts").mkdir()
    topics = pydoc_data.topics.topics  # prose that no other test reads
    (tmp_path / "my-texts" / "reference.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
    seen = {}
    for block in blocks(PAGE):
        for command, _ in block.commands:
            verb = command.split()[1]
            seen[verb] = type_command(command + more.get(verb, ""), tmp_path)
    assert list(seen) == ["quickstart", "prepare", "inspect", "train", "eval", "generate", "export"]
    for made in ("quickstart/loss.png", "quickstart/hf/model.safetensors", "my-own-model/model.safetensors"):
        assert (tmp_path / made).stat().st_size > 1000
    for reason in ("- documents: ", "- vocabulary: ", "- validation: ", "- model: ", "- batch: ", "- duration: "):
        assert reason in seen["quickstart"]
    assert "The same by hand:" in seen["quickstart"]
    live = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen["train"])
    assert re.search(rf"\b\d+/{10 if more else 40}\b.*loss \d", live), live[-2000:]
    assert "Traceback" not in "".join(seen.values())
