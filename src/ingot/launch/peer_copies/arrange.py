"""The supervisor's part: which node keeps whose copies, and who fetches what before the ranks start.

Node i's copies are also on node (i + N/2) mod N, so that a rack or a switch rarely takes both; those of a node alone
are on the spare that would take its place. An agent that is new to its place, since its node is a spare or was
restarted, fetches the copies of its ranks. An agent that has run these ranks before decides by itself: what it no
longer has, its ranks have used or discarded, and nobody brings it back.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.launch.messages import CopiesHeld, Done, Failed, FetchCopies, KeepCopies, ReportCopies
from ingot.launch.supervisor.cluster import say
from ingot.launch.supervisor.server import AgentServer
from ingot.plurals import count_of

REPORT_SECONDS = 5.0
OTHERS_SECONDS = 1.0  # for agents that take no part any more, and may hang
FETCH_SECONDS = 180.0  # 45 GB of a node in a minute and a half over 10 Gbit/s Ethernet, with the hash
Copy = tuple[int, str]
"""Step, and the life of the ranks that wrote it."""


@dataclass(frozen=True)
class Fetch:
    """A node of a rank that has no copies of its ranks, and the nodes that have them, best first."""

    node: str
    node_rank: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Restore:
    """What must be fetched so that all ranks have one copy."""

    copy: Copy
    fetches: tuple[Fetch, ...]


def keeper_of(node_rank: int, nodes: int) -> int:
    """The rank of the node that also keeps a node's copies; its own if there is no other."""
    return (node_rank + max(1, nodes // 2)) % nodes


def plan_restores(nodes: Sequence[str], held: Mapping[str, CopiesHeld], newest_on_disk: int) -> list[Restore]:
    """The copies that all ranks can have, newest first. Empty if nobody needs any or some ranks' copies are lost.

    held: also of nodes that take no part any more but whose agent still answers
    """
    stayed = {rank: held[node] for rank, node in enumerate(nodes) if node in held and held[node].node_rank == rank}
    new = [rank for rank in range(len(nodes)) if rank not in stayed]
    if not new or not (stayed or len(nodes) == 1) or any(nodes[rank] not in held for rank in new):
        return []
    kept = {copy for found in held.values() for copy in (*found.own, *found.guests)}
    common = set.intersection(kept, *(set(found.own) for found in stayed.values()))
    plans = []
    for copy in sorted((copy for copy in common if copy[0] > newest_on_disk), reverse=True):
        fetches = [Fetch(nodes[rank], rank, _sources(rank, copy, nodes[rank], held)) for rank in new]
        if all(fetch.sources for fetch in fetches):
            plans.append(Restore(copy, tuple(fetches)))
    return plans


def newest_common(nodes: Sequence[str], held: Mapping[str, CopiesHeld], newest_on_disk: int) -> int:
    """The step of the newest copies that the agents of all nodes hold of the ranks that they ran before; 0 if none."""
    if any(node not in held or held[node].node_rank != rank for rank, node in enumerate(nodes)):
        return 0
    common = set.intersection(*(set(held[node].own) for node in nodes))
    return max((step for step, _ in common if step > newest_on_disk), default=0)


def _sources(rank: int, copy: Copy, node: str, held: Mapping[str, CopiesHeld]) -> tuple[str, ...]:
    guests = [name for name, found in held.items() if found.guest == rank and copy in found.guests]
    own = [name for name, found in held.items() if found.node_rank == rank and copy in found.own and name != node]
    return (*guests, *own)


class CopyArrangement:
    """For one attempt. spares: in the order in which they would take the place of a node"""

    def __init__(self, server: AgentServer, nodes: Sequence[str], newest_on_disk: int, spares: Sequence[str] = ()):
        self.server, self.nodes, self.newest_on_disk = server, list(nodes), newest_on_disk
        self.spares = [] if len(self.nodes) > 1 else [node for node in spares if node in server.links]
        self.newest = 0
        """The step of the newest copies that all ranks have; 0 if there are none newer than the checkpoint."""
        self._held: dict[str, CopiesHeld] = {}

    async def make(self) -> None:
        """Before the ranks start: ask all agents for what they hold, have it fetched where it is missing, and have a
        spare keep what no other node can."""
        await self._restore()
        while self.spares and self.spares[0] not in self._held:
            del self.spares[0]
        if self.spares:
            answer = await self.server.request(self.spares[0], KeepCopies(0), REPORT_SECONDS)
            self.spares = self.spares[:1] if isinstance(answer, Done) else []

    async def _restore(self) -> None:
        others = [node for node in self.server.links if node not in self.nodes]
        answers = await asyncio.gather(
            self.server.request_all(dict.fromkeys(self.nodes, ReportCopies()), REPORT_SECONDS),
            self.server.request_all(dict.fromkeys(others, ReportCopies()), OTHERS_SECONDS),
        )
        self._held = {node: found for part in answers for node, found in part.items() if isinstance(found, CopiesHeld)}
        plans = plan_restores(self.nodes, self._held, self.newest_on_disk)
        for plan in plans:
            if await self._carry_out(plan):
                self.newest = plan.copy[0]
                return
        self.newest = newest_common(self.nodes, self._held, self.newest_on_disk)
        lost = {step for held in self._held.values() for step, _ in (*held.own, *held.guests)}
        is_new = [node for rank, node in enumerate(self.nodes) if self._node_rank(node) != rank]
        if is_new and max(lost, default=0) > self.newest_on_disk:
            why = "" if plans else f": nobody has a common copy for {', '.join(is_new)}"
            say(f"copies in host memory are not used{why}; continuing from the last checkpoint")

    def of(self, node_rank: int) -> tuple[str, int]:
        """Address of the agent that keeps this node's copies, and the rank of the node whose copies this one keeps."""
        count = len(self.nodes)
        if count == 1:
            return self._address(self.spares[0]) if self.spares else "", -1
        peer = self.nodes[keeper_of(node_rank, count)]
        guest = next(rank for rank in range(count) if keeper_of(rank, count) == node_rank)
        if any(node not in self._held for node in (peer, self.nodes[guest], self.nodes[node_rank])):
            return "", -1
        return self._address(peer), guest

    def _node_rank(self, node: str) -> int:
        return self._held[node].node_rank if node in self._held else -1

    def _address(self, node: str) -> str:
        link = self.server.link(node)
        return f"{link.address}:{self._held[node].port}" if link is not None else ""

    async def _carry_out(self, plan: Restore) -> bool:
        step, life = plan.copy
        waiting = {fetch.node: fetch for fetch in plan.fetches}
        for attempt in range(max(len(fetch.sources) for fetch in plan.fetches)):
            orders = {}
            for node, fetch in waiting.items():
                if attempt >= len(fetch.sources):
                    return False
                source = fetch.sources[attempt]
                say(f"{node} fetches the copy of batch {step} of node {fetch.node_rank}'s ranks from {source}")
                orders[node] = FetchCopies(fetch.node_rank, step, life, self._address(source))
            for node, answer in (await self.server.request_all(orders, FETCH_SECONDS)).items():
                if isinstance(answer, Done):
                    del waiting[node]
                else:
                    say(
                        f"{node}: {answer.reason if isinstance(answer, Failed) else 'its agent answers something else'}"
                    )
            if not waiting:
                nodes = count_of(len(plan.fetches), "node")
                say(f"{nodes} fetched copies: all ranks have one of batch {step} in host memory")
                return True
        return False
