"""`launch/state.jsonl` of a run on one machine: its launcher writes the same records as the supervisor of a job.

The launcher must see a hang or a signal at once, so it never waits long for a disk: a thread writes, and looks for the
file STOP. A run whose records cannot be written goes on without them.
"""

import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ingot.config.secrets import redact
from ingot.launch.agent.rank_group import RankGroup
from ingot.launch.protocol import LOCAL, LaunchFolder
from ingot.launch.supervisor.diagnose import diagnose_unfinished
from ingot.launch.supervisor.failure_log import node_name
from ingot.launch.supervisor.history import LAUNCHER_GONE, History, read_history
from ingot.launch.supervisor.judge import judge
from ingot.launch.supervisor.progress import is_stop_there, newest_checkpoint, who_asked
from ingot.launch.supervisor.records import (
    Cause,
    Closed,
    Judged,
    Launched,
    Opened,
    Phase,
    PhaseBegan,
    Started,
    StopReason,
    StopRequested,
)
from ingot.launch.supervisor.state_file import StateFile, Superseded, now

DISK_SECONDS, STUCK_SECONDS = 10.0, 1.0  # for the disk to answer; when it did not the last time
STOP_SECONDS = 1.0  # between two looks for the file STOP
PHASE_SECONDS = 10.0  # at least, between two records of a save or an evaluation
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "its terminal was closed"}


class LocalState:
    """The records of one launch."""

    def __init__(self, run: Path, is_kept: bool = True):
        """is_kept: whether the file is ours; a machine of several keeps its records in memory"""
        self.run, self.host = run, node_name()
        self._file = StateFile(LaunchFolder(run).path) if is_kept else None
        self.records: list[Any] = self._file.records if self._file is not None else []
        self._wanted: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._problem, self._said, self._is_stuck, self._is_ours = "", "", False, True
        self._asked = ""
        self._phase: Phase = "starting"
        self._phase_at = float("-inf")
        if self._file is not None:
            threading.Thread(target=self._serve, args=(self._file,), name="ingot-state", daemon=True).start()

    @property
    def history(self) -> History:
        return read_history(self.records)

    def begin(self, command: str, step: int) -> None:
        """A user starts the run. An attempt that a killed launcher has left open is closed first."""
        with suppress(ValueError):  # damaged records of an earlier launch do not concern this one
            if (history := self.history).open is not None:
                gone = Cause("supervisor", LAUNCHER_GONE)
                cause = gone if history.is_local else diagnose_unfinished(history, {}, {})
                step = newest_checkpoint(self.run)
                self._write(Closed(time=now(), epoch=history.open.epoch, cause=cause, step=step))
        number = sum(isinstance(record, Launched) for record in self.records)
        self._write(
            Launched(time=now(), launch=f"{LOCAL}.{number}", back_end=LOCAL, nodes=1, command=redact(command)),
            Started(time=now(), launch=f"{LOCAL}.{number}", job=LOCAL, restart=number, host=self.host,
                    nodes=(self.host,), step=step),
        )  # fmt: skip

    def open(self, number: int, step: int, copied: int) -> Opened:
        """The next attempt begins, from this checkpoint or from a newer copy in host memory."""
        epoch = max((record.epoch for record in self.records if isinstance(record, Opened)), default=0) + 1
        name = f"{self.history.start_prefix}{number}"
        opened = Opened(time=now(), epoch=epoch, attempt=name, nodes=(self.host,), step=step,
                        copied=copied if copied > step else 0)  # fmt: skip
        self._phase, self._phase_at = "starting", float("-inf")
        self._write(opened)
        return opened

    def look(self, group: RankGroup, signals: Sequence[int]) -> None:
        """While an attempt runs: who wants it to stop, and what the ranks are doing."""
        if signals:
            self.note_signal(signals[0])
        elif self._asked:
            self.note_stop("user", self._asked)
        phase, time_now = group.phase(), time.monotonic()
        if phase != self._phase and (phase == "running" or time_now - self._phase_at >= PHASE_SECONDS):
            self._phase, self._phase_at = phase, time_now
            self._add(PhaseBegan(time=now(), epoch=self._epoch, phase=phase))

    @property
    def _epoch(self) -> int:
        opened = self.history.open
        return opened.epoch if opened is not None else 0

    def note_stop(self, reason: StopReason, detail: str = "") -> None:
        """Somebody wants the run to stop; the first request counts."""
        if self.history.stop is None:
            self._add(StopRequested(time=now(), reason=reason, detail=detail))

    def note_signal(self, number: int) -> None:
        sent = signal.Signals(number)
        self.note_stop("signal", SIGNALS.get(sent, sent.name))

    def close(self, cause: Cause, step: int) -> Judged:
        """The attempt has ended. Returns what follows, which `act` writes down."""
        self._add(Closed(time=now(), epoch=self._epoch, cause=cause, step=step))
        return self.judge()

    def judge(self) -> Judged:
        return judge(self.records, now(), str(self.run)).judged

    def act(self, judged: Judged, reason: str = "") -> None:
        """What is done now. reason: better than the judge's, who does not know of copies in host memory"""
        self._write(replace(judged, reason=reason or judged.reason))

    def stop(self) -> None:
        """The run has been asked to stop, and has ended."""
        self.act(self.judge())

    def end(self) -> None:
        """The thread ends when all is written."""
        self._wanted.put(None)

    # --- writing

    def _add(self, *records: Any) -> threading.Event:
        """Add records, and have them written some time."""
        done = threading.Event()
        if self._file is None:
            self.records.extend(records)
            done.set()
            return done
        for record in records:
            self._file.add(record)
        self._wanted.put(done)
        return done

    def _write(self, *records: Any) -> None:
        """Add records, and wait until they are on disk."""
        is_done = self._add(*records).wait(STUCK_SECONDS if self._is_stuck else DISK_SECONDS)
        self._is_stuck = not is_done
        problem = self._problem if is_done else "its disk does not answer"
        if problem != self._said and problem:
            assert self._file is not None
            print(f"warning: {self._file.path} cannot be written: {problem}; the run goes on, and `ingot status` does "
                  "not show how", file=sys.stderr)  # fmt: skip
        self._said = problem

    def _serve(self, file: StateFile) -> None:
        """The thread."""
        while True:
            try:
                done = self._wanted.get(timeout=STOP_SECONDS)
            except queue.Empty:
                if is_stop_there(self.run):
                    self._asked = self._asked or who_asked(self.run)
                continue
            if done is None:
                return
            try:
                if self._is_ours:
                    self._problem = "" if file.flush() else "its disk is full or read-only"
            except Superseded:
                self._is_ours, self._problem = False, "another process has written it since"
            except OSError as error:
                self._problem = error.strerror or str(error)
            done.set()
