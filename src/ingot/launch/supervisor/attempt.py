"""One attempt: its nodes report, are checked, run the ranks, and are heard and cleared when it ends.

    HELLO -> PREFLIGHT -> START -> RUN -> COLLECT (5 s, all nodes' evidence) -> TEARDOWN (10 s)

Whatever happens leads to a `Cause`; nothing here decides what follows from it.
"""

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ingot.errors import EXIT_CONTINUE
from ingot.launch.messages import (
    Collect,
    Collected,
    Done,
    Failed,
    KillRanks,
    PortReserved,
    RankProgress,
    RanksEnded,
    RanksKilled,
    ReservePort,
    RunRanks,
    StopRanks,
    Suspicion,
)
from ingot.launch.peer_copies.arrange import CopyArrangement
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.cluster import AgentEnded, Cluster, LostNode, Times, own_network
from ingot.launch.supervisor.diagnose import PaceWatch, diagnose, with_ranks_left
from ingot.launch.supervisor.node_tests import NodeTests, SpareWatch, cause_of_problems
from ingot.launch.supervisor.progress import StopFlag
from ingot.launch.supervisor.records import Cause, Kind, Opened, Phase
from ingot.launch.supervisor.server import AgentEvent, AgentServer

T = TypeVar("T")
AGENT_GONE, RESTARTED = "its agent has gone", "the node was restarted"
ENDED_BY_SIGNAL = re.compile(rf"killed by signal ({signal.SIGTERM:d}|{signal.SIGUSR2:d}|{signal.SIGINT:d})\b")


class Stopped(Exception):
    """The stop came before there were ranks that could save."""


