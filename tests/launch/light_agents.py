"""A cluster of coroutines: agents that speak `messages` and run no ranks, and a cluster that starts them. Real sockets,
the real server and the real supervisor; no torch, no processes."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.launch.agent.evidence import NodeEvidence, RankEvidence
from ingot.launch.messages import (
    ADDRESS_VARIABLE,
    START_VARIABLE,
    TOKEN_VARIABLE,
    AllReduce,
    Answer,
    Challenge,
    CheckNode,
    Collect,
    Collected,
    CopiesHeld,
    Done,
    EndProbe,
    Hello,
    KillRanks,
    Leave,
    NodeChecked,
    PortReserved,
    ProbeReady,
    RankProgress,
    RanksEnded,
    RanksKilled,
    Reduced,
    Refused,
    ReportCopies,
    Request,
    ReservePort,
    RunRanks,
    StartProbe,
    StopRanks,
    Suspicion,
    Welcome,
    agent_proof,
    encode,
    from_supervisor,
    supervisor_proof,
)
from ingot.launch.supervisor.cluster import AgentEnded, LostNode
from ingot.launch.supervisor.records import StopReason

TORCH = "torch/distributed/distributed_c10d.py:2810 (all_reduce)"


@dataclass
class Behavior:
    """What a node does. `fault` is called when its ranks start, and may do anything to the agent."""

    checks: dict[str, str] = field(default_factory=dict)
    on_check: "Callable[[LightAgent], dict[str, str]] | None" = None
    """In place of `checks`."""
    common: dict[str, str] = field(default_factory=lambda: {"version": "1"})
    clock: float = 0.0
    cannot_reduce: bool = False
    silent_from: type | None = None
    """The first kind of message that it no longer answers."""
    never_starts: str = ""
    """Why its agent ends at once."""
    hangs_at_start: bool = False
    token: str = ""
    """A wrong one."""
    fault: "Callable[[LightAgent, RunRanks], Any] | None" = None
    left: tuple[int, ...] = ()


class LightAgent:
    """One node's agent."""

    def __init__(self, node: str, env: Mapping[str, str], launch: str, behavior: Behavior, seconds: float):
        self.node, self.env, self.launch, self.behavior, self.seconds = node, env, launch, behavior, seconds
        self.epoch, self.running, self.evidence = 0, False, NodeEvidence(node)
        self.boot_id = f"boot-{node}"
        self.messages = 0
        self.seen: list[str] = []
        self._ranks: asyncio.Task[None] | None = None

    async def run(self) -> None:
        host, port = self.env[ADDRESS_VARIABLE].rsplit(":", 1)
        reader, self.writer = await asyncio.open_connection("127.0.0.1", int(port))
        del host
        try:
            if not await self.greet(reader):
                return
            while line := await reader.readline():
                request = from_supervisor(line)
                assert isinstance(request, Request)
                self.messages += 1
                self.seen.append(type(request.body).__name__)
                if self.behavior.silent_from is not None and isinstance(request.body, self.behavior.silent_from):
                    self.behavior.silent_from = object  # nor anything after it
                    continue
                if isinstance(request.body, Leave):
                    self.say(Answer(request.number, Done()))
                    return
                self.say(Answer(request.number, self.answer(request.body)))
        except ConnectionError:
            pass
        finally:
            if self._ranks is not None:
                self._ranks.cancel()
            self.writer.close()

    async def greet(self, reader: asyncio.StreamReader) -> bool:
        challenge = from_supervisor(await reader.readline())
        assert isinstance(challenge, Challenge)
        token, nonce = self.behavior.token or self.env[TOKEN_VARIABLE], secrets.token_hex(8)
        hello = Hello(self.launch, self.env[START_VARIABLE], self.node, self.boot_id, "127.0.0.1", nonce, "")
        signed = agent_proof(token, challenge.nonce, hello)
        self.say(Hello(hello.launch, hello.start, self.node, self.boot_id, "127.0.0.1", nonce, signed))
        welcome = from_supervisor(await reader.readline())
        if isinstance(welcome, Refused):
            return False
        assert isinstance(welcome, Welcome) and welcome.proof == supervisor_proof(token, nonce)
        return True

    def say(self, message: Any) -> None:
        self.messages += 1
        self.writer.write(encode(message))

    def answer(self, body: Any) -> Any:
        if isinstance(body, CheckNode):
            checks = self.behavior.on_check(self) if self.behavior.on_check is not None else self.behavior.checks
            return NodeChecked(checks, self.behavior.common, time.time() + self.behavior.clock)
        if isinstance(body, StartProbe):
            return ProbeReady(4000, (1.0,))
        if isinstance(body, AllReduce):
            return Reduced(error="no route" if self.behavior.cannot_reduce else "", gb_s=1.0)
        if isinstance(body, EndProbe):
            return Done()
        if isinstance(body, ReservePort):
            return PortReserved(4001)
        if isinstance(body, ReportCopies):
            return CopiesHeld(4002)
        if isinstance(body, RunRanks):
            self.epoch, self.running = body.epoch, True
            self._ranks = asyncio.ensure_future(self.ranks(body))
            return Done()
        if isinstance(body, StopRanks):
            self.end(75)
            return Done()
        if isinstance(body, Collect):
            return Collected(self.evidence)
        if isinstance(body, KillRanks):
            self.running = False
            if self._ranks is not None:
                self._ranks.cancel()
            return RanksKilled(self.behavior.left)
        raise AssertionError(body)

    async def ranks(self, body: RunRanks) -> None:
        self.rank = body.node_rank
        self.say(RankProgress(body.epoch, "starting", 0))
        if self.behavior.fault is not None:
            outcome = self.behavior.fault(self, body)
            if asyncio.iscoroutine(outcome):
                outcome = await outcome
            if outcome == "over":
                return
        self.say(RankProgress(body.epoch, "running", 1))
        await asyncio.sleep(self.seconds)
        self.end(0)

    def end(self, code: int) -> None:
        if self.running:
            self.running = False
            if self._ranks is not None and self._ranks is not asyncio.current_task():
                self._ranks.cancel()
            self.say(RanksEnded(self.epoch, {getattr(self, "rank", 0): code}))

    # --- faults

    def fail(self, message: str, kind: str = "program", code: int = 1, batch: int = 4, **more: Any) -> str:
        self.evidence = NodeEvidence(
            self.node, (RankEvidence(self.rank, code, message, kind, time.time(), batch=batch, **more),)
        )
        self.say(Suspicion(self.epoch, self.rank, message or f"signal {-code}"))
        return "over"

    def wait(self, **values: Any) -> str:
        known = {"batch": 4, "late_seconds": 12.0, "where": TORCH, "in_torch": True, "process_state": "S"}
        self.evidence = NodeEvidence(self.node, (RankEvidence(self.rank, **(known | values)),))  # type: ignore[arg-type]
        self.say(Suspicion(self.epoch, self.rank, "no beat", is_hang=True))
        return "over"

    def die(self) -> str:
        self.writer.transport.abort()
        return "over"


