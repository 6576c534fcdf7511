"""TensorBoard's event files, written without torch. Each process writes a file of its own, which begins by purging the
steps that it repeats: the viewer drops them."""

import time
from typing import Any

from ingot.config.dotted_keys import flatten
from ingot.config.training import TensorBoardConfig
from ingot.report.trackers.base import Summary, TrackedRun, Tracker, Values
from ingot.training.runtime.run_files import TENSORBOARD


class TensorBoard(Tracker):
    """Each metric is a scalar under its own name."""

    def __init__(self, config: TensorBoardConfig):
        self.config = config
        self.writer: Any = None

    def open(self, run: TrackedRun, after: int) -> str:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(self.config.log_dir or str(run.folder / TENSORBOARD))
        self.rewind(after)
        if after < 0:  # the first time: the purge of a later one would begin behind it
            about = {"starts from": run.forked_from} if run.forked_from else {}
            self.table(0, "config", ["key", "value"], [list(item) for item in (about | flatten(run.config)).items()])
        return run.id or run.name

    def rewind(self, step: int) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self.writer.add_event(Event(step=step + 1, session_log=start))
        return True

    def log(self, step: int, values: Values) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary as Scalars

        self._add(step, Scalars(value=[Scalars.Value(tag=name, simple_value=values[name]) for name in values]))

    def event(self, step: int, kind: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step, text_pb(f"events/{kind}", text))

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        lines = [columns, ["---"] * len(columns), *rows]
        self._add(step, text_pb(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)))

    def flush(self) -> None:
        self.writer.flush()

    def close(self, summary: Summary) -> None:
        self.event(summary.step, "state", f"{summary.state} at batch {summary.step}")
        self.writer.close()

    def _add(self, step: int, content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(step=step, summary=content, wall_time=time.time()))


def _cell(value: Any) -> str:
    """A value as text of a table in Markdown."""
    return "".join(f"\\{sign}" if sign in "|\\`*_<>[]" else sign for sign in " ".join(str(value).split()))
