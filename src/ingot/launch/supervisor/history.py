"""What the records of a launch say, put together: attempts with their ends, nodes that are out, stops, progress."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from ingot.launch.protocol import LOCAL
from ingot.launch.supervisor.records import (
    Cause,
    Closed,
    Excluded,
    Judged,
    Launched,
    Opened,
    PhaseBegan,
    Started,
    StopRequested,
)
from ingot.launch.supervisor.state_file import current_launch

LAUNCH_ENDING_STOPS = ("user", "wall-time")
"""Reasons that end the launch. A time limit or a signal is the cluster's: it ends this start of the job only."""
DAY = timedelta(days=1)
LAUNCHER_GONE = "its launcher was killed, or the machine was restarted"
"""Why an attempt on one machine was left open."""


@dataclass(frozen=True)
class ClosedAttempt:
    """An attempt that has ended."""

    opened: Opened
    closed: Closed
    is_as_requested: bool = False
    """It was asked to stop, and did."""

    @property
    def cause(self) -> Cause:
        return self.closed.cause

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(self.opened.nodes)


@dataclass
class History:
    """The last launch of a run."""

    launched: Launched | None = None
    starts: list[Started] = field(default_factory=list)
    attempts: list[ClosedAttempt] = field(default_factory=list)
    open: Opened | None = None
    """The attempt that nobody has closed."""
    excluded: dict[str, Excluded] = field(default_factory=dict)
    excluded_since_start: list[Excluded] = field(default_factory=list)
    stop: StopRequested | None = None
    """The request that is in force: one that ends the launch, or one since the last start."""
    starts_in_vain: int = 0
    """The last starts of the job that opened no attempt."""
    judgments: list[Judged] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    """When nodes were left out because of a fault."""

    @property
    def nodes_needed(self) -> int:
        return self.launched.nodes if self.launched else 1

    @property
    def is_local(self) -> bool:
        """Whether it runs on one machine, under its launcher."""
        return self.launched is not None and self.launched.back_end == LOCAL

    def resume(self, run: str) -> str:
        """The command that continues the run."""
        return (self.launched.command if self.launched else "") or f"ingot launch resume {run}"

    @property
    def allocation(self) -> tuple[str, ...]:
        return self.starts[-1].nodes if self.starts else ()

    @property
    def start_prefix(self) -> str:
        """What the names of the last start's attempts begin with."""
        return attempt_prefix(self.starts[-1]) if self.starts else ""

    def usable_nodes(self, without: Sequence[str] = ()) -> list[str]:
        """Nodes of the allocation that are not left out, in its order."""
        return [node for node in self.allocation if node not in self.excluded and node not in without]

    def since_checkpoint(self) -> list[ClosedAttempt]:
        """The attempts that ended since the newest checkpoint was written, with the one that wrote it."""
        begin, best = 0, self.attempts[0].opened.step if self.attempts else 0
        for number, attempt in enumerate(self.attempts):
            if attempt.closed.step > best:
                begin, best = number, attempt.closed.step
        return self.attempts[begin:]

    def replacements_within_a_day(self, now: str) -> int:
        end = datetime.fromisoformat(now)
        return sum(end - datetime.fromisoformat(time) < DAY for time in self.replaced)

    def progress_since_start(self) -> bool:
        """Whether this start of the job has led to a new checkpoint."""
        if not self.starts:
            return False
        epochs = [a for a in self.attempts if a.opened.attempt.startswith(self.start_prefix)]
        return any(attempt.closed.step > self.starts[-1].step for attempt in epochs)


def attempt_prefix(started: Started) -> str:
    """What the names of a start's attempts begin with: JOB.RESTART."""
    return f"{started.job}.{started.restart}."


def attempts_before(records: Sequence[Any], job: str, restart: int) -> int | None:
    """How many attempts an earlier supervisor of this very start of the job, which was killed, has opened; None if this
    is the first one."""
    if not any((r.job, r.restart) == (job, restart) for r in records if isinstance(r, Started)):
        return None
    return sum(isinstance(r, Opened) and r.attempt.startswith(f"{job}.{restart}.") for r in records)


def was_started_again(records: Sequence[Any], job: str, restart: int) -> bool:
    """Whether this launch has a later start of the job than this one."""
    return any(r.job == job and r.restart > restart for r in current_launch(records) if isinstance(r, Started))


def read_history(records: Sequence[Any]) -> History:
    """Raises ValueError if an attempt was opened while another was open, or closed twice."""
    history = History()
    fault_out = False
    for record in current_launch(records):
        if isinstance(record, Launched):
            history.launched = record
        elif isinstance(record, Started):
            history.starts.append(record)
            history.starts_in_vain += 1
            history.excluded_since_start = []
            if history.stop is not None and history.stop.reason not in LAUNCH_ENDING_STOPS:
                history.stop = None
        elif isinstance(record, Opened):
            if history.open is not None:
                raise ValueError(f"attempt {record.attempt} was opened before {history.open.attempt} was closed")
            history.open, history.starts_in_vain = record, 0
        elif isinstance(record, PhaseBegan):
            if record.copied and history.open is not None and history.open.epoch == record.epoch:
                history.open = replace(history.open, copied=record.copied)
        elif isinstance(record, Closed):
            if history.open is None or history.open.epoch != record.epoch:
                raise ValueError(f"epoch {record.epoch} was closed, and it was not open")
            as_requested = history.stop is not None and record.cause.kind == "stopped"
            history.attempts.append(ClosedAttempt(history.open, record, as_requested))
            history.open = None
        elif isinstance(record, StopRequested):
            if history.stop is None or history.stop.reason not in LAUNCH_ENDING_STOPS:
                history.stop = record
        elif isinstance(record, Excluded):
            history.excluded.setdefault(record.node, record)
            history.excluded_since_start.append(record)
            fault_out = fault_out or not record.is_drained
        elif isinstance(record, Judged):
            history.judgments.append(record)
            if fault_out:
                history.replaced.append(record.time)
            fault_out = False
    return history
