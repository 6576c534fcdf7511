"""The commands of a Markdown page, to run them as a reader would: fenced `bash`, `console` and `python` blocks, in order.

A block that needs what a test machine lacks is marked, with the reason:

    <!-- not run: needs a Slurm cluster -->

Its commands are still checked to be commands that ingot takes.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from os import environ
from pathlib import Path

from warm_process import warm_shell

MARK = re.compile(r"<!-- not run: (.+) -->")
FENCE = re.compile(r"^( *)(```+)(\w*)\n(.*?)^\1\2$", re.DOTALL | re.MULTILINE)
HERE = re.compile(r"<<'(\w+)'$")
NUMBER = re.compile(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str
    """Why the block is not run; empty if it is."""

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with the output that the page shows for it; no output where the page shows none."""
        if self.language == "python":
            return [(self.text, [])]
        found: list[tuple[str, list[str]]] = []
        continued, end = False, ""
        for line in self.text.splitlines():
            if end:  # within a here-document, whose mark ends it
                found[-1] = (f"{found[-1][0]}\n{line}", [])
                end = "" if line == end else end
            elif continued or self.language == "bash" or line.startswith("$ "):
                text = line.removeprefix("$ ") if self.language == "console" and not continued else line
                if continued:
                    found[-1] = (f"{found[-1][0]}\n{text}", [])
                elif text.strip():
                    found.append((text, []))
                continued = text.endswith("\\")
                end = here[1] if (here := HERE.search(text)) else ""
            else:
                found[-1][1].append(line)
        return found


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that hold commands or Python."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        if fence[3] in ("bash", "console", "python"):
            before = text[: fence.start()].rstrip().rpartition("\n")[2]
            mark = MARK.fullmatch(before.strip())
            line = text.count("\n", 0, fence.start()) + 1
            found.append(Block(page, line, fence[3], fence[4], mark[1] if mark else ""))
    return found


def run(command: str, folder: Path, python: bool = False, timeout: int = 300) -> str:
    """Run a command as a reader would type it, with `ingot` on the path; all that it prints."""
    words = [sys.executable, "-c", command] if python else ["bash", "-euc", command]
    env = {**environ, **warm_shell(), "COLUMNS": "120"}
    done = subprocess.run(
        words, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}"
    return done.stdout


def shape(line: str) -> str:
    """A line without what differs from run to run and machine to machine: its numbers."""
    return NUMBER.sub("#", " ".join(line.split()))


def missing_line(shown: list[str], printed: str) -> str | None:
    """The first line of a transcript that a command did not print, compared by shape, in order; None if all were.

    `...` in a line stands for any text, on its own for any lines.
    """
    lines = iter(map(shape, printed.splitlines()))
    for line in shown:
        pattern = re.compile(".*".join(re.escape(part) for part in shape(line).split("...")))
        if line.strip() and not any(pattern.fullmatch(other) for other in lines):
            return line
    return None


def ingot_calls(command: str) -> list[list[str]]:
    """The arguments of each `ingot` call in a command."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    calls: list[list[str]] = []
    for position, word in enumerate(words):
        before = words[position - 1] if position else ";"
        is_command = before in ("|", "||", "&&", ";", "&") or re.match(r"[A-Z_]+=", before)
        if word == "ingot" and is_command:
            rest = words[position + 1 :]
            end = next((i for i, w in enumerate(rest) if w in ("|", "||", "&&", ";", ">", "&")), len(rest))
            calls.append(rest[:end])
    return calls
