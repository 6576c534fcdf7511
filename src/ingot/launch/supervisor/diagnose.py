"""Why an attempt ended: a pure function of what all its nodes have reported.

Each agent sees only its own ranks, and most of what fails after a fault fails because of it: peers lose connections,
collectives wait. So nothing is decided before all have been heard, or the time for that is over; then the strongest
evidence counts, not the first:

    1. the shared disk is full or away, as most nodes see it     the site; no node
    2. a node has gone                                           that node
    3. a device error in the kernel's log or a rank's message    that node
    4. a rank failed by itself, with a reason                    that rank; all ranks alike: no node
    5. a rank was killed                                         that rank
    6. nobody moves: stopped > waits for a device or disk > not in torch > fewest collectives > slowest until then

Where that leaves several nodes, they are suspects and none is named: a wrong name costs a healthy node.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from ingot.launch.agent.evidence import NodeEvidence, RankEvidence
from ingot.launch.agent.failure import LOST_PEER, is_device_error
from ingot.launch.supervisor.history import History
from ingot.launch.supervisor.records import Cause, Kind
from ingot.plurals import count_of

LOCAL_NETWORK = re.compile(
    r"ncclsystemerror|unhandled system error|ncclunhandledcudaerror|unhandled cuda error|ibv_\w+", re.IGNORECASE
)
"""What NCCL says of the node it runs on; other texts of it tell of a peer."""
SITE = re.compile(r"no space left on device|disk quota exceeded|read-only file system|stale file handle|"
                  r"transport endpoint is not connected", re.IGNORECASE)  # fmt: skip
SLOWER, SLOWER_SECONDS = 1.5, 0.02  # than the median's own work on a batch, in parts of it and in seconds
SLOW_REPORTS = 3  # in a row
KILLED_BY_PEER = -6  # NCCL's watchdog aborts a rank whose peer has gone
FAILURES: tuple[Kind, ...] = ("numeric", "data", "user", "memory", "program", "machine", "transport", "site", "device")


class _Found(NamedTuple):
    node: str
    rank: RankEvidence


def diagnose(
    nodes: Sequence[str],
    evidence: Mapping[str, NodeEvidence],
    lost: Mapping[str, str],
    cut_off: Iterable[str] = (),
    hang: str = "",
) -> Cause:
    """The cause of the end of an attempt.

    nodes: all that took part
    evidence: of those that have answered
    lost: those whose agent has gone, and how that was seen; also a spare whose loss has ended the agents of others
    cut_off: those of `lost` that the cluster has lost, too: the node itself has died
    hang: what the agent that saw no progress said; empty if nobody suspects a hang
    """
    named = {node: evidence[node] for node in nodes if node in evidence}
    ranks = [_Found(node, rank) for node, found in named.items() for rank in found.ranks]
    cause = (
        _site(nodes, named)
        or _lost(nodes, {node: lost[node] for node in (*nodes, *lost) if node in lost}, set(cut_off))
        or _device(named, ranks)
        or _transport(named)
        or _failed(named, ranks)
        or _hanging(ranks, hang)
        or _consequences(ranks)
        or _unknown(nodes, named, hang)
    )
    logs = next((found.logs for node, found in named.items() if node == cause.node), "")
    logs = logs or next((found.logs for found in named.values() if found.logs), "")
    batch = cause.batch if cause.batch >= 0 else max((found.rank.batch for found in ranks), default=-1)
    return msgspec.structs.replace(cause, batch=batch, evidence=logs)


def is_consequence(rank: RankEvidence) -> bool:
    """Whether a rank failed because another did."""
    if rank.exit_code in (None, 0):
        return False
    text = rank.message.lower()
    if rank.kind in ("device", "transport", "site"):
        return False
    return (not text and rank.exit_code == KILLED_BY_PEER) or any(part in text for part in LOST_PEER)


def with_ranks_left(cause: Cause, left: Mapping[str, int]) -> Cause:
    """The cause, with what the ranks show that not even SIGKILL has ended, by node and number."""
    if not left or cause.kind in ("finished", "stopped", "site"):
        return cause
    node = cause.node if cause.node in left else next(iter(left))
    why = "a device or file system does not answer (state D)"
    message = f"{cause.message}; {count_of(left[node], 'rank')} on {node} cannot be ended: {why}"
    if cause.node in ("", node):
        return msgspec.structs.replace(cause, message=message, node=node, is_local=True, suspects=(),
                                       bad_nodes=tuple(n for n in left if n != node))  # fmt: skip
    return msgspec.structs.replace(cause, message=message, bad_nodes=tuple({*cause.bad_nodes, *left}))


def diagnose_unfinished(history: History, down: Mapping[str, str], back: Mapping[str, str]) -> Cause:
    """The cause of the end of an attempt that its supervisor has left open.

    down: nodes of the attempt and its spares that the cluster has lost, and why
    back: those that have come back since, as Slurm sees it, which has queued the job again by itself
    """
    last = history.starts[-1] if history.starts else None
    host = last.host if last is not None else ""
    if down:
        node = host if host in down else next(iter(down))
        return Cause("lost", f"{node} died: {down[node]}", node, is_local=True)
    if history.stop is not None:
        return Cause("stopped", "it was asked to stop, and ended before it could report")
    if back and last is not None and (len(back) < len(last.nodes) or len(last.nodes) == 1):  # not a power cut
        node = host if host in back else next(iter(back))
        others = tuple(name for name in back if name != node)
        return Cause("lost", f"{node} died and came back: {back[node]}", node, is_local=True, bad_nodes=others)
    return Cause("supervisor", f"the supervisor on {host} ended before it could report why", host)


def _site(nodes: Sequence[str], named: Mapping[str, NodeEvidence]) -> Cause | None:
    said = {node: text for node, found in named.items() if (text := _site_text(found))}
    if not said:
        return None
    node, text = next(iter(said.items()))
    if len(said) == 1 and len(named) > 1 and all(not found.site for found in named.values()):
        return None  # one rank says so, and no agent: its own temporary folder, perhaps
    if len(said) == 1 and len(nodes) > 2 and len(named) > 2:
        return Cause("site", f"{node}: {text}", node, is_local=True)  # the others can use the folder
    return Cause("site", text)


def _site_text(found: NodeEvidence) -> str:
    if found.site:
        return found.site
    return next((rank.message for rank in found.ranks if SITE.search(rank.message)), "")


def _lost(nodes: Sequence[str], lost: Mapping[str, str], cut_off: set[str]) -> Cause | None:
    if not lost:
        return None
    if len(lost) > 1 and 2 * len(lost) > len(nodes) and not cut_off.issuperset(lost):
        what = f"{len(lost)} of {count_of(len(nodes), 'node')} were lost at once"
        return Cause("lost", f"{what}: perhaps the network, or the node that watches them", suspects=tuple(lost))
    first, *others = sorted(lost, key=lambda node: node not in cut_off)
    more = f", and {', '.join(others)}" if others else ""
    return Cause("lost", f"{first}{more}: {lost[first]}", first, is_local=first in cut_off, bad_nodes=tuple(others))


def _device(named: Mapping[str, NodeEvidence], ranks: Sequence[_Found]) -> Cause | None:
    said: dict[str, tuple[str, int, int]] = {}
    for node, found in named.items():
        for line in found.device_errors[:1]:
            said[node] = (line, -1, -1)
    for node, rank in ranks:
        if rank.exit_code in (None, 0) or not rank.message:
            continue
        if rank.kind == "device" or (rank.kind in ("program", "machine", "") and is_device_error(rank.message)):
            said.setdefault(node, (rank.message, rank.rank, rank.batch))
    if not said:  # of several nodes that say so, one has begun and the others noticed
        local = {found.node: found.rank for found in ranks if LOCAL_NETWORK.search(found.rank.message)}
        if len(local) != 1 or len(named) < 2:
            return None
        node, rank = next(iter(local.items()))
        said[node] = (rank.message, rank.rank, rank.batch)
    if len(said) > 1:
        text, number, batch = next(iter(said.values()))
        return Cause("device", text, rank=number, batch=batch, suspects=tuple(said))
    node, (text, number, batch) = next(iter(said.items()))
    return Cause("device", f"{node}: {text}", node, number, batch, is_local=True)


def _transport(named: Mapping[str, NodeEvidence]) -> Cause | None:
    slow = [node for node, found in named.items() if found.transport]
    if not slow:
        return None
    if len(slow) == len(named) > 1:
        return Cause("transport", f"every node: {named[slow[0]].transport}", suspects=tuple(slow))
    return Cause(
        "transport", f"{slow[0]}: {named[slow[0]].transport}", slow[0], is_local=True, bad_nodes=tuple(slow[1:])
    )


def _failed(named: Mapping[str, NodeEvidence], ranks: Sequence[_Found]) -> Cause | None:
    """Ranks that failed by themselves. Clocks of different nodes are not compared."""
    own = [found for found in ranks if found.rank.exit_code not in (None, 0, 75) and not is_consequence(found.rank)]
    spoken = [found for found in own if found.rank.message and found.rank.exit_code is not None and found.rank.kind]
    candidates = [f for f in spoken if f.rank.time] or spoken or own
    if not candidates:
        return None
    candidates = [_first(f for f in candidates if f.node == node) for node in dict.fromkeys(f.node for f in candidates)]
    kinds = [kind for kind in FAILURES if any(_kind(f.rank) == kind for f in candidates)]
    candidates = [f for f in candidates if _kind(f.rank) == kinds[0]]
    node, rank = candidates[0]
    kind = _kind(rank)
    message = rank.message or _ending(rank)
    if kills := named[node].oom_kills if not rank.message and len(candidates) == 1 else 0:
        message += f"; the kernel killed {count_of(kills, 'process', 'es')} on {node} for lack of memory"
    fits = min((f.rank.fits for f in candidates if f.rank.fits is not None), default=None)
    if len(candidates) == 1:
        # bad input before the first step, seen by one node of several: perhaps only that node cannot see it
        local = kind in ("user", "data") and rank.batch <= 1 and len(named) > 1 and bool(rank.message)
        return Cause(kind, message, node, rank.rank, rank.batch, is_local=local, fits=fits)
    if len({_shape(f.rank.message) for f in candidates}) == 1 or kind in (
        "user",
        "data",
        "numeric",
        "memory",
        "program",
    ):
        return Cause(kind, message, rank=rank.rank, batch=rank.batch, fits=fits)  # alike on several: nobody's hardware
    return Cause(kind, message, rank=rank.rank, batch=rank.batch, suspects=tuple(f.node for f in candidates))


def _first(found: Iterable[_Found]) -> _Found:
    """The first by the clock of their node; one that could not write a time comes last."""
    return min(found, key=lambda f: (not f.rank.time, f.rank.time, f.rank.rank))


def _kind(rank: RankEvidence) -> Kind:
    return rank.kind if rank.kind in FAILURES else "machine"


def _shape(message: str) -> str:
    return re.sub(r"\d+", "#", message)


def _ending(rank: RankEvidence) -> str:
    code = rank.exit_code or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the process of rank {rank.rank} {how}"


def _hanging(ranks: Sequence[_Found], hang: str) -> Cause | None:
    alive = [found for found in ranks if found.rank.exit_code is None]
    if not alive or not (hang or any(found.rank.late_seconds > 0 for found in alive)):
        return None
    for chosen, why, local in _suspects(alive):
        on = tuple(dict.fromkeys(found.node for found in chosen))
        first = min(chosen, key=lambda found: (-found.rank.late_seconds, found.rank.rank))
        head = f"rank {first.rank.rank} on {first.node} has made no progress"
        if late := max(found.rank.late_seconds for found in alive):
            head += f", and is {late:.0f} s late"
        message = f"{head}: {why.format(first.rank.where or 'code without a Python stack')}"
        if len(on) == 1:
            is_local = local and len({f.node for f in alive}) > 1
            return Cause("hang", message, on[0], first.rank.rank, first.rank.batch, is_local=is_local)
        return Cause("hang", message, rank=first.rank.rank, batch=first.rank.batch, suspects=on)
    nodes = tuple(dict.fromkeys(found.node for found in alive))
    message = f"no rank makes progress, and nothing shows which one the others wait for; {hang}".rstrip("; ")
    return Cause("hang", message, batch=max(found.rank.batch for found in alive), suspects=nodes)


def _suspects(alive: Sequence[_Found]) -> Iterable[tuple[list[_Found], str, bool]]:
    """Groups of ranks that the others may wait for, the strongest sign first: at most one group is of use."""
    stopped = [found for found in alive if found.rank.process_state in ("T", "t")]
    if stopped and len(stopped) < len(alive):
        yield stopped, "it is stopped (SIGSTOP or a debugger)", True
    waiting = [found for found in alive if found.rank.process_state == "D"]
    if waiting and len(waiting) < len(alive):
        yield waiting, "it waits for a device or file system (state D), in {}", True
    stacks = [found for found in alive if found.rank.where]
    elsewhere = [found for found in stacks if not found.rank.in_torch]
    if elsewhere and len(elsewhere) < len(alive):
        yield elsewhere, "it is in {} while others wait for it", False
    silent = [found for found in alive if not found.rank.where]
    if silent and stacks and len(silent) < len(alive):
        yield silent, "it does not even show its stack, while others wait for it in torch", False
    counts = Counter((found.rank.world_collectives, found.rank.collectives) for found in alive)
    fewest = min(counts)
    if len(counts) > 1:
        behind = [f for f in alive if (f.rank.world_collectives, f.rank.collectives) == fewest]
        yield behind, "it has joined fewer collectives than others: it missed one that they wait in", False
    waits = Counter(found.rank.where for found in stacks)
    if len(waits) == 2 and min(waits.values()) == 1 and len(stacks) > 2:
        odd = [found for found in stacks if waits[found.rank.where] == 1]
        yield odd, "it waits in {} and the others elsewhere: it missed a collective", False
    own = {found.rank.rank: found.rank.own_seconds for found in alive if found.rank.own_seconds > 0}
    slow = [found for found in alive if len(own) == len(alive) and _is_slow(own, found.rank.rank)]
    if slow:
        pace = f"{max(own.values()):.3g} s of its own work per batch, where half of the ranks take less than "
        yield slow, f"it was the slowest before: {pace}{median(own.values()):.3g} s", False


class PaceWatch:
    """Which node takes longer than the others for its own work, report after report: it slows all of them down."""

    def __init__(self) -> None:
        self._own: dict[str, float] = {}
        self._said, self._found, self._times = "", "", 0

    def note(self, node: str, own_seconds: float) -> None:
        """Seconds per batch that the slowest rank of a node works without waiting for others; 0 if not measured."""
        if own_seconds > 0:
            self._own[node] = own_seconds

    def look(self) -> str:
        """A sentence on that node; empty if there is none. It changes only after some looks that agree."""
        node = max(self._own, key=self._own.__getitem__, default="")
        found = node if len(self._own) > 1 and _is_slow(self._own, node) else ""
        self._times = self._times + 1 if found == self._found else 1
        self._found = found
        if self._times == SLOW_REPORTS:
            usual = median(self._own.values()) if found else 0.0
            work = f"{self._own.get(found, 0.0):.3g} s of its own work per batch; the median is {usual:.3g} s"
            self._said = f"{found} is slower than the others: {work}" if found else ""
        return self._said


def _is_slow(own: Mapping[Any, float], of: Any) -> bool:
    usual = median(own.values())
    return own[of] > SLOWER * usual and own[of] - usual > SLOWER_SECONDS


def _consequences(ranks: Sequence[_Found]) -> Cause | None:
    """Connections broke, and nobody has a reason of its own."""
    broken = [found for found in ranks if is_consequence(found.rank)]
    if not broken:
        return None
    _, rank = broken[0]
    message = rank.message or _ending(rank)
    return Cause("machine", f"connections between ranks broke, and no node shows why: {message}", rank=rank.rank,
                 batch=rank.batch, suspects=tuple(dict.fromkeys(found.node for found in broken)))  # fmt: skip


def _unknown(nodes: Sequence[str], named: Mapping[str, NodeEvidence], hang: str) -> Cause:
    quiet = [node for node in nodes if node not in named]
    if len(quiet) == 1 and len(nodes) > 2:
        return Cause("silent", f"{quiet[0]}: its agent did not answer", quiet[0])
    message = hang or "the attempt ended, and no node reports a failure"
    return Cause("hang" if hang else "machine", message, suspects=tuple(quiet or nodes))
