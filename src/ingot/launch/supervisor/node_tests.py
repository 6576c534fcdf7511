"""The checks before each attempt, led by the supervisor: are these nodes fit to run together?

Each node is asked what it finds about itself, then its devices and the network are measured. That is a handful of
messages per node, whatever the number of nodes; who is at fault is for `preflight.diagnosis`, a set of pure functions.
Spare nodes are asked and measured, too: one that is not fit is known before it is needed, and one that is fit stays
warm, with torch imported.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.launch.messages import AllReduce, CheckNode, EndProbe, Failed, NodeChecked, ProbeReady, Reduced, StartProbe
from ingot.launch.preflight.diagnosis import (
    FAIL,
    OK,
    SKIP,
    Group,
    PreflightResult,
    Problem,
    failed_checks,
    failing_nodes,
    next_groups,
    nodes_that_differ,
    own_checks,
    slow_devices,
    wrong_clocks,
)
from ingot.launch.profiles import find_profile
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.cluster import Cluster, LostNode
from ingot.launch.supervisor.records import FINAL_KINDS, Cause, Kind
from ingot.launch.supervisor.server import AgentServer
from ingot.plurals import count_of

CHECK_SECONDS = 30.0  # for a node to examine itself, on a slow disk
READY_SECONDS = 60.0  # for torch to be imported from there
ROUND_SECONDS = 20.0  # for an all-reduce
SPARE_SECONDS = 5.0  # longer than the nodes themselves, for spares to do the same
ANSWER_SECONDS = 2.0  # for an answer to arrive
SHARED_CHECKS = frozenset({"disk", "data", "config"})  # which may fail for what all nodes share


class NodeTests:
    """The checks of one attempt."""

    def __init__(self, server: AgentServer, spec: LaunchSpec, nodes: Sequence[str], spares: Sequence[str] = ()):
        self.server, self.spec, self.nodes, self.spares = server, spec, list(nodes), list(spares)
        self.profile = find_profile(spec.profile)
        self.result = PreflightResult()
        self.unfit_spares: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        """Nodes that did not answer a question that any healthy one answers."""

    async def run(self) -> PreflightResult:
        begin = time.monotonic()
        self.result.problems = await self._check()
        if not self.result.problems and not self.lost:
            seconds = time.monotonic() - begin
            self.result.notes.insert(0, f"{count_of(len(self.nodes), 'node')} passed the checks in {seconds:.1f} s")
        return self.result

    async def _check(self) -> list[Problem]:
        asked = {node: time.time() for node in (*self.nodes, *self.spares)}
        clocks: dict[str, float] = {}
        answers = await self.server.request_all(dict.fromkeys(asked, CheckNode()), CHECK_SECONDS + ANSWER_SECONDS)
        own = {node: answers[node] for node in self.nodes}
        found: dict[str, NodeChecked] = {}
        problems: list[Problem] = []
        for node, answer in own.items():
            if isinstance(answer, NodeChecked):
                found[node] = answer
                clocks[node] = answer.node_seconds - asked[node]
            else:
                problems += self._unanswered(node, answer)
        everywhere = set.intersection(*(set(answer.checks) for answer in found.values())) if found else set()
        self._note_spares({node: answers[node] for node in self.spares}, everywhere)
        problems += failed_checks({node: answer.checks for node, answer in found.items()})
        named = {problem.host for problem in problems}
        differ = nodes_that_differ({node: answer.common for node, answer in found.items()})
        problems += [problem for problem in differ if problem.host not in named]
        wrong = self._wrong_clocks(clocks)
        problems += wrong
        failed = {check for answer in found.values() for check in answer.checks}
        failed |= ({"software"} if differ else set()) | ({"clocks"} if wrong else set())
        made = own_checks(self.spec, self.profile) + (["software", "clocks"] if len(self.nodes) > 1 else [])
        looked = any("environment" not in answer.checks for answer in found.values())  # else nothing else was
        self.result.checks = dict.fromkeys(made, OK if looked else SKIP) | dict.fromkeys(failed, FAIL)
        if "config" in failed:
            self.result.checks["data"] = SKIP
        measure = self.spec.verb == "train" and (self.spec.nodes > 1 or self.spec.gpus_per_node > 0)
        if measure:
            several = len(self.nodes) * (self.spec.gpus_per_node or 1) > 1
            self.result.checks |= {"devices": SKIP, "network": SKIP} if several else {"devices": SKIP}
        if problems or self.lost or not measure:
            return problems
        return await self._measure()

    def _unanswered(self, node: str, answer: Any) -> list[Problem]:
        if isinstance(answer, Failed) and answer.kind not in ("lost", "silent"):
            return [Problem(f"{node}: {answer.reason}", node)]
        self.lost[node] = answer.reason if isinstance(answer, Failed) else f"{node}: answered something else"
        return []

    def _note_spares(self, answers: Mapping[str, Any], everywhere: set[str]) -> None:
        """Spares that could not be used; not for what fails on every node."""
        for node, answer in answers.items():
            if isinstance(answer, NodeChecked):
                own = [sentence for check, sentence in answer.checks.items() if check not in everywhere]
                if own:
                    self.unfit_spares[node] = own[0]
            elif isinstance(answer, Failed) and answer.kind != "lost":
                self.unfit_spares[node] = answer.reason

    async def check_spares(self, first: str) -> None:
        """Only the spares; what the first node finds, too, is nobody's fault."""
        answers = await self.server.request_all(
            {node: CheckNode() for node in self.spares}, CHECK_SECONDS + ANSWER_SECONDS
        )
        found = {check for answer in answers.values() if isinstance(answer, NodeChecked) for check in answer.checks}
        everywhere = found & SHARED_CHECKS
        if everywhere:  # asked only then: it trains
            other = await self.server.request(first, CheckNode(), CHECK_SECONDS + ANSWER_SECONDS)
            everywhere &= set(other.checks) if isinstance(other, NodeChecked) else everywhere
        self._note_spares(answers, everywhere)
        if self.spec.verb == "train":
            await self._warm_spares()

    def _wrong_clocks(self, ahead: Mapping[str, float]) -> list[Problem]:
        if len(ahead) < 2:
            return []
        found = wrong_clocks(ahead)
        self.result.notes += found.notes
        return found.problems

    async def _measure(self) -> list[Problem]:
        try:
            warm = asyncio.ensure_future(self._warm_spares())
            ready, problems = await self._start_probes(self.nodes)
            await asyncio.wait((warm,), timeout=SPARE_SECONDS)
            warm.cancel()  # what it has begun on a slow spare goes on
            if problems or self.lost:
                self.result.checks["devices"] = FAIL
                return problems
            slow = slow_devices({node: answer.tflops for node, answer in ready.items()})
            is_slow = self.spec.gpus_per_node > 0 and bool(slow)
            self.result.checks["devices"] = FAIL if is_slow else OK
            if is_slow:
                return [Problem(sentence, node) for node, sentence in slow.items()]
            self.result.notes += slow.values()  # cores may be shared with others
            processes = self.spec.gpus_per_node or 1
            if len(self.nodes) * processes == 1:
                return []
            found = await self._test_network(ready, processes)
            self.result.checks["network"] = FAIL if found else OK
            return found
        finally:
            await self.server.request_all(dict.fromkeys(self.nodes, EndProbe()), ANSWER_SECONDS)

    async def _warm_spares(self) -> None:
        """Have the spares import torch and measure their devices now, and keep the processes: when one takes a node's
        place, they only measure again."""
        spares = [node for node in self.spares if node not in self.unfit_spares]
        answers = await self.server.request_all(
            dict.fromkeys(spares, StartProbe(READY_SECONDS)), READY_SECONDS + ANSWER_SECONDS
        )
        for node, answer in answers.items():
            if isinstance(answer, ProbeReady) and answer.error:
                self.unfit_spares[node] = answer.error

    async def _start_probes(self, nodes: Sequence[str]) -> tuple[dict[str, ProbeReady], list[Problem]]:
        answers = await self.server.request_all(
            dict.fromkeys(nodes, StartProbe(READY_SECONDS)), READY_SECONDS + ANSWER_SECONDS
        )
        problems: list[Problem] = []
        ready = {}
        for node, answer in answers.items():
            if isinstance(answer, ProbeReady):
                ready[node] = answer
            else:
                problems += self._unanswered(node, answer)
        broken = {node: {"torch": answer.error} if answer.error else {} for node, answer in ready.items()}
        return ready, problems + failed_checks(broken)

    async def _test_network(self, ready: Mapping[str, ProbeReady], processes: int) -> list[Problem]:
        """An all-reduce of all nodes; if it fails, of smaller groups until the bad nodes are known."""
        rounds: list[dict[Group, bool]] = []
        groups: list[Group] = [tuple(self.nodes)]
        reason = ""
        while groups:
            if rounds:
                members = [node for group in groups for node in group]
                await self.server.request_all(dict.fromkeys(members, EndProbe()), ANSWER_SECONDS)
                ready, _ = await self._start_probes(members)
            answers = await self._round(groups, ready, processes)
            wrong = {n: {"transport": a.transport} if isinstance(a, Reduced) and a.transport else {}
                     for n, a in answers.items()}  # fmt: skip
            if not rounds and (problems := failed_checks(wrong)):
                return problems
            errors = {node: self._error(answer, groups) for node, answer in answers.items()}
            reason = reason or next((error for error in errors.values() if error), "")
            rounds.append({group: not any(errors[node] for node in group) for group in groups})
            if len(rounds) == 1 and all(rounds[0].values()):
                self._note_speed(answers)
                return []
            groups = next_groups(self.nodes, rounds)
        return failing_nodes(self.nodes, rounds, reason or "no answer")

    async def _round(self, groups: Sequence[Group], ready: Mapping[str, ProbeReady], processes: int) -> dict[str, Any]:
        bodies: dict[str, Any] = {}
        for group in groups:
            first = self.server.link(group[0])
            address = first.address if first is not None else ""
            port = ready[group[0]].port if group[0] in ready else 0
            for number, node in enumerate(group):
                bodies[node] = AllReduce(address, port, number * processes, len(group) * processes, ROUND_SECONDS)
        return await self.server.request_all(bodies, ROUND_SECONDS + ANSWER_SECONDS)

    def _error(self, answer: Any, groups: Sequence[Group]) -> str:
        if not isinstance(answer, Reduced):
            return answer.reason if isinstance(answer, Failed) else "no answer"
        usual = self.profile.allreduce_gb_s
        whole_nodes = self.spec.gpus_per_node == self.profile.gpus_per_node
        if answer.error or usual is None or not whole_nodes or max(map(len, groups)) < 2 or answer.gb_s > usual / 2:
            return answer.error
        return f"{answer.gb_s:.3g} GB/s of bus bandwidth where {usual:g} is usual"

    def _note_speed(self, answers: Mapping[str, Any]) -> None:
        speed = min(answer.gb_s for answer in answers.values())
        usual = self.profile.allreduce_gb_s
        expected = f"the profile expects {usual:g}" if usual else "the profile has no figure"
        nodes = f"all-reduce over {len(self.nodes)} nodes"
        self.result.notes.append(f"{nodes}: {speed:.3g} GB/s of bus bandwidth; {expected}")


