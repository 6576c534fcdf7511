"""A run on the screen (a progress bar with ETA on a terminal, otherwise plain lines) and in its log file.

Only rank 0 has a screen. It logs everything to logs/train.log; the other ranks log their notes to logs/rank-N.log.
"""

import errno
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

from rich.console import Console as Screen
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from ingot.config.secrets import redact
from ingot.parallel.rank_env import ATTEMPT
from ingot.training.listener import Row, RunListener
from ingot.training.runtime.run_files import LOGS, attempt_mark

PLAIN_SECONDS = 1.0  # minimum time between plain lines, except for evaluations and the last batch
SPEED_ROWS = 32  # the speed shown is the median over these; metrics.jsonl has that of every row
LEAST_BAR = 4  # columns of the bar; figures that leave less are dropped


class _Figures(ProgressColumn):
    """Loss, speed and ETA, as many as fit; on a wide screen also gradient, learning rate and utilization."""

    def __init__(self, screen: Screen):
        self.screen = screen
        super().__init__(Column(no_wrap=True))

    def get_renderable_cache_key(self) -> None: ...

    def render(self, task: Task) -> Text:
        room = self.screen.width - len(task.description) - LEAST_BAR - 2  # a space on both sides of the bar
        row, eta = task.fields["row"], f"ETA {task.fields['eta']}"
        loss, *others = _main_figures(row) or [""]
        lines = [f"{_figures(row)} {eta}", f"{' | '.join([loss, *others])} {eta}", " | ".join([loss, *others]), loss]
        fitting = next((line for line in lines if len(line) <= room), "")
        text = Text(fitting)
        if fitting.endswith(eta):
            text.stylize("cyan", len(fitting) - len(eta))
        return text


