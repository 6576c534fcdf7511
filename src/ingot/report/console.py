"""A run on the screen: a live bar with ETA on a terminal, plain lines otherwise; logs/train.log gets all of it too."""

import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from ingot.config.secrets import redact
from ingot.training.listener import Row
from ingot.training.runtime.run_files import LOGS

PLAIN_SECONDS = 1.0  # at most one plain line in this time, besides the first, the last and evaluations


class _Remaining(ProgressColumn):
    """The trainer's own estimate: from the step time, not from how fast the bar was redrawn."""

    def render(self, task: Task) -> Text:
        return Text(f"ETA {task.fields['eta']}", style="cyan")


class Console:
    """Prints decisions, progress and evaluations."""

    def __init__(self, folder: str, console: RichConsole | None = None):
        self.console = console or RichConsole(highlight=False, soft_wrap=True)
        self.log_path = Path(folder) / LOGS / "train.log"
        self.log: IO[str] | None = None
        self.early: list[str] = []  # said before the run folder exists
        self.total = 0
        self.last_line = 0.0
        self.bar: Progress | None = None

    def note(self, text: str) -> None:
        self._say(text)

    def warn(self, text: str) -> None:
        self._say(f"warning: {text}", style="yellow")

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        self.total = total
        self.log = self.log_path.open("a", encoding="utf-8")
        for line in self.early:
            self._log(line)
        if self.console.is_terminal and batch < total:
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"), _Remaining()
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task(f"batch {batch}/{total}", total=total, completed=batch, figures="", eta="?")
            self.bar.start()

    def rewind(self, batch: int, state: dict[str, Any] | None) -> None:
        pass

    def row(self, row: Row, batch: int) -> None:
        figures, eta = _figures(row), _clock(row.get("time/remaining_estimate"))
        line = f"[batch={batch}/{self.total}] {figures} | ETA {eta}"
        evaluated = "metrics/eval/LanguageCrossEntropy" in row
        if self.bar is not None:
            self.bar.update(
                self.task, completed=batch, description=f"batch {batch}/{self.total}", figures=figures, eta=eta
            )
            if evaluated:
                self.bar.console.print(f"[batch={batch}/{self.total}] {_evaluation(row)}", markup=False)
        else:
            now = time.monotonic()
            if evaluated or batch == self.total or now - self.last_line >= PLAIN_SECONDS:
                self.console.print(line + (f" | {_evaluation(row)}" if evaluated else ""), markup=False)
                self.last_line = now
        self._log(line + (f" | {_evaluation(row)}" if evaluated else ""))

    def state(self) -> dict[str, Any]:
        return {}

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.log is not None:
            self.log.close()
            self.log = None

    def _say(self, text: str, style: str | None = None) -> None:
        text = redact(text)
        self.console.print(text, style=style, markup=False)
        self._log(text)

    def _log(self, text: str) -> None:
        if self.log is None:
            self.early.append(text)
        else:
            self.log.write(f"{datetime.now().isoformat(timespec='seconds')} {text}\n")
            self.log.flush()


def _figures(row: Row) -> str:
    parts = []
    if "loss/train/total" in row:
        rate = next(value for key, value in row.items() if key.startswith("lr-"))
        parts = [
            f"loss {row['loss/train/total']:.4f}",
            f"grad {row['l2_norm/grad/global']:.3g}",
            f"lr {rate:.2e}",
            f"{row['throughput/tokens_per_sec']:,.0f} tok/s",
            f"MFU {row['throughput/device/mfu']:.1%} (causal {row['throughput/device/mfu_causal']:.1%})",
        ]
    return " | ".join(parts)


def _evaluation(row: Row) -> str:
    text = f"eval loss {row['metrics/eval/LanguageCrossEntropy']:.4f}"
    text += f", perplexity {row['metrics/eval/LanguagePerplexity']:.2f}"
    if "metrics/eval/BitsPerByte" in row:
        text += f", {row['metrics/eval/BitsPerByte']:.4f} bits per byte"
    return text


def _clock(hours: float | None) -> str:
    return "?" if hours is None else str(timedelta(seconds=round(hours * 3600)))
