"""What happens after an attempt: a pure function of the records in `state.jsonl`.

    asked to stop         STOPPED: nothing restarts by itself
    finished              FINISHED
    would fail again      HALTED: the user's error, bad data, NaN, or the same error on different nodes
    a node's fault        SWAP it for a spare, or REQUEUE without it; spares + 2 per day
    the site's            WAIT, longer each time, up to an hour in all; then HALTED
    undecided             the same nodes once, then SWAP all suspects if spares suffice, then HALTED
    preempted             REQUEUE
    time limit            REQUEUE if there is a new checkpoint, else HALTED: the limit is too short

Whatever the cause, at most 3 attempts with the same kind of cause on the same nodes, and 20 in all, end between two new
checkpoints; this holds over restarts in the job, requeues and the jobs of a chain, since all write the same file. A job
goes back into the queue only if something will differ there: the nodes, or the progress.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ingot.launch.supervisor.history import ClosedAttempt, History, read_history
from ingot.launch.supervisor.records import FINAL_KINDS, Action, Cause, Closed, Excluded, Judged, Opened
from ingot.plurals import count_of

MAX_ALIKE, MAX_ATTEMPTS, MAX_STARTS = 3, 20, 20
EXTRA_SWAPS = 2  # nodes replaced within a day, in addition to the spares
BACK_OFF_SECONDS = (0.0, 2.0, 10.0)  # before a new attempt on the same nodes
SITE_FIRST_SECONDS, SITE_MOST_SECONDS, SITE_TOTAL_SECONDS = 10.0, 600.0, 3600.0

LEFT_OUT_AT_ONCE = ("device", "silent", "transport")
"""Kinds that stay with the node: without it the job goes on, or goes back into the queue."""
REPEATING = ("program", "machine", "hang", "lost", "supervisor", "memory")
"""Kinds that may stay with the node: the second time on it, a spare takes its place."""


@dataclass(frozen=True)
class Verdict:
    """What is done, and which nodes are left out from now on."""

    judged: Judged
    exclude: tuple[Excluded, ...] = ()


def judge(records: Sequence[Any], time: str, run: str) -> Verdict:
    """What follows from the last attempt, which must be closed."""
    history = read_history(records)
    if history.open is not None or not history.attempts:
        raise ValueError("there is no closed attempt to judge")
    return _Judgment(history, time, run).verdict()


def judge_start(records: Sequence[Any], time: str, run: str) -> Verdict | None:
    """Why a job that has just started (its record is the last one) has nothing to do; None if it shall run."""
    history = read_history(records)
    judgment = _Judgment(history, time, run)
    if (end := launch_end(history)) is not None:
        return Verdict(end)
    if history.stop is not None:
        return judgment.stopped()
    if exhausted := _exhausted(history.since_checkpoint()):
        return judgment.halt(exhausted)
    same = [start for start in history.starts if start.step >= history.starts[-1].step]
    if len(same) > MAX_STARTS:
        return judgment.halt(f"the job has started {len(same)} times without a new checkpoint")
    if len(history.usable_nodes()) < history.nodes_needed:
        if history.starts_in_vain >= MAX_ALIKE or not history.excluded:
            return judgment.halt(judgment.too_few())
        return Verdict(judgment.judged("requeue", judgment.too_few()))
    return None


def launch_end(history: History) -> Judged | None:
    """The judgment that has ended this launch, if one has. A stop that the cluster asked for ends a start only."""
    for judgment in reversed(history.judgments):
        if judgment.action in ("finish", "halt"):
            return judgment
        if judgment.action == "stop" and history.stop is not None:
            return judgment
    return None


def choose_nodes(records: Sequence[Any]) -> tuple[str, ...]:
    """The nodes of the next attempt, empty if there are too few: those of the last one as far as they are usable, each
    in its place, so that nothing moves without need; copies in host memory belong to ranks. A new start of the job has
    the order of its allocation."""
    history = read_history(records)
    usable = history.usable_nodes()
    if len(usable) < history.nodes_needed:
        return ()
    last = history.attempts[-1].opened if history.attempts else None
    before = last.nodes if last is not None else ()
    spares = iter([node for node in usable if node not in before])
    if last is None or len(before) != history.nodes_needed or not last.attempt.startswith(history.start_prefix):
        kept = [node for node in usable if node in before][: history.nodes_needed]
        chosen = {*kept, *islice(spares, history.nodes_needed - len(kept))}
        return tuple(node for node in usable if node in chosen)
    return tuple(node if node in usable else next(spares) for node in before)


def strikes(records: Sequence[Any]) -> dict[str, int]:
    """Faults of nodes, over all launches: a node's own evidence, or a fault that stayed when the node was used again
    and went when it was replaced. Being drained, sharing a disk or losing a peer is not a fault."""
    counts: dict[str, int] = {}
    pairs: list[tuple[frozenset[str], Cause, int]] = []
    opened: Opened | None = None
    for record in records:
        if isinstance(record, Opened):
            opened = record
        elif isinstance(record, Closed) and opened is not None:
            pairs.append((frozenset(opened.nodes), record.cause, record.step))
            for node in (*_struck(record.cause), *_went_with_the_node(pairs)):
                counts[node] = counts.get(node, 0) + 1
            opened = None
    return counts


def _struck(cause: Cause) -> tuple[str, ...]:
    if not cause.is_local or cause.kind in ("site", "silent", "supervisor", *FINAL_KINDS):
        return ()
    return tuple(dict.fromkeys(node for node in (cause.node, *cause.bad_nodes) if node))


def _went_with_the_node(pairs: Sequence[tuple[frozenset[str], Cause, int]]) -> tuple[str, ...]:
    """The node on which the two attempts before the last failed alike, if the last ran without it and did not."""
    if len(pairs) < 3:
        return ()
    (_, first, _), (_, second, step), (nodes, third, newest) = pairs[-3:]
    node = second.node
    stayed = node and (first.kind, first.node) == (second.kind, node) and second.kind in REPEATING
    went = node not in nodes and (third.kind == "finished" or newest > step)
    own = first.is_local or second.is_local  # counted already
    return (node,) if stayed and went and not own else ()


class _Judgment:
    def __init__(self, history: History, time: str, run: str):
        self.history, self.time, self.run = history, time, run
        self.epoch = history.attempts[-1].closed.epoch if history.attempts else 0

    def verdict(self) -> Verdict:
        found = self._by_cause()
        left = self.history.usable_nodes([excluded.node for excluded in found.exclude])
        if found.judged.action in ("restart", "wait") and len(left) < self.history.nodes_needed:
            if self._differs():  # nodes were drained meanwhile
                return Verdict(self.judged("requeue", self.too_few()))
            return self.halt(self.too_few())
        return found

    def _by_cause(self) -> Verdict:
        cause = self.history.attempts[-1].cause
        if cause.kind == "finished":
            return Verdict(self.judged("finish", "the run is complete"))
        if self.history.stop is not None:
            return self.stopped()
        group = self.history.since_checkpoint()
        if final := self._is_final(group) or _exhausted(group):
            return self.halt(final)
        if _is_smaller(group):
            return Verdict(self.judged("restart", f"starting again with microbatches of {cause.fits}"))
        if cause.kind == "site" and not cause.is_local:
            return self._wait()
        hard, soft = self._nodes_at_fault(group)
        if hard or soft:
            return self._replace(hard, soft, group)
        return self._restart(group)

    # --- ends

    def stopped(self) -> Verdict:
        stop = self.history.stop
        assert stop is not None
        if stop.reason in ("time-limit", "preempt"):
            if exhausted := _exhausted(self.history.since_checkpoint()):
                return self.halt(exhausted)
            if stop.reason == "preempt":
                return Verdict(self.judged("requeue", "the job was preempted"))
            if self._differs():
                return Verdict(self.judged("requeue", "the time limit of the job was reached"))
            when = f"the time limit came before the first new checkpoint{_detail(stop.detail)}"
            return self.halt(f"{when}: it is shorter than start-up, a step and a save take",
                             f"ingot launch resume {self.run} --time LONGER")  # fmt: skip
        why = {
            "user": "it was asked to stop",
            "wall-time": "max_wall_time is over",
            "signal": "a signal asked it to stop",
        }
        return Verdict(self.judged("stop", why[stop.reason] + _detail(stop.detail), self.history.resume(self.run)))

    def halt(self, reason: str, advice: str = "") -> Verdict:
        return Verdict(self.judged("halt", reason, advice or self.history.resume(self.run)))

    def too_few(self) -> str:
        usable = self.history.usable_nodes()
        out = ", ".join(self.history.excluded) or "none is left out"
        return (
            f"{count_of(self.history.nodes_needed, 'node')} are needed and {len(usable)} are usable (left out: {out})"
        )

    def judged(self, action: Action, reason: str, advice: str = "", wait: float = 0.0) -> Judged:
        return Judged(time=self.time, epoch=self.epoch, action=action, reason=reason, advice=advice, wait_seconds=wait)

    # --- causes

    def _is_final(self, group: Sequence[ClosedAttempt]) -> str:
        """Why no further attempt would help; empty if one may."""
        cause = group[-1].cause
        if cause.kind in FINAL_KINDS and not self._may_be_the_nodes(group):
            return cause.message
        if cause.kind == "program":
            for earlier in group[:-1]:
                if earlier.cause.kind == "program" and earlier.cause.message == cause.message:
                    if earlier.cause.node != cause.node:
                        return "the same error on different nodes: trying again would not help"
                    if not cause.node or len(self.history.usable_nodes((cause.node,))) < self.history.nodes_needed:
                        return "the same error twice: trying again would not help"
        return ""

    def _may_be_the_nodes(self, group: Sequence[ClosedAttempt]) -> bool:
        """Bad input that only one node sees, such as a file system that is not mounted there: a spare may see it."""
        cause = group[-1].cause
        if cause.kind == "numeric" or not (cause.is_local and cause.node):
            return False
        elsewhere = [a for a in group[:-1] if a.cause.kind == cause.kind and a.cause.node != cause.node]
        return not elsewhere and len(self.history.usable_nodes((cause.node,))) >= self.history.nodes_needed

    def _nodes_at_fault(self, group: Sequence[ClosedAttempt]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Nodes that the job must do without, and those that it does without if it can."""
        cause = group[-1].cause
        if self.history.is_local:
            return (), ()  # there is only this machine
        named = tuple(dict.fromkeys(node for node in (cause.node, *cause.bad_nodes) if node))
        if cause.kind in LEFT_OUT_AT_ONCE or (cause.is_local and cause.kind in ("machine", "lost", "site")):
            return named, ()
        if cause.kind == "lost" or (cause.is_local and cause.kind in ("hang", "user", "data")):
            return (), named
        before = [a.cause for a in group[:-1] if a.nodes == group[-1].nodes]
        if cause.kind in REPEATING and cause.node and any((c.kind, c.node) == (cause.kind, cause.node) for c in before):
            return (), (cause.node,)
        if cause.suspects and any(c.kind == cause.kind and c.suspects for c in before):
            spare = len(self.history.usable_nodes()) - self.history.nodes_needed
            return (), cause.suspects[-spare:] if spare > 0 else ()
        return (), ()

    def _replace(self, hard: tuple[str, ...], soft: tuple[str, ...], group: Sequence[ClosedAttempt]) -> Verdict:
        history = self.history
        allowed = (history.launched.spares if history.launched else 0) + EXTRA_SWAPS
        if (replaced := history.replacements_within_a_day(self.time)) >= allowed:
            if not hard:
                return self._restart(group)
            helped = f"{count_of(replaced, 'replacement')} of nodes within a day have not helped"
            return self.halt(f"{helped}; the last failure: {group[-1].cause.message}")
        out = tuple(node for node in hard or soft if node in history.usable_nodes())
        if not out:  # they are left out already, or have never been used
            return self._restart(group)
        enough = len(history.usable_nodes(out)) >= history.nodes_needed
        if not enough and not hard:
            return self._restart(group)
        message = group[-1].cause.message
        exclude = tuple(Excluded(time=self.time, node=node, reason=message) for node in out)
        names = ", ".join(out)
        if enough:
            return Verdict(self.judged("swap", f"the next attempt runs without {names}"), exclude)
        return Verdict(
            self.judged("requeue", f"without {names} too few nodes are left; other nodes are needed"), exclude
        )

    def _restart(self, group: Sequence[ClosedAttempt]) -> Verdict:
        alike = sum(a.nodes == group[-1].nodes for a in group)
        wait = BACK_OFF_SECONDS[min(alike, len(BACK_OFF_SECONDS)) - 1]
        step = group[-1].closed.step
        where = f"continuing from batch {step}" if step else "starting again"
        return Verdict(self.judged("restart", where, wait=wait))

    def _wait(self) -> Verdict:
        """The longer the site's trouble lasts, the longer the pause; after an hour it is the operator's turn."""
        epochs = {a.closed.epoch for a in self.history.since_checkpoint() if a.cause.kind == "site"}
        waits = [j.wait_seconds for j in self.history.judgments if j.action == "wait" and j.epoch in epochs]
        if sum(waits) >= SITE_TOTAL_SECONDS:
            return self.halt(f"for {sum(waits) / 60:.0f} minutes: {self.history.attempts[-1].cause.message}")
        seconds = min(SITE_FIRST_SECONDS * 2 ** len(waits), SITE_MOST_SECONDS)
        return Verdict(self.judged("wait", f"waiting {seconds:.0f} s for the site to recover", wait=seconds))

    def _differs(self) -> bool:
        """Whether the job, queued again, would find something else: other nodes, or a later checkpoint."""
        return bool(self.history.progress_since_start() or self.history.excluded_since_start)


