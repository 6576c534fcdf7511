"""One attempt of a launcher without a supervisor: start the ranks of this machine, watch them, forward signals to them,
and end them together.

The watcher does not rely on the ranks: it reads exit codes, the times in heartbeat files, and process states from the
system. A rank that fails or hangs ends the others at once; a collective's timeout would take ten minutes.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import EXIT_CONTINUE, EXIT_FAULT
from ingot.launch.agent.failure import Failure
from ingot.launch.agent.hang_diagnosis import explain_hang
from ingot.launch.agent.local_ranks import Node
from ingot.launch.agent.rank_group import NO_FAILURE, RankGroup, RankPlan
from ingot.training.runtime.hangup import ignores_hangup, leave_terminal

POLL_SECONDS = 0.02
PAUSE_POLL_SECONDS = 0.1  # a handler of Python's runs between two sleeps
CHECK_SECONDS = 0.25  # between checks of the heartbeats
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
KILLED_BY_REQUEST = tuple(-number for number in STOP_SIGNALS)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    code: int
    """The exit code of the ranks if none failed: finished, or stopped as requested."""
    signal: int = 0
    """The signal to stop that this process received; 0 if none."""
    rank: int = 0
    """The rank that failed first."""
    failure: Failure | None = None
    batch: int = -1
    """The batch that the failing rank was working on."""


class StopNow(Exception):
    """A second Ctrl-C."""


def run_attempt(
    arguments: Sequence[str],
    node: Node,
    logs: Path,
    attempt: str,
    env: Mapping[str, str] = os.environ,
    look: Callable[[RankGroup, Sequence[int]], None] = lambda group, signals: None,
) -> Outcome:
    """Run `ingot ARGUMENTS` in every rank of this machine until all have ended or one has failed.

    env: the environment of the ranks, apart from the variables that make them ranks
    look: called several times a second with the ranks and the signals to stop that have come
    """
    group = RankGroup(RankPlan(arguments, node, logs, attempt, env))
    try:
        with _forward_signals(group) as signals:
            group.start()
            if signals:  # that came before all had started
                group.signal(signals[0])
            found = _watch(group, lambda: look(group, signals))
            # before anything is killed: a rank that cannot die must not hide why another has failed
            codes, beats = group.codes(), group.beats()
            failures = {rank: group.failure(rank, code) for rank, code in codes.items() if code not in NO_FAILURE}
    finally:
        group.close()
    if found is not None:
        failures[found[0]] = found[1]
    first = signals[0] if signals else 0
    if not failures:
        return Outcome(max(codes.values()), first)
    # a rank that was killed could not write a time; one that lost its peer failed because another did
    rank, failure = min(failures.items(), key=lambda item: (item[1].is_consequence, item[1].time))
    if signals and (codes.get(rank) in KILLED_BY_REQUEST or failure.is_consequence):
        return Outcome(EXIT_CONTINUE, first)  # the signal came before the rank handled signals: not a failure
    beat = beats.get(rank)
    return Outcome(EXIT_FAULT, first, rank, failure, beat.batch + 1 if beat is not None else -1)


def _watch(group: RankGroup, look: Callable[[], None]) -> tuple[int, Failure] | None:
    """Wait until all have ended or the first has failed. Returns a failure that exit codes do not show: a hang."""
    checked = time.monotonic()
    while group.living():
        if group.failed():
            time.sleep(2 * POLL_SECONDS)  # for others that fail at the same moment
            return None
        now = time.monotonic()
        if now - checked >= CHECK_SECONDS:
            was_asleep = now - checked > 4 * CHECK_SECONDS  # this machine or process: the ranks get another chance
            look()
            if not was_asleep and (found := _find_hang(group)):
                return found
            checked = time.monotonic()
        time.sleep(POLL_SECONDS)
    return None


def _find_hang(group: RankGroup) -> tuple[int, Failure] | None:
    """The rank that the others wait for, if a heartbeat is late and stays late during the diagnosis."""
    if not group.late():
        return None
    living = group.living()
    beats = {rank: beat for rank, beat in group.beats().items() if rank in living}
    found = explain_hang(living, beats, group.folder, group.plan.logs)
    group.keep_stacks()
    after = group.beats()
    if all(after[rank] == beat for rank, beat in beats.items()):
        return found
    print(f"warning: {found[1].message}; it has continued since", file=sys.stderr)
    return None


def pause(seconds: float) -> int:
    """Wait between two attempts; returns the signal to stop that ended it, or 0."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)

    end = time.monotonic() + seconds
    with _handlers(note):
        while not received and (left := end - time.monotonic()) > 0:
            time.sleep(min(PAUSE_POLL_SECONDS, left))
    return received[0] if received else 0


@contextlib.contextmanager
def _handlers(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle signals to stop, until the end."""
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS if not ignores_hangup(number)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def _forward_signals(group: RankGroup) -> Iterator[list[int]]:
    """Signals to stop go to all ranks, which save and end; a second Ctrl-C ends them now."""
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        if number == signal.SIGINT and signal.SIGINT in received:
            raise StopNow
        if number == signal.SIGHUP:
            leave_terminal()
        received.append(number)
        more = "; press Ctrl-C again to end it now" if number == signal.SIGINT else ""
        print(f"{signal.Signals(number).name}: saving after this step, then stopping{more}", file=sys.stderr)
        group.signal(number)

    with _handlers(forward):
        yield received
