"""A real pseudo-terminal of a given width, with a command in it."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from warm_process import WarmProcess

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOR = re.compile(r"\x1b\[(?!0m)[0-9;]+m")


class Terminal:
    """Runs `ingot ARGUMENTS` in a pseudo-terminal. `text` is everything that it has shown.

    A `fresh` interpreter imports what it needs by itself; others have done so (`warm_process`).
    """

    def __init__(
        self, *arguments: str, columns: int = 80, cwd: Path | None = None, fresh: bool = False, **variables: str
    ):
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
        self.text = ""
        self.terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = (subprocess.Popen if fresh else WarmProcess)(
            [sys.executable, "-m", "ingot.cli.main", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd,
            start_new_session=True, preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if fresh else None,
            env={**inherited, "TERM": "xterm-256color", **variables},
        )  # fmt: skip
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def wait_for(self, pattern: str, timeout: float = 120) -> re.Match[str]:
        """Read until the plain text matches."""
        end = time.monotonic() + timeout
        while (found := re.search(pattern, self.plain)) is None:
            assert time.monotonic() < end and self._read(), f"{pattern} did not appear in:\n{self.plain}"
        return found

    def end(self, timeout: float = 120) -> int:
        """Read until the command ends; its exit code."""
        end = time.monotonic() + timeout
        while self._read():
            assert time.monotonic() < end, f"still running:\n{self.plain}"
        os.close(self.terminal)
        return self.process.wait()

    @property
    def plain(self) -> str:
        """The text without control sequences."""
        return CONTROL.sub("", self.text)

    @property
    def lines(self) -> list[str]:
        """The lines, and each state of a line that was drawn again."""
        return [line.rstrip() for line in re.split(r"[\r\n]+", self.plain)]

    def _read(self) -> bool:
        """Read what is there, waiting a little; False at the end."""
        if not select.select([self.terminal], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self.terminal, 1 << 16)
        except OSError:  # how Linux says that the other side has closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)