def lose_peer(agent: LightAgent, body: RunRanks) -> str:
    """What healthy nodes see when another one fails."""
    return agent.fail("Connection closed by peer [10.0.0.2]:1234")


class LightCluster:
    """Agents as coroutines of this process."""

    def __init__(self, nodes: Sequence[str], launch: str, restart: int = 0, seconds: float = 0.05):
        self.names, self.launch, self.seconds = list(nodes), launch, seconds
        self.job, self.restart, self.host = "7", restart, "127.0.0.1"
        self.ended: asyncio.Queue[AgentEnded] = asyncio.Queue()
        self.behaviors: dict[str, Behavior] = {}
        self.agents: dict[str, LightAgent] = {}
        self.all_agents: list[LightAgent] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.lost: list[LostNode] = []
        self.back: dict[str, str] = {}
        self.ended_steps, self.abandoned = 0, False
        self.staging: dict[str, str] = {}
        self.requeued: list[list[str]] = []
        self.handed_over: list[list[str]] = []
        self.comments: list[str] = []
        self.answers = True
        self.signal_means: StopReason = "signal"
        self.ends_with_a_node = False
        """Without spares, and with a node that has died: it ends the job by signals, and queues it again."""
        self.successor = False

    def of(self, node: str) -> Behavior:
        return self.behaviors.setdefault(node, Behavior())

    def everywhere(self, fault: Callable[[LightAgent, RunRanks], Any]) -> None:
        for node in self.names:
            self.of(node).fault = fault

    async def nodes(self) -> list[str]:
        return self.names

    async def stage(self) -> dict[str, str]:
        return {node: why for node, why in self.staging.items() if node in self.names}

    @property
    def started_anything(self) -> bool:
        return bool(self.all_agents)

    async def start_agents(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        for node in nodes:
            behavior = self.of(node)
            if behavior.never_starts:
                self.ended.put_nowait(AgentEnded(node, behavior.never_starts))
            elif not behavior.hangs_at_start:
                agent = self.agents[node] = LightAgent(node, env, self.launch, behavior, self.seconds)
                self.all_agents.append(agent)
                self.tasks.append(asyncio.ensure_future(agent.run()))

    async def start_deputy(self, nodes: Sequence[str], address: str) -> None:
        pass

    async def end_agents(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def abandon_steps(self) -> None:
        self.abandoned = True

    async def end_earlier_steps(self) -> None:
        await self.end_agents()
        self.ended_steps += 1

    async def lost_nodes(self, nodes: Sequence[str]) -> list[LostNode]:
        return [item for item in self.lost if item.node in nodes]

    async def restarted_nodes(self, nodes: Sequence[str], since: str) -> dict[str, str]:
        return {node: why for node, why in self.back.items() if node in nodes}

    async def is_answering(self) -> bool:
        return self.answers

    async def ended_for(self, nodes: Sequence[str]) -> list[LostNode]:
        return [item for item in self.lost if item.node in nodes] if self.ends_with_a_node else []

    async def signal_reason(self) -> StopReason:
        return self.signal_means

    async def requeue(self, exclude: Sequence[str]) -> bool:
        self.requeued.append(list(exclude))
        return True

    async def hand_over(self, exclude: Sequence[str]) -> bool:
        self.handed_over += [list(exclude)] if self.successor else []
        return self.successor

    async def comment(self, text: str) -> None:
        self.comments.append(text)
