"""What a supervisor needs of the cluster that its job runs on, and how long it waits for it. Slurm's is in
`slurm/allocation.py`."""

import asyncio
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ingot.launch.messages import ADDRESS_VARIABLE
from ingot.launch.protocol import CLUSTER_AGENT, RENDEZVOUS_VARIABLES
from ingot.launch.supervisor.records import Cause, Started, StopReason

END_SECONDS = 10.0  # for an agent that was told to leave


@dataclass(frozen=True)
class Times:
    """How long a phase may take, in seconds."""

    hello: float = 60.0
    """For an agent to start: Python, on a slow disk."""
    hello_image: float = 300.0
    """The same where each node unpacks an image first."""
    hello_grace: float = 2.0
    """For spares, once all that are needed have reported."""
    reserve: float = 10.0
    start: float = 60.0
    """For an agent to start its ranks' processes."""
    settle: float = 1.0
    """After the first sign of a failure: others may fail by themselves at this moment."""
    collect: float = 5.0
    teardown: float = 10.0
    apart: float = 1.0
    """Between the end of an agent and that of others which is its consequence."""
    reconnect: float = 5.0
    """For an agent whose connection broke to come back."""
    stop: float = 600.0
    """To save and stop, where no time limit comes first."""
    poll: float = 3.0
    """Between looks at the file STOP: with the owner's file, 0.83 operations per second on the shared disk."""
    leave: float = 5.0
    """For agents to end."""
    disk: float = 30.0
    """For the shared file system to answer."""
    recheck: float = 600.0
    """Between two tests of the spares while the others train."""


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
    ended_for: str = ""
    """The node, if only one is known, whose loss has made the cluster end the agent, and those of other nodes."""


@dataclass(frozen=True)
class Share:
    """Which part of a preparation this job does: `number` of `count`; the last one, with `count`, combines them."""

    number: int
    count: int

    @property
    def name(self) -> str:
        return str(self.number) if self.number < self.count else "last"


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

    async def abandon_steps(self) -> None:
        """Leave what was started to the cluster: the job has another supervisor, and ending it might end that one's."""

    async def end_earlier_steps(self) -> None:
        """End what a supervisor that was killed has left in this allocation: agents, their ranks, the deputy."""

    async def lost_nodes(self, nodes: Sequence[str]) -> list[LostNode]:
        """Those that are down or being drained."""

    async def restarted_nodes(self, nodes: Sequence[str], since: str) -> dict[str, str]:
        """Those that have gone and are back: booted, or new to the cluster, since a time; and how that shows."""

    async def is_answering(self) -> bool:
        """Whether the cluster's controller answers."""

    async def ended_for(self, nodes: Sequence[str]) -> list[LostNode]:
        """Of these nodes of the job, those that the cluster has lost and for which it ends the job, with signals, and
        queues it again; none if somebody has asked for the signals."""

    async def signal_reason(self) -> StopReason:
        """What a signal to stop means: the cluster takes the nodes away for another job (preempt), the time is over, or
        somebody wants the job to end (signal)."""

    async def requeue(self, exclude: Sequence[str]) -> bool:
        """Queue the job again, on other nodes; returns whether the cluster has agreed."""

    async def hand_over(self, exclude: Sequence[str]) -> bool:
        """Leave the rest to the next job of the launch, on other nodes than these; False if there is no further job."""

    async def comment(self, text: str) -> None:
        """Tell people who ask the cluster about the job: the run folder may be full or gone."""


async def gone_nodes(
    cluster: Cluster, last: Started | None, nodes: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Of the nodes of an attempt and of the start it belongs to, if that is an earlier one: those that the cluster has
    lost, and those that were lost and are back, with reasons."""
    known = dict.fromkeys((*((last.host, *last.nodes) if last is not None else ()), *nodes))
    down = {item.node: item.reason for item in await cluster.lost_nodes(list(known)) if not item.is_drained}
    if last is None or (last.job, last.restart) == (cluster.job, cluster.restart):
        return down, {}
    return down, await cluster.restarted_nodes(last.nodes, last.time)


async def own_network(cluster: Cluster, heard: Collection[str], lost: Collection[str]) -> Cause | None:
    """The cause, if the supervisor's node is more likely cut off than those that it has lost: it hears of no other
    node, and the cluster's controller does not answer either."""
    if not set(heard) <= {cluster.host} or await cluster.is_answering():
        return None
    reach = f"{cluster.host} reaches neither {', '.join(lost)} nor the cluster's controller"
    return Cause("site", f"{reach}: its own network, perhaps")


def say(text: str) -> None:
    """Tell people who read the log of the job."""
    with suppress(OSError):  # a full disk, too
        os.write(1, f"{text}\n".encode())


class ThisMachine:
    """The agent of the machine that the supervisor runs on: a child of this process."""

    def __init__(self, spec_file: Path, job: str, restart: int, host: str):
        self.spec_file, self.job, self.restart, self.host = spec_file, job, restart, host
        self.ended: asyncio.Queue[AgentEnded] = asyncio.Queue()
        self._agent: asyncio.subprocess.Process | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def nodes(self) -> list[str]:
        return [self.host]

    async def stage(self) -> dict[str, str]:
        return {}

    async def start_agents(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        if self.host not in nodes or (self._agent is not None and self._agent.returncode is None):
            return
        port = env[ADDRESS_VARIABLE].rpartition(":")[2]
        self._agent = await asyncio.create_subprocess_exec(
            sys.executable, "-m", CLUSTER_AGENT, "--spec", str(self.spec_file),
            env={**agent_environment(os.environ), **env, ADDRESS_VARIABLE: f"127.0.0.1:{port}"},
        )  # fmt: skip
        task = asyncio.ensure_future(self._wait(self._agent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait(self, agent: asyncio.subprocess.Process) -> None:
        code = await agent.wait()
        self.ended.put_nowait(AgentEnded(self.host, f"its agent ended with exit code {code}"))

    async def start_deputy(self, nodes: Sequence[str], address: str) -> None:
        pass

    async def end_agents(self) -> None:
        agent = self._agent
        if agent is None or agent.returncode is not None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await agent.wait()
                return
        with suppress(ProcessLookupError):
            agent.kill()
        await agent.wait()

    async def abandon_steps(self) -> None:
        pass

    async def end_earlier_steps(self) -> None:
        pass

    async def lost_nodes(self, nodes: Sequence[str]) -> list[LostNode]:
        return []

    async def restarted_nodes(self, nodes: Sequence[str], since: str) -> dict[str, str]:
        return {}

    async def is_answering(self) -> bool:
        return True

    async def ended_for(self, nodes: Sequence[str]) -> list[LostNode]:
        return []

    async def signal_reason(self) -> StopReason:
        return "signal"

    async def requeue(self, exclude: Sequence[str]) -> bool:
        return False

    async def hand_over(self, exclude: Sequence[str]) -> bool:
        return False

    async def comment(self, text: str) -> None:
        pass


def agent_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Without an address where ranks would meet, as a pod has one: a PyTorchJob calls the first pod localhost in that
    pod. There it is the supervisor's, and the supervisor tells the ranks where to meet."""
    return {name: value for name, value in env.items() if name not in RENDEZVOUS_VARIABLES}
