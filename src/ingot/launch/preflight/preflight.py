"""The checks before each attempt: are these nodes fit to run together? What half a minute finds here saves an hour.

The nodes talk only through files of the run folder, `launch/preflight/ATTEMPT/`: the network is not trusted yet, and
the folder must be shared anyway; a node that the others cannot see there is named. Each writes what it found, waits for
the others, and judges all reports by the same pure functions; the first to reach a result writes it for all. So no
coordinator can be lost, and no extra job step is needed.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.launch.agent.attempt import STOP_SIGNALS
from ingot.launch.preflight.allreduce_probe import Probe
from ingot.launch.preflight.diagnosis import (
    Group,
    PreflightResult,
    Problem,
    clock_offsets,
    failed_checks,
    failing_nodes,
    next_groups,
    nodes_that_differ,
    slow_devices,
    wrong_clocks,
)
from ingot.launch.preflight.node_checks import Report, check_node, own_address
from ingot.launch.preflight.node_preflight import too_slow
from ingot.launch.preflight.transport import fallback
from ingot.launch.profiles import find_profile
from ingot.launch.protocol import NODES_VARIABLE, LaunchFolder
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.failure_log import node_name
from ingot.plurals import count_of
from ingot.storage.atomic import write_json

REPORT_SECONDS = 30.0  # for the others' reports
IMAGE_SECONDS = 300.0  # the same where each node unpacks an image first
READY_SECONDS = 60.0  # for torch to be imported from a slow disk
ROUND_SECONDS = 20.0  # for an all-reduce
POLL_SECONDS = 0.05
CLAIM, RESULT = "claim", "verdict.json"


def report_limit(spec: LaunchSpec | None) -> float:
    """Seconds to wait for the other nodes' reports; without a spec, the longest that they may wait."""
    return REPORT_SECONDS if spec is not None and spec.image is None else IMAGE_SECONDS


class StopSignal(Exception):
    """A signal came meanwhile; its argument is the signal's number."""


class ResultClaimed(Exception):
    """Another node has reached a result."""