class SpareWatch:
    """Spares that wait while the others train."""

    def __init__(self, server: AgentServer, cluster: Cluster, spec: LaunchSpec, first: str, spares: Sequence[str]):
        self.server, self.cluster, self.spec, self.first, self.spares = server, cluster, spec, first, list(spares)

    async def look(self) -> list[LostNode]:
        """Test them as before an attempt: memory, disk, devices. Returns those that are not to be used any more; one
        whose agent alone has ended gets a new one when it is needed."""
        out = {item.node: item for item in await self.cluster.lost_nodes(self.spares)}
        if self.spec.preflight:
            present = [node for node in self.spares if node in self.server.links and node not in out]
            tests = NodeTests(self.server, self.spec, [], present)
            await tests.check_spares(self.first)
            out |= {node: LostNode(node, reason) for node, reason in tests.unfit_spares.items()}
        self.spares = [node for node in self.spares if node not in out]
        return list(out.values())


def cause_of_problems(result: PreflightResult, nodes: Sequence[str]) -> Cause:
    """What the judge is told about checks that failed."""
    first = next((p for p in result.problems if p.kind in FINAL_KINDS), result.problems[0])
    more = f" (and {len(result.problems) - 1} more)" if len(result.problems) > 1 else ""
    kind: Kind = first.kind if first.kind in FINAL_KINDS else "machine"  # type: ignore[assignment]
    suspects = tuple(dict.fromkeys(node for problem in result.problems for node in problem.suspects))
    if kind in FINAL_KINDS:  # seen by one node alone, it may be that node's view of the disk
        alone = suspects[0] if len(suspects) == 1 else ""
        return Cause(kind, first.message + more, alone, is_local=bool(alone))
    named = [problem.host for problem in result.problems if problem.host]
    bad = list(dict.fromkeys(named))
    if not bad and not suspects and not first.host and len(nodes) > 1:
        return Cause("site", first.message + more)  # a disk that all nodes find full, say: it may pass
    if not bad:
        return Cause(kind, first.message + more, first.host, suspects=suspects)
    if len(bad) == len(nodes) > 1:
        return Cause(kind, first.message + more, suspects=tuple(bad))
    return Cause(kind, first.message + more, bad[0], is_local=True, bad_nodes=tuple(bad[1:]))
