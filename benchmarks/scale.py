"""What coordinating a job costs at 1,024 nodes x 8: the real supervisor, server, records and diagnosis, with agents as
coroutines of one process that speak the real messages over real sockets and run no ranks.

    python benchmarks/scale.py [--nodes 1024] [--seconds 30]

Prints and writes benchmarks/results/scale.json: messages and seconds per phase, memory, operations on the run folder
per second while ranks run (the supervisor's looks for STOP, its records, the owner's file of rank 0; rows, samples and
checkpoints come on top of it). Counts do not depend on the machine; seconds are of one core that plays all 1,024 nodes
as well (divide by two or more for the supervisor's own part).
"""

import argparse
import asyncio
import io
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "launch"), str(ROOT / "src")]

from light_agents import LightAgent, LightCluster, lose_peer  # noqa: E402
from specs import spec  # noqa: E402

from ingot.launch.messages import RankProgress, RunRanks  # noqa: E402
from ingot.launch.supervisor.records import Closed, Judged, Launched, PhaseBegan  # noqa: E402
from ingot.launch.supervisor.state_file import StateFile, now, read_state  # noqa: E402
from ingot.launch.supervisor.supervise import Supervisor  # noqa: E402
from ingot.parallel.rank_env import EPOCH  # noqa: E402
from ingot.training.runtime.lease import Lease  # noqa: E402

CALLS = (
    "stat",
    "lstat",
    "open",
    "fstat",
    "pwrite",
    "fsync",
    "ftruncate",
    "unlink",
    "mkdir",
    "scandir",
    "rename",
    "replace",
    "link",
    "utime",
    "close",
)
PLAIN_OPEN = 3  # a file that is read or written with `open`: opened, read or written, closed
BEAT_SECONDS = 10.0
BEFORE = {
    "source": "arithmetic from the code that this replaced, for 1,024 nodes x 8",
    "preflight_metadata_operations_per_second": 40960,
    "preflight_readdir_per_second": 20480,
    "preflight_bytes_read": 50_500_000_000,
    "steady_lookups_per_second": 12288,
}