class Preflight:
    """This node's part in the checks of one attempt."""

    def __init__(self, spec: LaunchSpec, attempt: str, rank: int, env: Mapping[str, str] = os.environ):
        self.spec, self.rank, self.env = spec, rank, env
        self.profile = find_profile(spec.profile)
        self.host = node_name()
        self.folder = LaunchFolder(Path(spec.run_folder)).preflight(attempt)
        self.names = env[NODES_VARIABLE].split(",") if NODES_VARIABLE in env else []
        self.seen: dict[str, tuple[float, bool]] = {}
        self.notes: list[str] = []

    def run(self, record: Callable[[PreflightResult], None]) -> PreflightResult:
        """Check; the node that reaches a result first calls `record` with it, before any node acts on it."""
        with _raise_on_signals():
            try:
                result = PreflightResult(self._check(), self.notes)
            except ResultClaimed:
                return self._read_result(record)
            if not self._claim():
                return self._read_result(record)
            record(result)
            write_json(self.folder / RESULT, asdict(result))
            return result

    def _check(self) -> list[Problem]:
        begin = time.monotonic()
        spec = self.spec
        measure = spec.verb == "train" and (spec.nodes > 1 or spec.gpus_per_node > 0)
        with contextlib.ExitStack() as stack:
            # it imports torch while the nodes check themselves and wait for each other
            probe = stack.enter_context(self._probe(0)) if measure else None
            report = check_node(spec, self.profile, self.host, self.rank, self.env)
            limit = report_limit(spec)
            reports = [Report(**row) for row in self._exchange(".", asdict(report), limit, range(spec.nodes))]
            problems = self._missing(reports, limit) + failed_checks({r.host: r.checks for r in reports})
            named = {problem.host for problem in problems}
            problems += [p for p in nodes_that_differ({r.host: r.common for r in reports}) if p.host not in named]
            if not problems and probe is not None:
                self.hosts = [r.host for r in reports]  # by rank from here on
                problems = self._measure(probe)
        if not problems:
            seconds = time.monotonic() - begin
            self.notes.insert(0, f"{count_of(spec.nodes, 'node')} passed the checks in {seconds:.1f} s")
        return problems

    def _missing(self, reports: list[Report], seconds: float) -> list[Problem]:
        here = {report.host for report in reports}
        names = [name for name in self.names if name not in here]
        if not names:
            names = [f"node {rank}" for rank in range(self.spec.nodes) if rank not in {r.rank for r in reports}]
        why = "it hangs, or it does not share this folder"
        return [Problem(f"{name}: no report in {self.folder} after {seconds:g} s: {why}",
                        name if self.names else "") for name in names]  # fmt: skip

    def _measure(self, probe: Probe) -> list[Problem]:
        """Clocks, devices, and the network."""
        ready = self._ready(probe, 0, self.hosts)
        if broken := failed_checks({host: {"torch": r["error"]} if r["error"] else {} for host, r in ready.items()}):
            return broken
        problems: list[Problem] = []
        if len(self.hosts) > 1:
            clocks = wrong_clocks(clock_offsets({host: r["seen"] for host, r in ready.items()}))
            problems += clocks.problems
            self.notes += clocks.notes
        slow = slow_devices({host: r["tflops"] for host, r in ready.items()})
        if self.spec.gpus_per_node:
            problems += [Problem(sentence, host) for host, sentence in slow.items()]
        else:
            self.notes += slow.values()  # cores may be shared with others
        if problems or len(self.hosts) * len(probe.processes) == 1:
            return problems
        return self._test_network(probe, ready)

    def _test_network(self, probe: Probe, ready: dict[str, Any]) -> list[Problem]:
        """An all-reduce of all nodes; if it fails, of smaller groups until the bad nodes are known."""
        rounds: list[dict[Group, bool]] = []
        groups, reason = [tuple(self.hosts)], ""
        while groups:
            rows = self._round(probe if not rounds else None, len(rounds), groups, ready)
            if not rounds and (wrong := failed_checks({h: r["checks"] for h, r in rows.items()})):
                return wrong
            reason = reason or next((row["error"] for row in rows.values() if row["error"]), "")
            rounds.append({group: all(h in rows and not rows[h]["error"] for h in group) for group in groups})
            if len(rounds) == 1 and all(rounds[0].values()):
                speed = min(row["gb_s"] for row in rows.values())
                usual = self.profile.allreduce_gb_s
                expected = f"the profile expects {usual:g}" if usual else "the profile has no figure"
                nodes = f"all-reduce over {len(self.hosts)} nodes"
                self.notes.append(f"{nodes}: {speed:.3g} GB/s of bus bandwidth; {expected}")
                return []
            groups = next_groups(self.hosts, rounds)
        return failing_nodes(self.hosts, rounds, reason or "no answer")

    def _round(
        self, probe: Probe | None, number: int, groups: list[Group], ready: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """All-reduces of several groups at once; returns the rows of the nodes that took part."""
        members = [host for group in groups for host in group]
        own = next((group for group in groups if self.host in group), None)
        row: dict[str, Any] | None = None
        with contextlib.ExitStack() as stack:
            if own is not None:
                if probe is None:
                    probe = stack.enter_context(self._probe(number))
                    ready = self._ready(probe, number, members)
                row = self._all_reduce(probe, own, ready)
            ranks = [self.hosts.index(host) for host in members]
            # others may begin later, when they have given up waiting for a node that is not ready
            found = self._exchange(f"round-{number}", row, 2 * ROUND_SECONDS + READY_SECONDS, ranks)
        return {content["host"]: content for content in found}

    def _all_reduce(self, probe: Probe, group: Group, ready: dict[str, Any]) -> dict[str, Any]:
        """This node's part in the all-reduce of its group."""
        processes = len(probe.processes)
        address, port = ready[group[0]]["store"] if group[0] in ready else ("", 0)
        probe.go(address, port, group.index(self.host) * processes, len(group) * processes, ROUND_SECONDS)
        answers, error = probe.listen(ROUND_SECONDS + 1)
        speed = min((answer["gb_s"] for answer in answers if "gb_s" in answer), default=0.0)
        wrong = fallback(self.profile.transport, probe.transport()) if len(group) > 1 and not error else ""
        slow = too_slow(self.profile, self.spec.gpus_per_node, speed, len(group))
        return {"host": self.host, "rank": self.rank, "gb_s": speed, "error": error or slow,
                "checks": {"transport": wrong} if wrong else {}}  # fmt: skip

    def _ready(self, probe: Probe, number: int, hosts: list[str]) -> dict[str, dict[str, Any]]:
        """Wait until the processes of all nodes have imported torch; returns their answers by node."""
        answers, error = probe.listen(READY_SECONDS)
        first = self.env.get("MASTER_ADDR", "127.0.0.1")
        own = own_address(first) if self.spec.nodes > 1 else "127.0.0.1"
        row = {"host": self.host, "rank": self.rank, "error": error, "seen": self.seen, "store": [own, probe.port],
               "tflops": [answer["tflops"] for answer in answers if "tflops" in answer]}  # fmt: skip
        ranks = [self.hosts.index(host) for host in hosts]
        rows = {c["host"]: c for c in self._exchange(f"ready-{number}", row, READY_SECONDS, ranks)}
        silent = {"error": "its processes did not start", "seen": {}, "tflops": [], "store": ["", 0]}
        return {host: rows.get(host, silent) for host in hosts}

    @contextlib.contextmanager
    def _probe(self, number: int) -> Iterator[Probe]:
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = Probe(self.spec.gpus_per_node, self.folder / f"nccl-{number}-{self.host}.log", self.env)
        try:
            yield probe
        finally:
            probe.end()

    def _exchange(self, stage: str, own: dict[str, Any] | None, seconds: float, ranks: Any) -> list[dict[str, Any]]:
        """Write this node's part, if it has one, and wait for those of `ranks`; returns what came, by rank."""
        folder = self.folder / stage
        folder.mkdir(parents=True, exist_ok=True)
        if own is not None:
            write_json(folder / f"{self.host}.json", own | {"time": time.time()})
        end = time.monotonic() + seconds
        found: dict[str, dict[str, Any]] = {}
        waiting = False
        while True:
            os.utime(folder)  # a local change makes a network file system refresh the folder from its server
            for path in folder.glob("*.json"):
                if path.name not in found and path.name != RESULT:
                    found[path.name] = content = json.loads(path.read_text(encoding="utf-8"))
                    written = content.pop("time")
                    if stage == ".":
                        self.seen[content["host"]] = (time.time() - written, waiting)
            waiting = True
            if {content["rank"] for content in found.values()} >= set(ranks) or time.monotonic() > end:
                return sorted(found.values(), key=lambda content: content["rank"])
            if (self.folder / CLAIM).exists():
                raise ResultClaimed
            time.sleep(POLL_SECONDS)

    def _claim(self) -> bool:
        """Whether this node is the one to write the result."""
        try:
            os.close(os.open(self.folder / CLAIM, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640))
        except FileExistsError:
            return False
        return True

    def _read_result(self, record: Callable[[PreflightResult], None]) -> PreflightResult:
        path, end = self.folder / RESULT, time.monotonic() + 2 * ROUND_SECONDS
        while not path.exists():
            if time.monotonic() > end:
                problem = Problem(f"{self.host}: the node that claimed {path} has written no result")
                result = PreflightResult([problem])
                record(result)  # that node may not have lived to do it
                return result
            time.sleep(POLL_SECONDS)
        content = json.loads(path.read_text(encoding="utf-8"))
        return PreflightResult([Problem(**problem) for problem in content["problems"]], content["notes"])


@contextlib.contextmanager
def _raise_on_signals() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise StopSignal(number)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
