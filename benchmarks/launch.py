"""How long a cluster job takes to its first step, and from a fault to the next step on each rung of the ladder.

    python benchmarks/launch.py [--repeats 1] [--nodes 2]

A real Slurm of three nodes on this one machine (tests/launch/cluster.py; needs root and Debian's Slurm packages) runs a
small model, one process per node over gloo, through `ingot launch slurm`, with its checks of the nodes. Timed:
submit to first step, from the start of the command; then a rank is killed, and comes back inside the allocation; then
every process of the job is killed, and the next job of the chain goes on; then a job without a chain is requeued. The
last waits for the cluster's credentials to expire, 5 s here and 120 s by Slurm's default, which is added to it there.
The table is also written to benchmarks/results/launch.json.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from faults import MODEL, SAVE_SECONDS, make_data

from ingot.launch.supervisor.failure_log import read_failures
from ingot.version import __version__

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "launch"))
from cluster import Cluster, missing  # type: ignore[import-not-found]

PATIENCE = 120.0  # seconds for anything to happen


def wait(seen: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := seen()):
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not come within {PATIENCE:g} s")
        time.sleep(0.01)
    return found


class Job:
    """A run on the cluster."""

    def __init__(self, cluster: Cluster, data: Path, run: Path, nodes: int, *options: str):
        self.cluster, self.run = cluster, run
        self.began = time.time()
        command = ["launch", "slurm", *MODEL, f"data={data}", f"save_folder={run}", "max_duration=1000000ba"]
        command += [f"save_interval={SAVE_SECONDS}sec", "-N", str(nodes), "--profile", "cpu", "--time", "30"]
        self.ingot(*command, *options)
        self.submitted = time.time()
        self.id = json.loads((run / "launch" / "jobs.jsonl").read_text().splitlines()[-1])["id"]
        self.first_step = self.next_step()

    def ingot(self, *arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "ingot.cli.main", *arguments], env=self.cluster.env, check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip

    def next_step(self) -> float:
        """The time of the next finished step."""
        path = self.run / "metrics.jsonl"
        before = path.stat().st_size if path.exists() else 0

        def grown() -> bool:
            nonlocal before
            now = path.stat().st_size if path.exists() else 0
            longer, before = now > before, now  # what was written after the last checkpoint is cut off first
            return longer

        wait(grown, "the next step")
        return time.time()

    def wait_for_checkpoint(self) -> None:
        """A new one, so that the fault finds the run in its stride."""
        found = set((self.run / "checkpoints").glob("*/manifest.json"))
        wait(lambda: set((self.run / "checkpoints").glob("*/manifest.json")) - found, "a checkpoint")

    def processes(self) -> dict[int, int]:
        """Ranks and their processes."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                env = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if f"save_folder={self.run}" in words and "train" in words:
                found |= {int(value[5:]): int(path.name) for value in env if value.startswith("RANK=")}
        return found

    def end(self) -> None:
        self.ingot("stop", "--now", str(self.run))
        states = ["squeue", "-h", "-j", self.id, "-o", "%T"]
        wait(lambda: not self.cluster.ask(*states).split(), "the end of the job")


def measure(cluster: Cluster, data: Path, folder: Path, nodes: int) -> dict[str, float]:
    """Seconds, of one run with a chain and one without."""
    found: dict[str, float] = {}
    job = Job(cluster, data, folder / "chain", nodes, "--chain", "2")
    found["command"] = job.submitted - job.began
    found["submit_to_first_step"] = job.first_step - job.began
    logs = "".join(path.read_text() for path in (job.run / "launch" / "output").iterdir())
    found["of_which_preflight"] = float(re.findall(r"passed the checks in ([0-9.]+) s", logs)[0])
    job.wait_for_checkpoint()

    os.kill(job.processes()[1], signal.SIGKILL)
    killed = time.time()
    failure = wait(lambda: read_failures(job.run), "the record of the failure")[0]
    found["rank_death_to_detected"] = datetime.fromisoformat(failure["time"]).timestamp() - killed
    found["rank_death_to_stepping_inside_the_allocation"] = job.next_step() - killed
    job.wait_for_checkpoint()

    old, killed = set(job.processes().values()), time.time()
    cluster.ask("scancel", "--signal=KILL", "--full", f"{job.id}_1")
    wait(lambda: not old & set(job.processes().values()), "the end of all processes")
    found["job_death_to_stepping_in_the_next_of_the_chain"] = job.next_step() - killed
    job.end()

    job = Job(cluster, data, folder / "single", nodes)
    job.wait_for_checkpoint()
    old, killed = set(job.processes().values()), time.time()
    cluster.ask("scontrol", "requeue", job.id)
    wait(lambda: not old & set(job.processes().values()), "the end of all processes")
    found["requeue_to_stepping"] = job.next_step() - killed
    job.end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "launch.json")
    options = parser.parse_args()
    if why := missing():
        raise SystemExit(why)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(folder)
        cluster = Cluster(folder / "slurm", 3)
        try:
            cluster.start()
            slurm = cluster.ask("sinfo", "--version").split()[-1]
            runs = [measure(cluster, data, folder / str(number), options.nodes) for number in range(options.repeats)]
        finally:
            cluster.stop()
    result = {
        "command": " ".join(["python", "benchmarks/launch.py", *sys.argv[1:]]),
        "versions": {
            "ingot": __version__,
            "torch": version("torch"),
            "python": platform.python_version(),
            "slurm": slurm,
        },
        "cores": os.cpu_count(),
        "repeats": options.repeats,
        "cred_expire_seconds": 5,
        "seconds": {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]},
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result["seconds"].items():  # type: ignore[attr-defined]
        print(f"{key:50} {value:7.2f} s")


if __name__ == "__main__":
    main()