def _is_smaller(group: Sequence[ClosedAttempt]) -> bool:
    """Whether the last attempt ran out of memory and has led to a microbatch that was not tried yet."""
    fits = group[-1].cause.fits
    tried = [a.cause.fits for a in group[:-1] if a.cause.fits is not None]
    return group[-1].cause.kind == "memory" and fits is not None and fits >= 1 and all(fits < size for size in tried)


def _exhausted(group: Sequence[ClosedAttempt]) -> str:
    """Which budget is used up between two checkpoints; empty if none is."""
    if len(group) >= MAX_ATTEMPTS:
        return f"{len(group)} attempts have led to no new checkpoint"
    if not group or group[-1].is_as_requested or (group[-1].cause.kind == "site" and not group[-1].cause.is_local):
        return ""  # what waits for the site has a budget of time
    last = group[-1]
    alike = [a for number, a in enumerate(group, 1) if a.cause.kind == last.cause.kind and a.nodes == last.nodes
             and not a.is_as_requested and not _is_smaller(group[:number])]  # fmt: skip
    if len(alike) < MAX_ALIKE:
        return ""
    where = f"on {min(last.nodes)}" if len(last.nodes) == 1 else "on the same nodes"
    attempts = f"{count_of(len(alike), 'attempt')} have ended alike {where} since the newest checkpoint"
    return f"{attempts}; the last one: {last.cause.message}"


def _detail(text: str) -> str:
    return f" ({text})" if text else ""
