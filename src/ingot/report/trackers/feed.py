"""Feeds one tracker from the files of a run: metrics.jsonl is the queue.

A row is sent once it is in the file, and rows that the tracker holds already are passed over, so nothing is lost and
nothing sent twice however often the run or this process is killed. A resumed run repeats steps with the same values,
which are passed over too. Only a rollback (guards.jsonl) makes steps whose values differ: the tracker forgets the old
ones or, where it cannot, the repeated steps go under a new run of the same group.

`trackers/NAME.json` in the run folder remembers the tracker's id of the run and what it holds.
"""

import json
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ingot.config.evaluation import GENERATED
from ingot.config.secrets import redact
from ingot.report.trackers.base import Summary, TrackedRun, Tracker, Values
from ingot.storage.atomic import write_json
from ingot.training.runtime.run_files import FAILURES, FINISHED, GUARDS, METRICS, TRACKERS

MOST_EVENTS = 200  # sent to a tracker at a time; a run that fails more often shows the last ones


class FeedState(msgspec.Struct):
    """What trackers/NAME.json holds."""

    id: str | None = None
    sent: int = -1
    """The last step that the tracker was given."""
    closed: int = -1
    """The last step that it had at its last orderly end."""
    is_open: bool = False
    rollbacks: int = 0
    """Lines of guards.jsonl, and of failures.jsonl below, that were dealt with."""
    failures: int = 0
    renewed: int = 0
    """How often a rollback began a new run."""
    generated: int = -1
    """The last batch whose generated texts were sent."""


@dataclass
class LineReader:
    """The complete lines that a growing file has gained."""

    path: Path
    offset: int = 0

    def read(self, most_bytes: int = 1 << 22) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(most_bytes)
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        # a line that is longer than what is read at a time is not a row: it is passed over
        self.offset += len(whole) if whole or len(data) < most_bytes else len(data)
        data = whole
        found = []
        for line in data.splitlines():
            with suppress(ValueError, RecursionError):  # a line that a full disk has damaged
                content = json.loads(line)
                if isinstance(content, dict):
                    found.append(content)
        return found


