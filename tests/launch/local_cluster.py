"""A cluster whose nodes are agents on this machine: the real supervisor, real agents, real ranks; only what Slurm says
is made up."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runs import ARGUMENTS
from specs import spec
from state_records import StateRecords

from ingot.launch.protocol import CLUSTER_AGENT, LaunchFolder
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.cluster import AgentEnded, LostNode, ThisMachine
from ingot.launch.supervisor.supervise import Supervisor

HOOK = str(Path(__file__).parent / "node_hook")


class LocalCluster(ThisMachine):
    """What the supervisor asks of a cluster. Nodes in `down` have died, those in `absent` never start an agent."""

    def __init__(self, launch: LaunchSpec, names: Sequence[str], fault: Mapping[str, Any] | None, restart: int = 0):
        super().__init__(LaunchFolder(Path(launch.run_folder)).spec_file, "7", restart, "127.0.0.1")
        self.spec, self.names, self.fault = launch, list(names), dict(fault) if fault else None
        self.down: set[str] = set()
        self.absent: set[str] = set()
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.started: list[str] = []
        self.requeued: list[list[str]] = []
        self.comments: list[str] = []

    async def nodes(self) -> list[str]:
        return self.names

    async def start_agents(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        for node in nodes:
            self.started.append(node)
            if node in self.absent:
                self.ended.put_nowait(AgentEnded(node, "task 1: exit code 2"))
                continue
            own = {"SLURMD_NODENAME": node, "INGOT_TEST_FAULT": json.dumps(self.fault),
                   "PYTHONPATH": os.pathsep.join(filter(None, [HOOK, os.environ.get("PYTHONPATH")]))}  # fmt: skip
            log = Path(self.spec.run_folder).parent / f"{node}.log"
            with log.open("ab") as output:
                self.agents[node] = subprocess.Popen(
                    [sys.executable, "-m", CLUSTER_AGENT, "--spec", str(self.spec_file)],
                    env={**os.environ, **env, **own}, stdout=output, stderr=output,
                )  # fmt: skip

    async def end_agents(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()

    async def end_earlier_steps(self) -> None:
        await self.end_agents()

    async def lost_nodes(self, nodes: Sequence[str]) -> list[LostNode]:
        return [LostNode(node, "DOWN") for node in nodes if node in self.down]

    async def requeue(self, exclude: Sequence[str]) -> bool:
        self.requeued.append(list(exclude))
        return True

    async def comment(self, text: str) -> None:
        self.comments.append(text)


class SupervisedRun(StateRecords):
    """A training run on such a cluster: two nodes of one rank each, and spares."""

    def __init__(self, data: Path, folder: Path, *more: str, spares: int = 0, **fault: Any):
        self.folder, nodes = folder / "run", 2
        self.spec = spec(
            run_folder=str(self.folder), workdir=str(folder), image=None, nodes=nodes, spares=spares,
            arguments=["--", *ARGUMENTS, f"data={data}", f"save_folder={self.folder}", *more],
        )  # fmt: skip
        self.spec.write()
        self.names = [f"n{number + 1}" for number in range(nodes + spares)]
        self.cluster = LocalCluster(self.spec, self.names, fault or None)
        self.supervisor = Supervisor(self.spec, self.cluster)

    async def run(self, seconds: float = 240) -> int:
        try:
            return await asyncio.wait_for(self.supervisor.run(), seconds)
        finally:
            await self.cluster.end_agents()

    def to_the_end(self) -> int:
        return asyncio.run(self.run())

    def batches(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.parent.glob("n*.log")))