class FileOperations:
    """Calls on files of one folder, counted by wrapping what Python's own file functions use."""

    def __init__(self, folder: Path):
        self.folder, self.counts, self.ours = str(folder), Counter[str](), set[int]()

    @contextmanager
    def counted(self) -> Iterator[None]:
        plain = {name: getattr(os, name) for name in CALLS}
        plain_open = io.open
        for name in CALLS:
            setattr(os, name, self._wrap(name, plain[name]))
        io.open = self._wrap("open", plain_open, PLAIN_OPEN)  # type: ignore[assignment]
        try:
            yield
        finally:
            for name in CALLS:
                setattr(os, name, plain[name])
            io.open = plain_open  # type: ignore[assignment]

    def _wrap(self, name: str, call: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            target = arguments[0] if arguments else ""
            own = target in self.ours if isinstance(target, int) else str(target).startswith(self.folder)
            self.counts[name] += own * count  # before the call: a file that is not there was looked for, too
            result = call(*arguments, **options)
            if own:
                if name == "open" and isinstance(result, int):
                    self.ours.add(result)
                elif name == "close":
                    self.ours.discard(target)
            return result

        return wrapped

    def total(self) -> int:
        return self.counts.total()


class BeatingAgent(LightAgent):
    """Reports every ten seconds while its ranks run, as agents do. The first node keeps the owner's file."""

    async def ranks(self, body: RunRanks) -> None:
        beats = asyncio.ensure_future(self._beat(body.epoch))
        lease = None
        if body.node_rank == 0:
            os.environ[EPOCH] = str(body.epoch)
            lease = Lease(Path(self.launch))
        try:
            await super().ranks(body)
        finally:
            beats.cancel()
            if lease is not None:
                lease.release()

    async def _beat(self, epoch: int) -> None:
        batch = 1
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            batch += 1
            self.say(RankProgress(epoch, "running", batch))


class Simulation:
    """One run: hello, preflight, steps, a failure on one node, a restart, steps, the end."""

    def __init__(self, folder: Path, nodes: int, spares: int, seconds: float):
        self.folder, self.seconds = folder, seconds
        names = [f"n{i:04}" for i in range(nodes + spares)]
        self.spec = spec(run_folder=str(folder), workdir=str(folder), nodes=nodes, spares=spares, image=None,
                         processes_per_node=8)  # fmt: skip
        self.cluster = LightCluster(names, str(folder), seconds=seconds)
        bad = names[nodes // 3]
        for name in names[:nodes]:
            self.cluster.of(name).fault = self._fail if name == bad else self._wait_for_failure
        self.files = FileOperations(folder)
        self.samples: list[tuple[float, int, int]] = []

    async def _fail(self, agent: LightAgent, body: RunRanks) -> Any:
        if body.epoch > 1:
            return None
        await asyncio.sleep(self.seconds)
        return agent.fail("CUDA error: uncorrectable ECC error encountered", "device")

    async def _wait_for_failure(self, agent: LightAgent, body: RunRanks) -> Any:
        if body.epoch > 1:
            return None
        agent.say(RankProgress(body.epoch, "running", 1))
        await asyncio.sleep(self.seconds + 0.05)
        return lose_peer(agent, body)

    def messages(self) -> int:
        return sum(agent.messages for agent in self.cluster.all_agents)

    async def _sample(self) -> None:
        while True:
            self.samples.append((time.time(), self.messages(), self.files.total()))
            await asyncio.sleep(0.05)

    def run(self) -> dict[str, Any]:
        state = StateFile(self.folder / "launch")
        state.append(Launched(time=now(), launch="S", back_end="slurm", nodes=self.spec.nodes, spares=self.spec.spares))
        begin, cpu = time.time(), time.process_time()

        async def lead() -> int:
            sampling = asyncio.ensure_future(self._sample())
            code = await Supervisor(self.spec, self.cluster).run()
            sampling.cancel()
            return code

        with self.files.counted():
            code = asyncio.run(lead())
        assert code == 0, code
        return self._figures(begin, time.process_time() - cpu)

    def _figures(self, begin: float, cpu: float) -> dict[str, Any]:
        from datetime import datetime

        records = read_state(self.folder / "launch" / "state.jsonl")
        at = [(r, datetime.fromisoformat(r.time).timestamp()) for r in records]
        phases = [(r.phase, r.epoch, t) for r, t in at if isinstance(r, PhaseBegan)]
        first = {(phase, epoch): t for phase, epoch, t in reversed(phases)}
        closed = [(r, t) for r, t in at if isinstance(r, Closed)]
        assert closed[0][0].cause.kind == "device" and closed[0][0].cause.node, closed[0][0].cause
        running, collecting = first["running", 1], first["collecting", 1]
        span = {
            "hello": (first["hello", 1], first["preflight", 1]),
            "preflight": (first["preflight", 1], first["starting", 1]),
            "start of the ranks": (first["starting", 1], running),
            "running": (running + 2, collecting - 0.5),
            "failure to judgment": (collecting, closed[0][1]),
            "judgment to running": (closed[0][1], first["running", 2]),
        }
        nodes = self.spec.nodes
        out: dict[str, Any] = {"nodes": nodes, "spares": self.spec.spares, "ranks": nodes * 8, "phases": {}}
        for name, (start, end) in span.items():
            messages, operations = self._between(start, end)
            per_second = operations / max(end - start, 1e-9)
            out["phases"][name] = {
                "seconds": round(end - start, 2),
                "messages": messages,
                "messages_per_node": round(messages / nodes, 2),
                "file_operations": operations,
                "file_operations_per_second": round(per_second, 2),
            }
        out["blamed"] = closed[0][0].cause.node
        out["actions"] = [r.action for r in records if isinstance(r, Judged)]
        out["state_file_bytes"] = (self.folder / "launch" / "state.jsonl").stat().st_size
        out["file_operations_of_the_whole_run"] = dict(self.files.counts)
        out["seconds"], out["cpu_seconds"] = round(time.time() - begin, 1), round(cpu, 1)
        out["peak_memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return out

    def _between(self, start: float, end: float) -> tuple[int, int]:
        def sample(at: float) -> tuple[int, int]:
            late = [s for s in self.samples if s[0] >= at] or self.samples[-1:]
            return late[0][1], late[0][2]

        (a, b), (c, d) = sample(start), sample(end)
        return c - a, d - b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training before the fault")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "scale.json")
    options = parser.parse_args()
    import light_agents

    light_agents.LightAgent = BeatingAgent  # type: ignore[misc]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results = []
    for nodes in sorted({128, options.nodes}):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            run.mkdir()
            results.append(Simulation(run, nodes, max(2, nodes // 128), options.seconds).run())
        print(json.dumps(results[-1], indent=1), flush=True)
    figures = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "before": BEFORE, "runs": results}
    options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
