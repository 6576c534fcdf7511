"""Starts the trackers' process next to a run, and ends it with the run."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.report.trackers import sidecar
from ingot.training.listener import RunListener

PATIENCE = 5.0  # seconds for the process to keep its own deadline


class TrackerProcess(RunListener):
    """Owns the process. Rows reach it through the files of the run, so nothing here waits for a tracker."""

    def __init__(self, folder: str, show: Callable[[str], None]):
        self.folder, self.show = Path(folder), show
        self.process: subprocess.Popen[str] | None = None
        self.reader: threading.Thread | None = None

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        if batch >= total:
            return
        self.process = subprocess.Popen(
            [sys.executable, "-m", sidecar.__name__, str(self.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._show_lines, daemon=True)
        self.reader.start()

    def end(self) -> None:
        if self.process is None or self.reader is None or self.process.stdin is None:
            return
        try:
            self.process.stdin.write("failed\n" if sys.exc_info()[0] else "end\n")
            self.process.stdin.close()
        except OSError:  # it has died
            pass
        try:
            self.process.wait(sidecar.DEADLINE + PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.reader.join(1.0)
        self.process = None

    def _show_lines(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self.show(line.rstrip("\n").removeprefix("warning: "))
