"""Which nodes are at fault: pure functions of what all nodes reported.

A check that fails on some nodes is theirs; one that fails on all of them is the user's or the site's, and other nodes
would not help. Where nodes differ, the majority is right. Without one, of two nodes or a node alone, nobody is blamed:
the nodes are suspects, of which one may be replaced to find out.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ingot.errors import EXIT_FAULT, EXIT_USER_ERROR
from ingot.launch.agent.failure import FINAL_KINDS
from ingot.launch.profiles import Profile
from ingot.launch.spec import LaunchSpec

CLOCK_WARN, CLOCK_FAIL = 1.0, 20.0  # seconds
SLOW = 0.9  # of the median's speed
MAX_ROUNDS = 6  # of the search for the node that breaks an all-reduce
INPUT_CHECKS = ("config", "data")  # of what the user wrote, the same on all nodes
TRANSIENT_CHECKS = ("disk",)  # what may have passed by the next attempt

CHECKS = {
    "agent": "agent: starts on each node, and reaches the first one",
    "environment": "environment: the launch spec and its secrets can be read",
    "disk": "disk: free space of the run folder and the temporary folder",
    "nics": "network devices: as many are active as the profile names",
    "limits": "limits: files that a process may open, memory that it may lock",
    "gpus": "GPUs: present, free, without memory errors",
    "nvlink": "NVLink: all links are up",
    "shm": "shared memory: enough for NCCL",
    "config": "config: valid on each node",
    "data": "data: the index of each local dataset can be read",
    "software": "software: code, versions and settings are the same on all nodes",
    "clocks": "clocks: the same time on all nodes",
    "devices": "devices: torch loads, and none is far slower than the others",
    "network": "network: an all-reduce of all nodes works, as fast as the profile expects",
}
"""What the checks before an attempt look at, in this order."""
OK, FAIL, SKIP = "ok", "fail", "skip"
Group = tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Why a run cannot start here."""

    message: str
    host: str = ""
    """The node at fault; empty if no single node is."""
    kind: str = "machine"
    """machine, or one that would fail again: user, data."""
    suspects: Group = ()
    """Nodes among which the votes do not decide."""


@dataclass
class PreflightResult:
    """What the checks found."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Measurements and warnings."""
    checks: dict[str, str] = field(default_factory=dict)
    """What was looked at, and how that ended: OK, FAIL, or SKIP after a failure before it."""

    @property
    def exit_code(self) -> int:
        """The exit code of `ingot doctor --cluster`."""
        if not self.problems:
            return 0
        return EXIT_USER_ERROR if any(problem.kind in FINAL_KINDS for problem in self.problems) else EXIT_FAULT

    def __str__(self) -> str:
        checks = [f"{state:>4}  {CHECKS[name]}" for name, state in self.checks.items()]
        return "\n".join([*checks, *(f"FAIL  {problem.message}" for problem in self.problems), *self.notes])


def own_checks(spec: LaunchSpec, profile: Profile) -> list[str]:
    """The checks that a node makes of itself."""
    trains = spec.verb == "train"
    made = ["environment", "disk", *(["nics"] if trains and profile.nics else []), *(["limits"] if trains else [])]
    made += ["gpus", "nvlink", "shm"] if spec.gpus_per_node else []
    return [*made, "config", "data"] if trains and spec.arguments else made


def failed_checks(checks: Mapping[str, Mapping[str, str]]) -> list[Problem]:
    """Problems that the nodes found in themselves: node -> check -> sentence."""
    problems = []
    for check in dict.fromkeys(check for found in checks.values() for check in found):
        hosts = [host for host in checks if check in checks[host]]
        sentence = checks[hosts[0]][check]
        everywhere = len(hosts) == len(checks)
        if everywhere and check in INPUT_CHECKS:  # by one node alone, it may also be that node's view of the disk
            alone = tuple(hosts) if len(hosts) == 1 else ()
            problems.append(Problem(sentence, kind="data" if check == "data" else "user", suspects=alone))
        elif everywhere and len(hosts) > 1:
            problems.append(Problem(f"every node: {sentence}", kind="machine" if check in TRANSIENT_CHECKS else "user"))
        else:
            problems += [Problem(f"{h}: {checks[h][check]}", h) for h in hosts]
    return problems