class _Stdout:
    """Standard output, where a lost terminal is a broken pipe: writing to it may fail before the signal arrives."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        with self._lost_is_broken():
            return sys.stdout.write(text)

    def flush(self) -> None:
        with self._lost_is_broken():
            sys.stdout.flush()

    @contextmanager
    def _lost_is_broken(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise (BrokenPipeError() if error.errno == errno.EIO else error) from None


class _Output(Screen):
    """Standard output. If its reader ends (`| head`, Ctrl-C in front of `| tee`) or the terminal closes, the run
    goes on and only logs."""

    def __init__(self, **options: Any):
        super().__init__(file=_Stdout(), **options)  # type: ignore[arg-type]

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Console(RunListener):
    """Prints and logs decisions, progress and evaluations."""

    def __init__(self, folder: str, rank: int = 0):
        self.screen = _Output(highlight=False, soft_wrap=True) if rank == 0 else None
        self.log_path = Path(folder) / LOGS / ("train.log" if rank == 0 else f"rank-{rank}.log")
        self.log: IO[str] | None = None
        self.early: list[str] = []  # lines from before the run folder exists
        self.total = 0
        self.speeds: deque[float] = deque(maxlen=SPEED_ROWS)
        self.last_line = 0.0
        self.bar: Progress | None = None
        self.evaluation_start: float | None = None

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", style="yellow")

    def begin(self, batch: int, total: int, state: dict[str, Any] | None) -> None:
        self.total = total
        self.log = self.log_path.open("a", encoding="utf-8")
        if self.screen is not None and (attempt := os.environ.get(ATTEMPT)):  # the launcher marks the other ranks' logs
            self._log(attempt_mark(attempt))
        for line in self.early:
            self._log(line)
        if self.screen is not None and self.screen.is_terminal and batch < total:
            bar = BarColumn(bar_width=None)  # what the texts leave
            where = TextColumn("{task.description}", table_column=Column(no_wrap=True))
            self.bar = Progress(where, bar, _Figures(self.screen), console=self.screen, expand=True)
            self.task = self.bar.add_task(f"batch {batch}/{total}", total=total, completed=batch, row={}, eta="?")
            self.bar.start()

    def row(self, row: Row, batch: int) -> None:
        if self.screen is None:
            return
        if "throughput/tokens_per_sec" in row:
            self.speeds.append(row["throughput/tokens_per_sec"])
            row = {**row, "throughput/tokens_per_sec": statistics.median(self.speeds)}
        where, figures, eta = f"batch {batch}/{self.total}", _figures(row), _clock(row.get("time/remaining_estimate"))
        self.evaluation_start = None
        lines = _evaluations(row)
        evaluation = lines[0] if lines else ""
        told = [f"{figures} | ETA {eta}"] if figures else []
        line = f"[batch={batch}/{self.total}] {' | '.join([*told, *lines[:1]])}"
        if self.bar is not None:
            self.bar.update(self.task, completed=batch, description=where, row=row, eta=eta)
            for text in lines:
                self.screen.print(f"[batch={batch}/{self.total}] {text}", markup=False)
        elif evaluation or batch == self.total or time.monotonic() - self.last_line >= PLAIN_SECONDS:
            self.screen.print(line, markup=False)
            self.last_line = time.monotonic()
            for text in lines[1:]:
                self.screen.print(f"[batch={batch}/{self.total}] {text}", markup=False)
        self._log(line)
        for text in lines[1:]:
            self._log(text)

    def evaluating(self, what: str, done: int, total: int) -> None:
        """Shown once an evaluation has taken two seconds; where there is no bar, every ten seconds."""
        now = time.monotonic()
        if self.evaluation_start is None:
            self.evaluation_start = now
        seconds = now - self.evaluation_start
        if self.screen is None or seconds < 2 or not done or now - self.last_line < (0.2 if self.bar else 10):
            return
        self.last_line = now
        left = str(timedelta(seconds=round(seconds * (total - done) / done)))
        text = f"evaluating {what}, {done / total:.0%}"
        if self.bar is not None:
            self.bar.update(self.task, description=text, eta=left)
        else:
            self.screen.print(f"{text}, ETA {left}", markup=False)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.log is not None:
            self.log.close()
            self.log = None

    def _print(self, text: str, style: str | None = None) -> None:
        text = redact(text)
        if self.screen is not None:
            with suppress(OSError):  # standard output may be a file on a full disk
                self.screen.print(text, style=style, markup=False)
        self._log(text)

    def _log(self, text: str) -> None:
        if self.log is None:
            self.early.append(text)
        else:
            with suppress(OSError):  # a full disk: what is not written now is written when there is room
                self.log.write(f"{datetime.now().isoformat(timespec='seconds')} {text}\n")
                self.log.flush()


def _figures(row: Row) -> str:
    if "loss/train/total" not in row:
        return ""
    rate = next(value for key, value in row.items() if key.startswith("lr-"))
    loss, speed = _main_figures(row)
    figures = [loss, f"grad {row['l2_norm/grad/global']:.3g}", f"lr {rate:.2e}", speed]
    if "throughput/device/mfu" in row:  # not on a CPU
        figures.append(f"MFU {row['throughput/device/mfu']:.1%} (causal {row['throughput/device/mfu_causal']:.1%})")
    return " | ".join(figures)


def _main_figures(row: Row) -> list[str]:
    if "loss/train/total" not in row:
        return []
    return [f"loss {row['loss/train/total']:.4f}", f"{row['throughput/tokens_per_sec']:,.0f} tok/s"]


def _evaluations(row: Row) -> list[str]:
    """A line about each validation set, composites, and each task."""
    lines = []
    for name in row:
        if name.startswith("metrics/eval/") and name.endswith("/LanguageCrossEntropy"):
            lines.append(_validation(row, name.removesuffix("LanguageCrossEntropy")))
    composites = {name: value for name, value in row.items() if name.startswith("icl/")}
    if composites:
        lines.append(", ".join(f"{name.rpartition('/')[2]} {value:.4f}" for name, value in composites.items()))
    for name, value in row.items():
        task, _, metric = name.removeprefix("metrics/").rpartition("/")
        if metric.startswith("InContextLearning") and metric.endswith("Accuracy"):
            bits = row.get(f"metrics/{task}/GoldBitsPerByte")
            lines.append(f"{task} accuracy {value:.4f}" + (f", {bits:.3f} bits per byte" if bits is not None else ""))
    return lines


def _validation(row: Row, prefix: str) -> str:
    label = prefix.removeprefix("metrics/eval/").removesuffix("/")
    text = f"eval {label} loss".replace("  ", " ") + f" {row[f'{prefix}LanguageCrossEntropy']:.4f}"
    text += f", perplexity {row[f'{prefix}LanguagePerplexity']:.2f}"
    if (bits := row.get(f"{prefix}BitsPerByte")) is not None:
        text += f", {bits:.4f} bits per byte"
    return text


def _clock(hours: float | None) -> str:
    return "?" if hours is None else str(timedelta(seconds=round(hours * 3600)))
