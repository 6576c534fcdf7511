"""What a supervisor needs of the cluster that its job runs on. Slurm's is in `slurm/allocation.py`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class LostNode:
    """A node that the cluster does not offer any more."""

    node: str
    reason: str
    is_drained: bool = False
    """An administrator took it out."""


@dataclass(frozen=True)
class AgentEnded:
    """The cluster says that the agent of a node has ended."""

    node: str
    reason: str


class Cluster(Protocol):
    """A job's view of its cluster. Nothing here raises because the cluster does not answer."""

    job: str
    restart: int
    """How often the cluster has started this job again."""
    host: str
    """The node that the supervisor runs on."""
    ended: "asyncio.Queue[AgentEnded]"
    """Agents that have ended, as far as the cluster says."""

    async def nodes(self) -> list[str]:
        """The allocation."""

    async def stage(self) -> dict[str, str]:
        """Copy the image to each node's own disk; returns why not, by node."""

    async def start_agents(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        """Start an agent on each node, which ends with this process."""

    async def start_deputy(self, nodes: Sequence[str], address: str) -> None:
        """Have another node bring the job back if this one dies, where the cluster would not do so."""

    async def end_agents(self) -> None: ...

    async def end_earlier_steps(self) -> None:
        """End what a supervisor that was killed has left in this allocation: agents, their ranks, the deputy."""

    async def lost_nodes(self, nodes: Sequence[str]) -> list[LostNode]:
        """Those that are down or being drained."""

    async def restarted_nodes(self, nodes: Sequence[str], since: str) -> dict[str, str]:
        """Those that have gone and are back: booted, or new to the cluster, since a time; and how that shows."""

    async def is_answering(self) -> bool:
        """Whether the cluster's controller answers."""

    async def requeue(self, exclude: Sequence[str]) -> bool:
        """Queue the job again, on other nodes; returns whether the cluster has agreed."""

    async def hand_over(self, exclude: Sequence[str]) -> bool:
        """Leave the rest to the next job of the launch, on other nodes than these; False if there is no further job."""

    async def comment(self, text: str) -> None:
        """Tell people who ask the cluster about the job: the run folder may be full or gone."""
