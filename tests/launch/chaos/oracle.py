"""How a run may end that a schedule has struck, and what may be said of it. Everything else is a defect."""

from collections.abc import Iterable
from pathlib import Path

from runs import assert_as_if_nothing_happened

from chaos.run import ChaosRun
from chaos.schedule import HANGS, INSIDE, NODE_KINDS, NODES, Fault
from ingot.launch.supervisor import judge
from ingot.launch.supervisor.history import read_history
from ingot.launch.supervisor.records import Closed, Excluded, Launched, Opened
from ingot.launch.supervisor.state_file import current_launch

CAUSES: dict[str, set[str]] = {
    "kill": {"machine"}, "segfault": {"machine"}, "exception": {"program"}, "device": {"device"},
    "agent": {"lost", "silent"}, "node": {"lost", "silent"}, "drain": set(), "supervisor": {"supervisor"},
    "requeue": {"stopped", "supervisor"}, "usr2": {"stopped"}, "ingot stop": {"stopped"}, "scancel": {"stopped"},
    "controller": {"site"}, "disk": {"site"}, "cable": {"lost", "silent", "supervisor"}, "stage": {"user"},
    "workdir": {"machine", "user", "silent"},
} | {kind: {"hang"} for kind in HANGS}  # fmt: skip
"""What an attempt that it ends may be closed with."""
LASTING = 3
"""Attempts that a fault may cost which lasts, or strikes the job as a whole."""
UNDECIDED = {"machine", "lost", "hang", "silent", "site"}
"""The same without a name: after a node or a rank has gone, all that may be left is that connections broke."""
STOPS = {"ingot stop", "scancel"}
HALTS = {"usr2", "stage", "exception"}


def check(run: ChaosRun, whole: Path) -> tuple[str, list[str]]:
    """The outcome in words, and what is wrong."""
    wrong: list[str] = []
    if run.late:
        return "late", [f"it has not ended in time: {sorted(run.states())}, {_last(run)}"]
    wrong += blame(run) + budgets(run) + stops(run) + nodes_used_again(run)
    verdict = run.verdict
    action = verdict.action if verdict is not None else "no verdict"
    outcome = {"finish": "finished", "stop": "stopped", "halt": "halted"}.get(action, "ended without a verdict")
    reason = f": {verdict.reason}" if verdict is not None and action != "finish" else ""
    wrong += may_end(run, outcome, reason)
    wrong += [f"an orphan is left: {words}" for words in run.orphans()]
    run.cluster.restore()
    if outcome != "finished" and not any(fault.kind == "stage" for fault in run.fired):
        run.resume()
        if (again := run.verdict) is None or again.action != "finish":
            wrong.append(f"after a resume it has not finished: {sorted(run.states())}, {_last(run)}")
        reason += "; finished after a resume"
    if run.lost:
        wrong.append(f"checkpoints have gone: {run.lost}")
    if not wrong and not any(fault.kind == "stage" for fault in run.fired):
        try:
            assert_as_if_nothing_happened(run.folder, whole)
        except (AssertionError, OSError) as error:
            wrong.append(f"it is not the undisturbed run: {error!r}"[:500])
    return outcome + reason, wrong


def may_end(run: ChaosRun, outcome: str, reason: str) -> list[str]:
    kinds = {fault.kind for fault in run.fired}
    if outcome == "finished" or (outcome == "stopped" and kinds & STOPS):
        return []
    if outcome == "halted":
        broken = {fault.node for fault in run.fired if fault.kind in NODE_KINDS}
        if kinds & HALTS or len(broken) > NODES - 2:
            return []
    if outcome == "ended without a verdict" and kinds & {"scancel", "node", "cable"}:
        return []
    return [f"it ended {outcome}{reason}, which nothing in the schedule explains"]


def stops(run: ChaosRun) -> list[str]:
    """Nothing starts after `ingot stop` has returned."""
    return [f"attempt {opened.attempt} was opened at {opened.time}, after the stop of {run.stopped_at}"
            for opened in run.of(Opened) if run.stopped_at and opened.time > run.stopped_at]  # fmt: skip


def nodes_used_again(run: ChaosRun) -> list[str]:
    """I8: a node that is out stays out, and one that died under its supervisor is out."""
    wrong, out = [], dict[str, str]()
    for record in run.records:
        if isinstance(record, Launched):
            out = {}
        elif isinstance(record, Excluded):
            out.setdefault(record.node, record.time)
        elif isinstance(record, Opened):
            since = out | {node: time for node, time in run.dead_hosts.items() if record.time > time}
            wrong += [f"attempt {record.attempt} runs on {node}, which failed at {since[node]}"
                      for node in record.nodes if node in since]  # fmt: skip
    return wrong


def blame(run: ChaosRun) -> list[str]:
    """Whoever is named was struck."""
    wrong = []
    records = run.records
    struck = {fault.node for fault in run.fired if fault.kind in NODE_KINDS and fault.kind != "drain"}
    suspects = {
        node for closed in run.of(Closed) for node in closed.cause.suspects if struck & set(closed.cause.suspects)
    }
    hosts = {start.host for start in read_history(records).starts}
    for closed in run.of(Closed):
        cause = closed.cause
        if cause.kind == "finished" or _explains(run.fired, cause.kind, cause.node, hosts):
            continue
        wrong.append(f"epoch {closed.epoch} was closed as {cause.kind} of {cause.node or 'no node'}: {cause.message}")
    drained = {fault.node for fault in run.fired if fault.kind in ("drain", "node", "cable")}
    for out in run.of(Excluded):
        allowed = drained if out.is_drained else struck | suspects
        if out.node not in allowed:
            wrong.append(f"{out.node} is healthy and was left out: {out.reason}")
    wrong += [f"{node} is healthy and has {count} strikes" for node, count in judge.strikes(records).items()
              if node not in struck]  # fmt: skip
    return wrong


def _explains(fired: Iterable[Fault], kind: str, node: str, hosts: set[str]) -> bool:
    for fault in fired:
        if kind in CAUSES[fault.kind] and node in ("", fault.node):
            return True
        if kind == "supervisor" and kind in CAUSES[fault.kind] and node in hosts:
            return True
        if not node and kind in UNDECIDED and fault.kind in NODE_KINDS:
            return True
    return False


def budgets(run: ChaosRun) -> list[str]:
    """As many attempts as faults, but for faults that last; and what the judge promises."""
    wrong = []
    failed = [closed for closed in run.of(Closed) if closed.cause.kind not in ("finished", "stopped", "site")]
    if len(failed) > (most := sum(LASTING if fault.kind not in INSIDE else 1 for fault in run.fired)):
        wrong.append(f"{len(failed)} attempts have failed, and {most} could")
    history = read_history(run.records)
    group: list[tuple[str, frozenset[str]]] = []
    best = -1
    for attempt in history.attempts:
        if attempt.closed.step > best:
            best, group = attempt.closed.step, []
        if attempt.cause.kind not in ("site", "stopped"):
            group.append((attempt.cause.kind, attempt.nodes))
        if len(group) > judge.MAX_ATTEMPTS or (group and group.count(group[-1]) > judge.MAX_ALIKE):
            wrong.append(f"{len(group)} attempts at batch {best}: {group[-1]}")
    launched = [record for record in current_launch(run.records) if isinstance(record, Launched)]
    allowed = (launched[-1].spares if launched else 0) + judge.EXTRA_SWAPS
    if len(history.replaced) > allowed:
        wrong.append(f"{len(history.replaced)} replacements, of {allowed}")
    return wrong


def _last(run: ChaosRun) -> str:
    records = run.records
    return str(records[-1])[:300] if records else "no records"