class Feed:
    """Brings a tracker up to date with a run folder, again and again."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun):
        self.tracker, self.run = tracker, run
        self.state_path = run.folder / TRACKERS / f"{name}.json"
        self.state = self._read_state()
        self.logged = self.text_sent = -1
        """What the tracker was given, which may not be flushed."""
        self._read_from_start()
        self.last: Values = {}
        self.behind = True
        """Whether the last `send` may have left rows."""

    def open(self) -> None:
        """Connect. May be called again after a failure."""
        state = self.state
        if state.is_open and not self.tracker.keeps_unclosed:
            self.tracker.discard_unclosed(self.run.tracker_folder)
            state.sent = state.closed
            state.generated = min(state.generated, state.closed)
        self._open_tracker()
        held = self.tracker.last_step()
        if held is not None:
            state.sent = held
        state.is_open = True
        self.logged, self.text_sent = state.sent, state.generated
        self._write_state()

    def tell_restart(self) -> None:
        """Send that another process continues the run."""
        if self.state.sent >= 0:
            self.tracker.event(
                self.state.sent, "restart", f"continues; the tracker has the steps up to {self.state.sent}"
            )

    def send(self) -> None:
        """Send what is new. What a failure leaves unsent is sent the next time."""
        self.behind = self._read_on()
        self._follow_rollbacks()
        while self.queue:
            row = self.queue[0]
            step = int(row["time/batch"])
            self._send_texts(before=step)
            self.last = {key: value for key, value in row.items() if value is not None}
            if step > self.logged:
                self.tracker.log(step, self.last)
                self.logged = step
            scores = [[*_task_and_metric(name), self.last[name]] for name in self.last if "-shot/" in name]
            if scores and step > self.state.sent:
                self.tracker.table(step, "evaluation", ["task", "metric", "value"], scores)
            self.queue.popleft()
        self._send_texts(before=self.logged + 1)
        self._send_failures()
        if self.logged > self.state.sent or self.text_sent > self.state.generated:
            self.tracker.flush()
            self.state.sent, self.state.generated = self.logged, self.text_sent
            self._write_state()

    def close(self, crashed: bool) -> None:
        self._send_texts(before=sys.maxsize)
        self.state.generated = self.text_sent
        state = "crashed" if crashed else "finished" if (self.run.folder / FINISHED).exists() else "stopped"
        self.tracker.close(Summary(state, int(self.last.get("time/batch", 0)), self.last))
        self.state.closed, self.state.is_open = self.state.sent, False
        self._write_state()

    def unsent(self) -> int:
        """How many rows the tracker has not been given."""
        reader, count = LineReader(self.run.folder / METRICS), 0
        while rows := reader.read():
            count += sum(row.get("time/batch", -1) > self.state.sent for row in rows)
        return count

    def _read_from_start(self) -> None:
        self.rows, self.text_lines = (LineReader(self.run.folder / name) for name in (METRICS, GENERATED))
        self.queue: deque[dict[str, Any]] = deque()
        self.texts: deque[dict[str, Any]] = deque()

    def _read_on(self) -> bool:
        """Take what the files have gained. Return whether there were rows."""
        rows = self.rows.read()
        self.queue += (row for row in rows if isinstance(row.get("time/batch"), int | float))
        self.texts += (line for line in self.text_lines.read() if isinstance(line.get("batch"), int))
        return bool(rows)

    def _open_tracker(self) -> None:
        suffix = f"-rollback-{self.state.renewed}" if self.state.renewed else ""
        run = replace(self.run, id=self.state.id, suffix=suffix)
        self.state.id = self.tracker.open(run, self.state.sent)

    def _follow_rollbacks(self) -> None:
        """Rewind the tracker to where the run went back to, if it did."""
        lines = LineReader(self.run.folder / GUARDS).read()
        new, self.state.rollbacks = lines[self.state.rollbacks :], len(lines)
        for line in new:
            self.tracker.event(line["batch"], "anomaly", redact(f"{line['what']}: {line['action']}"))
        back_to = min((line["back_to"] for line in new if "back_to" in line), default=None)
        if back_to is None:
            return
        if back_to < self.state.sent:
            if not self.tracker.rewind(back_to):
                self.tracker.close(Summary("rolled back", back_to))
                self.state.renewed, self.state.id, self.state.sent = self.state.renewed + 1, None, back_to
                self._open_tracker()
            self.state.sent = self.state.closed = back_to
            self.state.generated = min(self.state.generated, back_to)
            self.logged, self.text_sent = self.state.sent, self.state.generated
        self._write_state()
        self._read_from_start()  # the rows read before may be of both times
        self._read_on()

    def _send_texts(self, before: int) -> None:
        """Send the generated texts of the batches before one."""
        while self.texts and int(self.texts[0]["batch"]) < before:
            line = self.texts[0]
            batch = int(line["batch"])
            if batch > self.text_sent:
                rows = [[batch, text["prompt"], text["text"]] for text in line["texts"]]
                self.tracker.table(max(batch, self.logged), "generated", ["batch", "prompt", "text"], rows)
                self.text_sent = batch
            self.texts.popleft()

    def _send_failures(self) -> None:
        lines = LineReader(self.run.folder / FAILURES).read()
        new, self.state.failures = lines[self.state.failures :], len(lines)
        for line in new[-MOST_EVENTS:]:
            if line.get("kind") != "start":
                where = f"rank {line.get('rank')} on {line.get('host')}"
                self.tracker.event(int(line.get("batch", 0)), "failure", redact(f"{where}: {line.get('message')}"))
        if new:
            self._write_state()

    def _read_state(self) -> FeedState:
        try:
            return msgspec.json.decode(self.state_path.read_bytes(), type=FeedState)
        except (FileNotFoundError, msgspec.DecodeError):
            return FeedState()

    def _write_state(self) -> None:
        self.state_path.parent.mkdir(exist_ok=True)
        write_json(self.state_path, msgspec.to_builtins(self.state))


def _task_and_metric(name: str) -> tuple[str, str]:
    """`copa/0-shot` and `InContextLearningMultipleChoiceAccuracy` of a metric of a downstream task."""
    task, _, metric = name.removeprefix("metrics/").rpartition("/")
    return task, metric
