"""The pods of a run, as their supervisor in the first pod sees them.

Kubernetes starts all pods by itself, and the pods have no access to its API: an agent cannot be started from here in
another pod, a pod that has gone is known by its agent's silence, and to be queued again means to exit with a code for
which Kubernetes replaces all pods. They may then be on other machines, which the names of machines in the records show.
"""

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ingot.launch.messages import ADDRESS_VARIABLE
from ingot.launch.protocol import CLUSTER_AGENT, RENDEZVOUS_VARIABLES, LaunchFolder
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.cluster import AgentEnded, LostNode

RESTART_VARIABLE = "INGOT_RESTART"
"""How often Kubernetes has replaced the pods; a PyTorchJob does not say."""
PODS = "pods"
TERMINATION_LOG = Path("/dev/termination-log")  # what `kubectl describe pod` shows of a container that has ended
POLL_SECONDS, REMINDER_SECONDS = 1.0, 60.0
END_SECONDS = 10.0


class PodCluster:
    """One start of all pods."""

    def __init__(self, spec: LaunchSpec, spec_file: Path, job: str, restart: int, port: int, host: str):
        self.spec, self.spec_file, self.port = spec, spec_file, port
        self.job, self.restart, self.host = job, restart, host
        self.ended: asyncio.Queue[AgentEnded] = asyncio.Queue()
        self._agent: asyncio.subprocess.Process | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def nodes(self) -> list[str]:
        """The machines of the pods, by the number of the pod, once all pods have started."""
        folder = machines_folder(self.spec, self.job, self.restart)
        reminder = time.monotonic() + REMINDER_SECONDS
        while True:
            found = [_read(folder / str(index)) for index in range(self.spec.nodes)]
            if all(found):
                return found
            if time.monotonic() >= reminder:
                print(f"{sum(map(bool, found))} of {self.spec.nodes} pods have started", flush=True)
                reminder = time.monotonic() + REMINDER_SECONDS
            await asyncio.sleep(POLL_SECONDS)

    async def stage(self) -> dict[str, str]:
        return {}  # Kubernetes fetches images

    async def start_agents(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        """This pod's; those of the other pods connect by themselves."""
        if self.host not in nodes or (self._agent is not None and self._agent.returncode is None):
            return
        self._agent = await asyncio.create_subprocess_exec(
            sys.executable, "-m", CLUSTER_AGENT, "--spec", str(self.spec_file),
            env={**agent_environment(os.environ), **env, ADDRESS_VARIABLE: f"127.0.0.1:{self.port}"},
        )  # fmt: skip
        task = asyncio.ensure_future(self._wait(self._agent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait(self, agent: asyncio.subprocess.Process) -> None:
        code = await agent.wait()
        self.ended.put_nowait(AgentEnded(self.host, f"its agent ended with exit code {code}"))

    async def start_deputy(self, nodes: Sequence[str], address: str) -> None:
        """The pods' own controller brings all pods back."""

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

    async def end_earlier_steps(self) -> None:
        """They have ended with their pods."""

    async def lost_nodes(self, nodes: Sequence[str]) -> list[LostNode]:
        return []

    async def restarted_nodes(self, nodes: Sequence[str], since: str) -> dict[str, str]:
        return {}

    async def is_answering(self) -> bool:
        return True

    async def requeue(self, exclude: Sequence[str]) -> bool:
        return True  # by the exit code

    async def hand_over(self, exclude: Sequence[str]) -> bool:
        return False

    async def comment(self, text: str) -> None:
        with suppress(OSError):  # not in a pod
            TERMINATION_LOG.write_text(f"{text}\n", encoding="utf-8")


def agent_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Without the address that Kubernetes was told to give to ranks: a PyTorchJob calls the first pod localhost in that
    pod. Here it is the supervisor's, and the supervisor tells the ranks where to meet."""
    return {name: value for name, value in env.items() if name not in RENDEZVOUS_VARIABLES}


def machines_folder(spec: LaunchSpec, job: str, restart: int) -> Path:
    """Where each pod of a start writes the name of its machine."""
    return LaunchFolder(Path(spec.run_folder)).path / PODS / f"{job}.{restart}"


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""
