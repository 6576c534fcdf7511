"""Which node is to blame: pure functions of what all nodes reported, so that all of them come to the same answer.

A check that fails on some nodes is theirs; one that fails on all of them is the user's or the site's, and no other
nodes would help. Where nodes differ, the majority is right, and the first node where there is none.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLOCK_WARN, CLOCK_FAIL = 1.0, 20.0  # seconds
SLOW = 0.9  # of the median's speed
PATIENT_ROUNDS = 6  # of the search for the node that spoils an all-reduce
OWN = ("config", "data")  # checks whose sentence says all
PASSING = ("disk", "port")  # what may be gone at the next attempt

Group = tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Why a run cannot start here."""

    message: str
    host: str = ""
    """The node to blame; empty if it is none's own."""
    kind: str = "machine"
    """machine, or one that would fail again: user, data."""
    leave_out: bool = True
    """Whether the next attempt goes without the node."""


def failed_checks(checks: Mapping[str, Mapping[str, str]]) -> list[Problem]:
    """What the nodes found about themselves: node -> check -> sentence."""
    problems = []
    for check in dict.fromkeys(check for found in checks.values() for check in found):
        hosts = [host for host in checks if check in checks[host]]
        sentence = checks[hosts[0]][check]
        everywhere = len(hosts) == len(checks)
        if everywhere and check in OWN:
            problems.append(Problem(sentence, kind="data" if check == "data" else "user"))
        elif everywhere and len(hosts) > 1:
            problems.append(Problem(f"every node: {sentence}", kind="machine" if check in PASSING else "user"))
        else:
            problems += [Problem(f"{h}: {checks[h][check]}", h, leave_out=check != "port") for h in hosts]
    return problems


def deviants(common: Mapping[str, Mapping[str, str]]) -> list[Problem]:
    """Nodes that differ in what must be the same: node -> what -> value."""
    problems = []
    for what in dict.fromkeys(key for values in common.values() for key in values):
        values = {host: found.get(what, "not set") for host, found in common.items()}
        usual = Counter(values.values()).most_common(1)[0][0]  # of several, the first node's
        problems += [Problem(f"{host}: {what} is {value} here and {usual} elsewhere", host)
                     for host, value in values.items() if value != usual]  # fmt: skip
    return problems


def clock_offsets(seen: Mapping[str, Mapping[str, tuple[float, bool]]]) -> dict[str, float]:
    """How far each node's clock is ahead of the usual one, in seconds.

    `seen` has, for each node and each other: its own clock when it saw the other's report less the time in the report,
    and whether it was already looking when the report came. If so, that is the difference of the clocks; if neither of
    two was, they wrote at the same moment.
    """
    first, *others = seen
    ahead = {first: 0.0}
    for host in others:
        late, looking = seen[first][host]
        back, looking_back = seen[host][first]
        ahead[host] = back if looking_back and not looking else -late
    usual = statistics.median_low(ahead.values()) if len(ahead) > 2 else 0.0
    return {host: value - usual for host, value in ahead.items()}


def wrong_clocks(seen: Mapping[str, Mapping[str, tuple[float, bool]]]) -> tuple[list[Problem], list[str]]:
    """Clocks that are off, and sentences on those that are only a little."""
    problems, notes = [], []
    for host, seconds in clock_offsets(seen).items():
        sentence = f"{host}: the clock is {abs(seconds):.1f} s {'ahead' if seconds > 0 else 'behind'}; start chrony"
        if abs(seconds) >= CLOCK_FAIL:
            problems.append(Problem(sentence, host))
        elif abs(seconds) >= CLOCK_WARN:
            notes.append(sentence)
    return problems, notes


def slow_devices(speeds: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Nodes with a device that is far slower than the others, by the median absolute deviation (MAD)."""
    values = [speed for found in speeds.values() for speed in found]
    if len(values) < 4:
        return {}
    median = statistics.median(values)
    spread = statistics.median(abs(value - median) for value in values)
    return {
        host: f"{host}: device {index} computes {speed:.3g} TFLOP/s where {median:.3g} are usual"
        for host, found in speeds.items()
        for index, speed in enumerate(found)
        if speed < SLOW * median and 0.6745 * (median - speed) > 3 * spread
    }


def sort_out(rounds: Sequence[Mapping[Group, bool]]) -> tuple[set[str], set[str]]:
    """Good and bad nodes, after all-reduces of groups; the first round was that of all nodes."""
    good: set[str] = set()
    bad: set[str] = set()
    for groups in rounds[1:]:
        known = set(good)
        for group, passed in groups.items():
            if passed and len(group) > 1:  # alone, a node proves nothing about its network
                good |= set(group)
            elif not passed and len(unknown := set(group) - known) == 1:
                bad |= unknown
    return good, bad - good


def next_groups(hosts: Sequence[str], rounds: Sequence[Mapping[Group, bool]]) -> list[Group]:
    """Who is to try next, after an all-reduce of all nodes has failed; empty when there is no more to learn.

    Pairs, all at once: three rounds mostly suffice for any number of nodes, where halving takes one per doubling. Who
    is in a pair that works is good; who fails beside a good one is bad.
    """
    if len(hosts) < 3:
        return [(host,) for host in hosts] if len(rounds) == 1 else []
    good, bad = sort_out(rounds)
    unknown = [host for host in hosts if host not in good | bad]
    if not unknown or len(rounds) > PATIENT_ROUNDS:
        return []
    if good:
        return list(zip(unknown, [host for host in hosts if host in good], strict=False))
    ring = unknown + [""] * (len(unknown) % 2)  # everybody against everybody, in turn
    turn = (len(rounds) - 1) % (len(ring) - 1)
    ring = [ring[0], *ring[1 + turn :], *ring[1 : 1 + turn]]
    pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
    return [tuple(host for host in pair if host) for pair in pairs]


def spoilers(hosts: Sequence[str], rounds: Sequence[Mapping[Group, bool]], reason: str) -> list[Problem]:
    """Who spoils the all-reduce, once the search has ended."""
    good, bad = sort_out(rounds)
    if len(hosts) == 1:
        return [Problem(f"{hosts[0]}: the all-reduce fails: {reason}", hosts[0])]
    if bad:
        return [Problem(f"{host}: the all-reduce fails wherever this node takes part: {reason}", host)
                for host in hosts if host in bad]  # fmt: skip
    unknown = [host for host in hosts if host not in good]
    if not unknown:
        return [Problem(f"the all-reduce of {len(hosts)} nodes fails, though any two of them can do it: {reason}")]
    return [Problem(f"the all-reduce of {' and '.join(unknown)} fails, and which node is to blame cannot be told; "
                    f"{unknown[-1]} is left out: {reason}", unknown[-1])]  # fmt: skip
