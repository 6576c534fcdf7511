"""The attempts of a launch, and the nodes that it does without, as `ingot status` shows them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import IngotError
from ingot.launch.monitor.advice import without_bad_advice
from ingot.launch.protocol import LaunchFolder
from ingot.launch.supervisor.history import History, read_history
from ingot.launch.supervisor.records import Cause, Closed, Launched, Opened, PhaseBegan, Started
from ingot.launch.supervisor.state_file import STATE, DamagedState, current_launch, read_state

UNDECIDED = "undecided"
RANK_PHASES = ("running", "evaluating", "saving")


@dataclass
class AttemptView:
    """One attempt; what is not known yet is empty."""

    attempt: str
    nodes: list[str]
    opened: str
    first_batch: int
    """The batch that it continued from, of a checkpoint or a newer copy in host memory."""
    closed: str = ""
    last_batch: int = 0
    """The newest checkpoint when it ended."""
    kind: str = ""
    message: str = ""
    culprit: str = ""
    """The node at fault, or `undecided`; empty if none is."""
    suspects: list[str] = field(default_factory=list)
    rank: int = -1
    batch: int = -1
    then: str = ""
    """What was decided: restart, swap, wait, requeue, finish, stop or halt."""
    reason: str = ""
    logs: str = ""
    is_copy: bool = False
    """Whether it continued from a copy in host memory."""

    def line(self) -> str:
        """For people."""
        text = f"{self.attempt} on {names(self.nodes)}, from batch {self.first_batch}"
        text += " (a copy in host memory)" if self.is_copy else ""
        if not self.closed:
            return f"{text}: not ended"
        text += f" to {self.last_batch}" if self.last_batch > self.first_batch else ", no new checkpoint"
        text += f": {self.kind}" + (f": {self.message}" if self.message else "")
        where = [f"rank {self.rank}"] if self.rank >= 0 else []
        where += [f"batch {self.batch}"] if self.batch > 0 else []
        if self.culprit == UNDECIDED:
            where.append(f"undecided between {names(self.suspects)}" if self.suspects else "which node is undecided")
        elif self.culprit:
            where.append(f"node {self.culprit}")
        text += f" ({', '.join(where)})" if where else ""
        why = f": {self.reason}" if self.reason != self.message else ""
        return text + (f"; then {self.then}{why}" if self.then else "")


@dataclass
class NodeOut:
    """A node that a launch no longer uses."""

    since: str
    reason: str
    is_drained: bool = False
    """An administrator took it out: it is not at fault."""


@dataclass
class LaunchView:
    """What the records of one supervisor say. A preparation has one for each share."""

    name: str
    history: History
    phase: PhaseBegan | None
    records: list[Any]
    trains_since: str = ""
    """When the ranks of the open attempt began to train."""


@dataclass
class StateProblem:
    """What is wrong with records."""

    message: str
    command: str = ""
    """What must be done before the run can be launched again; empty if nothing."""


def read_launches(run: Path) -> tuple[list[LaunchView], StateProblem | None]:
    """The records of a run, and what is wrong with them; nothing for a run that no supervisor has led."""
    folder = LaunchFolder(run).path
    views, problem = [], None
    for path in [folder / STATE, *sorted(folder.glob(f"shares/*/{STATE}"))]:
        name = path.parent.name if path.parent != folder else ""
        try:
            if records := read_state(path):
                views.append(view_of(name, records))
        except IngotError as error:
            problem = StateProblem(str(error), error.command if isinstance(error, DamagedState) else "")
        except ValueError as error:  # the next launch begins a new account
            launched = next((record for record in current_launch(records) if isinstance(record, Launched)), None)
            views.append(LaunchView(name, History(launched), None, []))
            problem = StateProblem(f"{path} lacks records ({error}): what it says of the last launch is not shown")
    return views, problem


def view_of(name: str, records: list[Any]) -> LaunchView:
    """Raises ValueError as `read_history` does."""
    phases = _phases(records)
    trains_since = next((record.time for record in phases if record.phase in RANK_PHASES), "")
    return LaunchView(name, read_history(records), phases[-1] if phases else None, records, trains_since)


def attempts_of(view: LaunchView) -> list[AttemptView]:
    """All attempts of the last launch, oldest first."""
    decided = {judged.epoch: judged for judged in view.history.judgments}
    found = []
    for attempt in view.history.attempts:
        opened, closed, cause = attempt.opened, attempt.closed, attempt.cause
        judged = decided.get(closed.epoch)
        found.append(AttemptView(
            opened.attempt, list(opened.nodes), opened.time, opened.first, closed.time, closed.step, cause.kind,
            without_bad_advice(cause.message), _culprit(cause, opened.nodes), list(cause.suspects), cause.rank,
            cause.batch, judged.action if judged else "", without_bad_advice(judged.reason) if judged else "",
            cause.evidence, opened.copied > 0,
        ))  # fmt: skip
    if (now := view.history.open) is not None:
        found.append(AttemptView(now.attempt, list(now.nodes), now.time, now.first, is_copy=now.copied > 0))
    return found


def nodes_out(views: Sequence[LaunchView]) -> dict[str, NodeOut]:
    return {
        node: NodeOut(excluded.time, without_bad_advice(excluded.reason), excluded.is_drained)
        for view in views
        for node, excluded in view.history.excluded.items()
    }


def names(nodes: Sequence[str], most: int = 4) -> str:
    """`n1, n2, n3, n4 and 1,020 more`."""
    shown = ", ".join(nodes[:most])
    return shown if len(nodes) <= most else f"{shown} and {len(nodes) - most:,} more"


def _culprit(cause: Cause, nodes: Sequence[str]) -> str:
    if cause.node:
        return cause.node
    return UNDECIDED if cause.suspects or (cause.kind in ("hang", "lost") and len(nodes) > 1) else ""


def _phases(records: Sequence[Any]) -> list[PhaseBegan]:
    """Those since the last attempt was opened or closed."""
    found: list[PhaseBegan] = []
    for record in current_launch(records):
        if isinstance(record, PhaseBegan):
            found.append(record)
        elif isinstance(record, Opened | Closed | Started):
            found = []
    return found
