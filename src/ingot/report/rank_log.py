"""What the ranks beyond the first have to say, each in its own file: logs/rank-N.log."""

from datetime import datetime
from pathlib import Path
from typing import Any

from ingot.config.secrets import redact
from ingot.training.listener import Row
from ingot.training.runtime.run_files import LOGS


class RankLog:
    """Notes and warnings of one rank. Metrics are the first rank's to write."""

    def __init__(self, folder: str, rank: int):
        self.path = Path(folder) / LOGS / f"rank-{rank}.log"
        self.early: list[str] = []  # said before the first rank has made the run folder
        self.begun = False

    def note(self, text: str) -> None:
        line = f"{datetime.now().isoformat(timespec='seconds')} {redact(text)}\n"
        if not self.begun:
            self.early.append(line)
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def warn(self, text: str) -> None:
        self.note(f"warning: {text}")

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        self.begun = True
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(self.early)

    def rewind(self, batch: int, state: dict[str, Any] | None) -> None:
        pass

    def row(self, row: Row, batch: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def end(self) -> None:
        pass