class AttemptRun:
    """One attempt, from its record `Opened` to its cause."""

    def __init__(
        self,
        opened: Opened,
        spec: LaunchSpec,
        server: AgentServer,
        cluster: Cluster,
        stop: StopFlag,
        on_phase: Callable[[Phase, str, int], None],
        times: Times,
        share: tuple[int, int] | None = None,
    ):
        self.opened, self.spec, self.server, self.cluster = opened, spec, server, cluster
        self.stop, self.on_phase, self.times = stop, on_phase, times
        self.nodes, self.share = list(opened.nodes), share
        self.reached_step = False
        self.started = False
        self.codes: dict[str, dict[int, int]] = {}
        self.ended: dict[str, str] = {}
        """Agents that have ended, and how the cluster puts it."""
        self.ended_for: dict[str, str] = {}
        """Agents that were ended for the loss of another node, and that node."""
        self.absent: dict[str, float] = {}
        """Nodes whose connection broke, and since when."""
        self.boots: dict[str, str] = {}
        self.phase: Phase | None = None
        self.pace, self.slow = PaceWatch(), ""
        self.notes: list[str] = []
        self.unfit_spares: dict[str, str] = {}
        self.ended_epoch = 0
        """Of the last attempt whose first node has confirmed that its ranks have ended: nobody waits for it. That Slurm
        calls a node down proves nothing; it may be cut off, and go on."""
        self.on_lost_spare: Callable[[LostNode], Awaitable[None]] | None = None

    async def run(self, spares: Sequence[str], env: Mapping[str, str]) -> Cause:
        try:
            cause = await self.hello(spares, env) or await self._preflight(spares) or await self._start(spares)
        except Stopped:
            early = Cause("stopped", "stopped before the first step")
            cause = await self._without(self.stop.lost) if self.stop.lost else early
        if cause is None:
            watch = asyncio.ensure_future(self._watch_spares(spares))
            try:
                cause = await self._watch()
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        return await self._teardown(cause)

    def _enter(self, phase: Phase, detail: str = "", copied: int = 0) -> None:
        self.phase = phase
        self.on_phase(phase, detail, copied)

    # --- before the ranks

    async def _unless_stopped(self, awaitable: Awaitable[T]) -> T:
        """The result, unless a stop is requested first."""
        task = asyncio.ensure_future(awaitable)
        stop = asyncio.ensure_future(self.stop.event.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            for waiting in (task, stop):
                if not waiting.done():
                    waiting.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def hello(self, spares: Sequence[str], env: Mapping[str, str]) -> Cause | None:
        """Start the agents that do not run yet, and wait for them."""
        everybody = [*self.nodes, *spares]
        absent = [node for node in everybody if node not in self.server.links]
        if any(node in self.nodes for node in absent):
            self._enter("hello")
        self._drain_events()
        if absent and not await self.cluster.is_answering():  # srun would wait, or end what a successor has started
            if any(node in self.nodes for node in absent):
                return Cause("site", "the cluster's controller does not answer")
            absent = []
        if absent:
            await self._unless_stopped(self.cluster.start_agents(absent, env))
            await self._unless_stopped(self._wait_for_agents(everybody))
        missing = [node for node in self.nodes if node not in self.server.links]
        self.boots = {node: link.boot_id for node, link in self.server.links.items()}
        if not missing:
            return None
        if any(node in self.ended_for for node in missing):
            return await self._without({node: self.ended.get(node, AGENT_GONE) for node in missing})
        said = next((self.ended[node] for node in missing if node in self.ended), "")
        if not await self.cluster.is_answering():
            return Cause("site", f"the cluster's controller does not answer{_because(said)}")
        if len(everybody) > 1 and not self.server.links.keys() & set(everybody):
            refused = self.server.refused[-1] if self.server.refused else ""
            return Cause("silent", f"no agent has reported{_because(said or refused)}; see launch/output")
        lost = {item.node: item for item in await self.cluster.lost_nodes(missing)}
        node, *others = missing
        why = said or (lost[node].reason if node in lost else "") or "it hangs, or cannot reach the supervisor"
        return Cause("silent", f"{node}: its agent has not reported: {why}", node, bad_nodes=tuple(others))

    async def _wait_for_agents(self, everybody: Sequence[str]) -> None:
        limit = self.times.hello if self.spec.image is None else self.times.hello_image
        end = time.monotonic() + limit
        while (left := end - time.monotonic()) > 0:
            self._note_ended()
            waiting = [n for n in everybody if n not in {*self.server.links, *self.ended, *self.ended_for}]
            if not waiting:
                return
            if not any(node in self.nodes for node in waiting):  # spares only
                end = min(end, time.monotonic() + self.times.hello_grace)
            async with self.server.arrived:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, 0.2)):
                        await self.server.arrived.wait()

    def _note_ended(self) -> None:
        while not self.cluster.ended.empty():
            item: AgentEnded = self.cluster.ended.get_nowait()
            if item.ended_for:
                self.ended_for[item.node] = item.ended_for
            elif item.node not in self.server.links:
                self.ended[item.node] = item.reason

    async def _preflight(self, spares: Sequence[str]) -> Cause | None:
        if not self.spec.preflight:
            return None
        self._enter("preflight")
        tests = NodeTests(self.server, self.spec, self.nodes, [n for n in spares if n in self.server.links])
        result = await self._unless_stopped(tests.run())
        self.notes, self.unfit_spares = result.notes, tests.unfit_spares
        await self.stop.settled()
        if self.stop.event.is_set():  # the signal that asked for it has ended the processes that measure
            raise Stopped
        if tests.lost:
            return await self._without(tests.lost)
        return cause_of_problems(result, self.nodes) if result.problems else None

    async def _start(self, spares: Sequence[str]) -> Cause | None:
        self._enter("starting")
        self._drain_events()
        self.copies, address, port = CopyArrangement(self.server, self.nodes, self.opened.step, spares), "", 0
        if self.spec.verb == "train" and len(self.nodes) > 1:
            answer = await self._unless_stopped(self.server.request(self.nodes[0], ReservePort(), self.times.reserve))
            if not isinstance(answer, PortReserved):
                return await self._not_done(self.nodes[0], answer)
            link = self.server.link(self.nodes[0])
            address, port = link.address if link is not None else "", answer.port
        if self.spec.verb == "train":
            await self._unless_stopped(self.copies.make())
            if self.copies.newest:
                self._enter("starting", copied=self.copies.newest)
        if self.stop.event.is_set():
            raise Stopped
        self.started = True
        answers = await self.server.request_all(
            {node: self._run_ranks(number, address, port) for number, node in enumerate(self.nodes)}, self.times.start
        )
        for node, answer in answers.items():
            if not isinstance(answer, Done):
                return await self._not_done(node, answer)
        return None

    def _run_ranks(self, number: int, address: str, port: int) -> RunRanks:
        place, nodes = self.share or (number, len(self.nodes))
        peer, guest = self.copies.of(number)
        return RunRanks(self.opened.epoch, self.opened.attempt, place, nodes, address, port, peer, guest,
                        self.ended_epoch)  # fmt: skip

    async def _not_done(self, node: str, answer: Any) -> Cause:
        if isinstance(answer, Failed) and answer.kind in ("lost", "silent"):
            return await self._without({node: answer.reason})
        reason = answer.reason if isinstance(answer, Failed) else "its agent answered something else"
        kind: Kind = "machine"
        if isinstance(answer, Failed) and answer.kind in ("user", "data", "site", "device", "transport"):
            kind = answer.kind  # type: ignore[assignment]
        return Cause(kind, f"{node}: {reason}", node, is_local=kind in ("machine", "device"))

    # --- while they run

    async def _watch_spares(self, spares: Sequence[str]) -> None:
        """Test spares again from time to time: one that has broken is known before it is needed."""
        watch = SpareWatch(self.server, self.cluster, self.spec, self.nodes[0], spares)
        while watch.spares:
            await asyncio.sleep(self.times.recheck)
            for item in await watch.look():
                if self.on_lost_spare is not None:
                    await self.on_lost_spare(item)

    async def _watch(self) -> Cause:
        """Until all ranks have ended, or something is wrong."""
        told = False
        asked = time.monotonic()
        while True:
            now = time.monotonic()
            if self.stop.reason is not None and not told:
                told, asked = True, now
                self._enter("stopping", self.stop.detail)
                body = StopRanks(self.opened.epoch, self.stop.reason)
                await self.server.request_all(dict.fromkeys(self.nodes, body), self.times.collect)
            if told and self.stop.is_over:
                return Cause("stopped", "the time was over before the ranks had saved and ended")
            if told and now - asked > self.times.stop:
                return await self._collect("the ranks did not stop", is_hang=True)
            if lost := self.stop.lost or self._given_up(now):
                return await self._collect("", is_hang=False, lost=lost)
            try:
                async with asyncio.timeout(self._patience(now)):
                    event = await self.server.events.get()
            except TimeoutError:
                continue
            cause = await self._take(event)
            if cause is not None:
                return cause

    def _patience(self, now: float) -> float:
        waits = [self.times.reconnect - (now - since) for since in self.absent.values()]
        return max(0.01, min([1.0, *waits]))

    async def _take(self, event: AgentEvent) -> Cause | None:
        """What an event means; None if the attempt goes on."""
        node, report = event.node, event.report
        if node not in self.nodes:
            return None  # a spare; `hello` looks at it when it is needed
        if report is None:
            self.absent.setdefault(node, time.monotonic())
            return None
        if report.epoch != self.opened.epoch:
            return None
        if isinstance(report, RankProgress):
            self._note_progress(node, report)
        elif isinstance(report, Suspicion):
            return await self._collect(report.what, report.is_hang)
        elif isinstance(report, RanksEnded):
            self.codes[node] = dict(report.codes)
            if len(self.codes) == len(self.nodes):
                return self._ended_well()
        return None

    def _note_progress(self, node: str, report: RankProgress) -> None:
        self.reached_step = self.reached_step or report.batch > 0
        self.pace.note(node, report.own_seconds)
        if node == self.nodes[0] and self.stop.reason is None:
            slow, self.slow = self.slow, self.pace.look()
            if report.phase != self.phase or self.slow != slow:
                self._enter(report.phase, self.slow)

    def _ended_well(self) -> Cause:
        codes = {code for found in self.codes.values() for code in found.values()}
        if codes <= {0}:
            return Cause("finished", "")
        if codes <= {0, EXIT_CONTINUE}:
            return Cause("stopped", "saved and stopped")
        return Cause("program", f"the ranks ended with the exit codes {sorted(codes)}")

    def _given_up(self, now: float) -> dict[str, str]:
        """Nodes whose agent did not come back in time, or came back from a restart."""
        lost = {}
        for node in self.nodes:
            link = self.server.link(node)
            if link is not None and link.boot_id != self.boots.get(node, link.boot_id):
                lost[node] = RESTARTED
            elif link is not None:
                self.absent.pop(node, None)
            elif now - self.absent.setdefault(node, now) >= self.times.reconnect:
                lost[node] = AGENT_GONE
        return lost

    # --- the end

    async def _collect(self, what: str, is_hang: bool, lost: Mapping[str, str] | None = None) -> Cause:
        """What all nodes know; asked twice if the first answers do not decide."""
        self._enter("collecting", what)
        begin = time.monotonic()
        await asyncio.sleep(0 if is_hang or lost else self.times.settle)
        while True:
            left = max(0.5, begin + self.times.collect - time.monotonic())
            body = Collect(self.opened.epoch, is_hang)
            answers = await self.server.request_all(dict.fromkeys(self.nodes, body), left)
            await self.stop.settled()
            evidence = {n: a.evidence for n, a in answers.items() if isinstance(a, Collected)}
            gone = {**(lost or {}), **self.stop.lost}
            for node, answer in answers.items():
                if node not in self.server.links and isinstance(answer, Failed):
                    gone.setdefault(node, AGENT_GONE)
            gone = self._first_of(gone)
            quiet = gone or [node for node in self.nodes if node not in evidence]
            if quiet and (alone := await own_network(self.cluster, evidence, quiet)) is not None:
                return alone
            cause = diagnose(self.nodes, evidence, gone, await self._cut_off(gone), what if is_hang else "")
            if self.stop.reason is not None and ENDED_BY_SIGNAL.search(cause.message):
                return Cause("stopped", f"the signal to stop ended it before it could save: {cause.message}")
            decided = cause.node or not cause.suspects
            if decided or begin + self.times.collect - time.monotonic() < 2 * self.times.settle:
                return cause
            await asyncio.sleep(self.times.settle)

    def _first_of(self, gone: Mapping[str, str]) -> dict[str, str]:
        """When a node dies and is back at once, srun ends the other agents, too: the node that it names counts, or else
        those that went first."""
        self._note_ended()
        named = [self.ended_for[node] for node in gone if node in self.ended_for]
        gone = {node: why for node, why in gone.items() if node not in self.ended_for}
        times = {node: self.server.dropped.get(node, 0.0) for node in gone}
        first = [node for node in gone if named or times[node] - min(times.values()) < self.times.apart]
        return dict.fromkeys(named, RESTARTED) | {node: self.ended.get(node, gone[node]) for node in first}

    async def _without(self, lost: Mapping[str, str]) -> Cause:
        """Nodes do not answer any more, before a rank could say anything."""
        alone = await own_network(self.cluster, [node for node in self.nodes if node not in lost], lost)
        lost = self._first_of(lost)
        return alone or diagnose(self.nodes, {}, lost, await self._cut_off(lost))

    async def _cut_off(self, lost: Mapping[str, str] | Sequence[str]) -> list[str]:
        """Of the lost nodes, those that have died as nodes, by what the cluster or they themselves say."""
        if not lost:
            return []
        restarted = [node for node in lost if (link := self.server.link(node)) is not None
                     and link.boot_id != self.boots.get(node, link.boot_id)]  # fmt: skip
        down = [item.node for item in await self.cluster.lost_nodes(list(lost)) if not item.is_drained]
        return [*restarted, *down]

    async def _teardown(self, cause: Cause) -> Cause:
        """No rank of this attempt runs when the next one starts, except those that not even SIGKILL ends."""
        if not self.started:
            return cause
        answers = await self.server.request_all(
            dict.fromkeys(self.nodes, KillRanks(self.opened.epoch)), self.times.teardown
        )
        first = answers[self.nodes[0]]
        if isinstance(first, RanksKilled) and not first.left:
            self.ended_epoch = self.opened.epoch
        left = {node: len(answer.left) for node, answer in answers.items()
                if isinstance(answer, RanksKilled) and answer.left}  # fmt: skip
        return with_ranks_left(cause, left)

    def _drain_events(self) -> None:
        """Reports of an earlier attempt do not concern this one; broken connections show in `links`."""
        while not self.server.events.empty():
            self.server.events.get_nowait()
        self.absent.clear()


def _because(text: str) -> str:
    return f": {text}" if text else ""