def nodes_that_differ(common: Mapping[str, Mapping[str, str]]) -> list[Problem]:
    """Nodes that differ in what must be the same: node -> name -> value."""
    problems = []
    for name in dict.fromkeys(key for values in common.values() for key in values):
        values = {host: found.get(name, "not set") for host, found in common.items()}
        votes = Counter(values.values()).most_common()
        if len(votes) == 1:
            continue
        if votes[0][1] == votes[1][1]:
            found = ", ".join(f"{value} on {host}" for host, value in values.items())
            problems.append(Problem(f"{name} differs, and it is unknown which node is right: {found}",
                                    suspects=tuple(values)))  # fmt: skip
            continue
        usual = votes[0][0]
        problems += [Problem(f"{host}: {name} is {value} here and {usual} elsewhere", host)
                     for host, value in values.items() if value != usual]  # fmt: skip
    return problems


def wrong_clocks(ahead: Mapping[str, float]) -> PreflightResult:
    """Clocks that are off, and notes on those that are slightly off: node -> seconds ahead of any one clock."""
    result = PreflightResult()
    if len(ahead) < 3:  # two differ, and either may be right
        seconds = max(ahead.values(), default=0.0) - min(ahead.values(), default=0.0)
        sentence = f"the clocks of {' and '.join(ahead)} differ by {seconds:.1f} s; start chrony"
        if seconds >= CLOCK_FAIL:
            result.problems.append(Problem(sentence, suspects=tuple(ahead)))
        elif seconds >= CLOCK_WARN:
            result.notes.append(sentence)
        return result
    usual = statistics.median_low(ahead.values())
    for host, seconds in ahead.items():
        off = seconds - usual
        sentence = f"{host}: the clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}; start chrony"
        if abs(off) >= CLOCK_FAIL:
            result.problems.append(Problem(sentence, host))
        elif abs(off) >= CLOCK_WARN:
            result.notes.append(sentence)
    return result


def slow_devices(speeds: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Nodes with a device that is far slower than the others, by the median absolute deviation (MAD)."""
    values = [speed for found in speeds.values() for speed in found]
    if len(values) < 4:
        return {}
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values)
    return {
        host: f"{host}: device {index} computes {speed:.3g} TFLOP/s where {median:.3g} is usual"
        for host, found in speeds.items()
        for index, speed in enumerate(found)
        if speed < SLOW * median and 0.6745 * (median - speed) > 3 * deviation
    }


def classify_nodes(rounds: Sequence[Mapping[Group, bool]]) -> tuple[set[str], set[str]]:
    """Good and bad nodes, after all-reduces of groups; the first round was of all nodes."""
    good: set[str] = set()
    bad: set[str] = set()
    for groups in rounds[1:]:
        known = set(good)
        for group, passed in groups.items():
            if passed and len(group) > 1:  # a node alone proves nothing about its network
                good |= set(group)
            elif not passed and len(unknown := set(group) - known) == 1:
                bad |= unknown
    return good, bad - good


def next_groups(hosts: Sequence[str], rounds: Sequence[Mapping[Group, bool]]) -> list[Group]:
    """Groups to test next, after an all-reduce of all nodes has failed; empty when there is no more to learn.

    Pairs, all at once: three rounds mostly suffice for any number of nodes, where halving takes one per doubling. A
    node in a pair that works is good; one that fails together with a good node is bad.
    """
    if len(hosts) < 3:
        return [(host,) for host in hosts] if len(rounds) == 1 else []
    good, bad = classify_nodes(rounds)
    unknown = [host for host in hosts if host not in good | bad]
    if not unknown or len(rounds) > MAX_ROUNDS:
        return []
    if good:
        return list(zip(unknown, [host for host in hosts if host in good], strict=False))
    ring = unknown + [""] * (len(unknown) % 2)  # round robin: each node meets each other in turn
    turn = (len(rounds) - 1) % (len(ring) - 1)
    ring = [ring[0], *ring[1 + turn :], *ring[1 : 1 + turn]]
    pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
    return [tuple(host for host in pair if host) for pair in pairs]


def failing_nodes(hosts: Sequence[str], rounds: Sequence[Mapping[Group, bool]], reason: str) -> list[Problem]:
    """The nodes that break the all-reduce, once the search has ended."""
    good, bad = classify_nodes(rounds)
    if len(hosts) == 1:
        return [Problem(f"{hosts[0]}: the all-reduce fails: {reason}", hosts[0])]
    if bad:
        return [Problem(f"{host}: the all-reduce fails wherever this node takes part: {reason}", host)
                for host in hosts if host in bad]  # fmt: skip
    unknown = [host for host in hosts if host not in good]
    if not unknown:
        return [Problem(f"the all-reduce of {len(hosts)} nodes fails, though any two of them succeed: {reason}")]
    return [Problem(f"the all-reduce of {' and '.join(unknown)} fails, and it is unknown which node is at fault: "
                    f"{reason}", suspects=tuple(unknown))]  # fmt: skip
