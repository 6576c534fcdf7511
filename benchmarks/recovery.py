"""Seconds from a failure to the first new step, and steps lost, by kind of failure and by what the run continues from.

    python benchmarks/recovery.py [--repeats 1] [--only NAME ...]

A real Slurm of three nodes on this one machine (tests/launch/cluster.py; needs root and Debian's Slurm packages) runs a
small model, one process on each of two nodes over gloo, a step every 0.2 s or more. Copies in host memory are made
every 10 steps, checkpoints every 40, and the failure comes between steps 71 and 79. Processes and nodes are killed,
processes stopped for real. Time runs from the failure to the end of the next step, with detection, judgment, checks of
the nodes and imports. Budgets of hangs are shorter here than by default; `computed` has the default, and what
1,024 nodes would take, as formulas with their inputs. `before` is the same arithmetic for commit 6a238e8, which this
script cannot run.
The table is also written to benchmarks/results/recovery.json, after each run.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from faults import MODEL, make_data
from launch import Job

from ingot.checkpoint.copy_memory import CopyKeeper, CopyRecord, content_hash
from ingot.data.prepare.prepare import prepare
from ingot.launch.peer_copies.sender import fetch_copies
from ingot.launch.peer_copies.store import PeerStore
from ingot.launch.peer_copies.wire import JobIdentity
from ingot.launch.supervisor.records import Closed, Opened
from ingot.launch.supervisor.state_file import read_state
from ingot.version import __version__

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS / "launch"))
from cluster import Cluster, missing  # type: ignore[import-not-found] # noqa: E402

STEP_SECONDS, SNAPSHOT_EVERY, SAVE_EVERY, STRIKE = 0.2, 10, 40, 71
START = ("checks", "messages", "measure_network", "imports", "devices_and_nccl")
HANG, STARTUP, SAVE = 10.0, 30.0, 15.0  # the budgets of these runs
DEFAULTS = {"hang in a step": (HANG, 120.0), "hang in start-up": (STARTUP, 600.0), "hang in a save": (SAVE, 420.0),
            "hang in an evaluation": (SAVE, 420.0)}  # fmt: skip
SPARE, NO_COPIES = ("--spares", "1"), ("snapshot_interval=0ba",)
PATIENCE = 400.0  # seconds for anything to happen
SETTLE_SECONDS = 1.5  # after step STRIKE, so that the last copy may arrive; the run goes on meanwhile, to 79 at most


def fault(**more: Any) -> dict[str, Any]:
    return {"kind": "stop", "rank": 1, **more}


def kill_rank(job: "Watched") -> None:
    os.kill(job.processes()[1], signal.SIGKILL)


def kill_node(job: "Watched") -> None:
    job.cluster.kill_node("n2")


SCENARIOS: dict[str, tuple[tuple[str, ...], dict[str, Any] | None, Callable[["Watched"], None] | None]] = {
    "process killed": ((), None, kill_rank),
    "process killed, no copies": (NO_COPIES, None, kill_rank),
    "node lost, warm spare": (SPARE, None, kill_node),
    "node lost, warm spare, no copies": ((*SPARE, *NO_COPIES), None, kill_node),
    "node lost, requeue": ((), None, kill_node),
    "hang in a step": ((), fault(batch=STRIKE), None),
    "hang in start-up": ((), fault(batch=1), None),
    "hang in a save": ((), fault(batch=SAVE_EVERY, phase="save"), None),
    "hang in an evaluation": (("eval_interval=30ba", "eval_subset_num_batches=2"), fault(batch=20, phase="evaluation"),
                              None),
}  # fmt: skip


def wait(seen: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := seen()):
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not come within {PATIENCE:g} s")
        time.sleep(0.05)
    return found


class Watched(Job):
    """A run of the cluster, its faults and its records."""

    def __init__(
        self, cluster: Cluster, data: Path, run: Path, options: tuple[str, ...], injected: dict[str, Any] | None
    ):
        self.struck = run.parent / f"{run.name}.struck"
        slow = {"kind": "slow", "rank": 0, "batch": 1, "seconds": STEP_SECONDS, "attempts": "all"}
        faults = [slow, *([injected | {"once": str(self.struck)}] if injected else [])]
        path = os.pathsep.join(filter(None, [str(TESTS / "faults" / "hook"), os.environ.get("PYTHONPATH")]))
        cluster.env |= {"PYTHONPATH": path, "INGOT_TEST_FAULT": json.dumps(faults)}
        evaluation = [] if any("eval_interval" in option for option in options) else ["data.eval=null"]
        self.cluster, self.run, self.began = cluster, run, time.time()
        model = [value for value in MODEL if value != "data.eval=null"]
        values = [value for value in options if not value.startswith("-") and "=" in value]
        self.ingot("launch", "slurm", *model, *evaluation, f"snapshot_interval={SNAPSHOT_EVERY}ba",
                   f"save_interval={SAVE_EVERY}ba", f"hang_timeout={HANG}", f"startup_timeout={STARTUP}",
                   f"save_timeout={SAVE}", *values, f"data={data}", f"save_folder={run}", "max_duration=1000000ba",
                   "-N", "2", "--profile", "cpu", "--time", "30", *(o for o in options if o not in values))  # fmt: skip
        self.id = json.loads((run / "launch" / "jobs.jsonl").read_text().splitlines()[-1])["id"]

    def records(self, kind: type) -> list[Any]:
        path = self.run / "launch" / "state.jsonl"
        return [r for r in read_state(path) if isinstance(r, kind)] if path.exists() else []

    def batches(self) -> list[int]:
        path = self.run / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line)["time/batch"] for line in text.splitlines() if line.endswith("}")]

    def output(self) -> str:
        return "".join(p.read_text() for p in sorted((self.run / "launch").rglob("*.out")))


def measure(cluster: Cluster, data: Path, run: Path, name: str) -> dict[str, Any]:
    """Times of one failure."""
    options, injected, strike = SCENARIOS[name]
    job = Watched(cluster, data, run, options, injected)
    if strike is not None:
        wait(lambda: (job.batches() or [0])[-1] >= STRIKE, "the batch of the failure")
        time.sleep(SETTLE_SECONDS)
        struck = time.time()
        strike(job)
    else:
        wait(job.struck.exists, "the failure")
        struck = job.struck.stat().st_mtime
    closed = wait(lambda: job.records(Closed), "the end of the attempt")[0]
    done = (job.batches() or [0])[-1]
    path = job.run / "metrics.jsonl"
    opened = wait(lambda: job.records(Opened)[1:], "the next attempt")[0]
    began = datetime.fromisoformat(opened.time).timestamp()
    wait(lambda: path.exists() and path.stat().st_mtime > began and (job.batches() or [0])[-1] > 0, "the next step")
    resumed = wait(lambda: first_new(job, done), "the first new step")
    result = {"detected": datetime.fromisoformat(closed.time).timestamp() - struck, "back": resumed[0] - struck,
              "steps_lost": done - resumed[1] + 1, "cause": closed.cause.kind, "node": closed.cause.node,
              "from_host_memory": "resumed from host memory" in job.output()}  # fmt: skip
    with suppress(SystemExit):  # too slow: the cluster is restored anyway
        job.end()
    return result


def first_new(job: Watched, done: int) -> tuple[float, int] | None:
    """When the next attempt finished a step, and which: it says where it resumed from, and rows follow."""
    said = [line for line in job.output().splitlines() if line.startswith("resumed from")]
    start = int(said[-1].rpartition(" at batch ")[2].split()[0]) if said else 0
    after = [number for number in job.batches() if number > start]
    if not said and done >= SAVE_EVERY:
        return None
    return (time.time(), start + 1) if after else None


def transfer(size: int = 1 << 30) -> dict[str, float]:
    """A copy from one agent's memory to another's over the loopback, by an agent that fetches it: no rate limit."""
    job = JobIdentity("/runs/one", "1.0.0", "token", "n1")
    own, other = CopyKeeper(1), CopyKeeper(1)
    with own.memories[0].begin(0)(size) as content, memoryview(content) as view:
        record = CopyRecord(1, "a", "me", size, content_hash(view), [])
    own.memories[0].complete(0, record)
    store = PeerStore(job, own)
    store.own_node_rank = 0
    began, cpu = time.monotonic(), time.process_time()
    fetch_copies(job, other, 0, (1, "a"), f"127.0.0.1:{store.port}")
    found = {"bytes": size, "seconds": round(time.monotonic() - began, 2),
             "cpu_seconds_of_both_sides": round(time.process_time() - cpu, 2)}  # fmt: skip
    store.close()
    own.close()
    other.close()
    return found


def computed(seconds: dict[str, dict[str, float]]) -> dict[str, Any]:
    """What is not measured: formulas, their inputs, and results in seconds."""
    scale = json.loads((Path(__file__).parent / "results" / "scale.json").read_text())["runs"][-1]["phases"]
    inputs = {
        "notice_s": 25, "cred_expire_s": 120, "judge_s": scale["failure to judgment"]["seconds"],
        "checks_s": scale["preflight"]["seconds"], "messages_s": scale["judgment to running"]["seconds"],
        "measure_network_s": 10, "imports_s": 20, "devices_and_nccl_s": 30, "state_bytes_per_node": 8e9,
        "network_bytes_per_s": 1.25e9, "disk_bytes_per_s": 500e9, "nodes": 1024, "copy_every_s": 60,
        "save_every_s": 1800,
    }  # fmt: skip
    i = inputs
    load_disk = i["state_bytes_per_node"] * i["nodes"] / i["disk_bytes_per_s"]
    judge, start = i["judge_s"], sum(i[f"{part}_s"] for part in START)
    fetch = i["state_bytes_per_node"] / i["network_bytes_per_s"]
    half_save, half_copy = i["save_every_s"] / 2, i["copy_every_s"] / 2
    sending = half_copy  # a copy is on its way for half of the time to the next
    after = {  # formula, seconds without training, seconds of training that are repeated
        "process killed": ("judge + start; copy_every/2", judge + start, half_copy),
        "node lost, warm spare": ("notice + judge + start + fetch; copy_every/2 + half of copy_every to send it",
                                  i["notice_s"] + judge + start + fetch, half_copy + sending),
        "node lost, requeue": ("notice + judge + cred_expire + start + load_disk; save_every/2",
                               i["notice_s"] + judge + i["cred_expire_s"] + start + load_disk, half_save),
        "hang in a step": ("120 + judge + start; copy_every/2", 120 + judge + start, half_copy),
        "hang in start-up": ("600 + judge + start + load_disk; nothing", 600 + judge + start + load_disk, 0),
        "hang in a save or an evaluation": ("420 + judge + start; copy_every/2", 420 + judge + start, half_copy),
    }  # fmt: skip
    old = start + 170 + 30 + load_disk
    before = {
        "process killed": ("old; save_every/2", old, half_save),
        "node lost, warm spare": ("72 + old; save_every/2", 72 + old, half_save),
        "node lost, requeue": ("72 + cred_expire + old; save_every/2", 72 + i["cred_expire_s"] + old, half_save),
        "hang in a step": ("120 + old; save_every/2", 120 + old, half_save),
        "hang in start-up": ("3600 + old; nothing", 3600 + old, 0),
        "hang in a save or an evaluation": ("3600 + old; save_every/2", 3600 + old, half_save),
    }
    default = {name: round(seconds[name]["back"] + usual - own, 1) for name, (own, usual) in DEFAULTS.items()
               if name in seconds}  # fmt: skip
    return {
        "terms": {
            "start": " + ".join(START), "fetch": "state_bytes_per_node / network_bytes_per_s",
            "load_disk": "state_bytes_per_node * nodes / disk_bytes_per_s",
            "old": "start + 170 (save plan gathered on rank 0) + 30 (checks by files) + load_disk",
            "72": "srun --wait=60 and 12 to notice; up to SlurmdTimeout (300) where Slurm had to notice",
            "3600": "30 x hang_timeout; 120, 600, 420: hang_timeout, startup_timeout, save_timeout by default",
        },
        "inputs": inputs,
        "sources": {
            "measured": "judge, checks, messages: benchmarks/results/scale.json (1,024 agents as coroutines)",
            "from the code": "notice (TCP keepalive), budgets of hangs, copy_every, 72, 30; 170: the old plan of 1,024 "
                             "ranks, measured and scaled to 8,192",
            "assumed": "imports, devices_and_nccl, measure_network, save_every; cred_expire is that of Slurm; 16 bytes "
                       "for each of 512e9 weights, sharded; 10 Gbit/s for agents; a file system of 500 GB/s",
        },
        "with_default_budgets_on_this_machine": default,
        "at_1024_nodes": {name: row(*values) for name, values in after.items()},
        "at_1024_nodes_before": {name: row(*values) for name, values in before.items()},
    }  # fmt: skip


def row(formula: str, away: float, repeated: float) -> dict[str, Any]:
    return {"formula": formula, "seconds_away": round(away), "seconds_repeated": round(repeated)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recovery.json")
    options = parser.parse_args()
    if why := missing():
        raise SystemExit(why)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = json.loads(options.out.read_text()) if options.out.exists() else {"commands": [], "runs": []}
    commands = [*before["commands"], shlex.join(["python", "benchmarks/recovery.py", *sys.argv[1:]])]
    runs: list[dict[str, Any]] = before["runs"]
    moved = transfer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(folder)
        prepare(folder / "text.txt", folder, split="val", tokenizer=folder / "tokenizer", concat_tokens=512)
        cluster = Cluster(folder / "slurm", 3)
        try:
            cluster.start()
            slurm = cluster.ask("sinfo", "--version").split()[-1]
            for number, what in [(n, what) for n in range(options.repeats) for what in options.only]:
                load = round(os.getloadavg()[0], 1)
                run = folder / f"{what}-{number}".replace(" ", "-").replace(",", "")
                try:
                    runs.append({"failure": what, **measure(cluster, data, run, what), "load": load})
                    print(json.dumps(runs[-1]), flush=True)
                except (SystemExit, AssertionError) as error:  # the others are still of use
                    print(f"{what}: {error}", flush=True)
                result = {"commands": commands, **summary(runs, slurm), "transfer": moved, "runs": runs}
                options.out.write_text(json.dumps(result, indent=1) + "\n")
                cluster.restore()
        finally:
            cluster.stop()


def summary(runs: list[dict[str, Any]], slurm: str) -> dict[str, Any]:
    """Medians of all runs, those of earlier calls of this script with them."""
    measured = {}
    for what in SCENARIOS:
        if own := [run for run in runs if run["failure"] == what]:
            measured[what] = {
                "detected": round(statistics.median(run["detected"] for run in own), 1),
                "back": round(statistics.median(run["back"] for run in own), 1),
                "steps_lost": statistics.median(run["steps_lost"] for run in own), "runs": len(own),
                "cause": own[0]["cause"], "from_host_memory": all(run["from_host_memory"] for run in own),
            }  # fmt: skip
            print(f"{what:34} {measured[what]}", flush=True)
    loads = [run["load"] for run in runs] or [0.0]
    return {
        "versions": {"ingot": __version__, "torch": version("torch"), "python": platform.python_version(),
                     "slurm": slurm},
        "machine": {"cores": os.cpu_count(), "load_1_minute": {"median": statistics.median(loads), "max": max(loads)},
                    "note": "a larger load than cores is other work; steps lost do not depend on it"},
        "settings": {"step_seconds": STEP_SECONDS, "snapshot_interval": SNAPSHOT_EVERY, "save_interval": SAVE_EVERY,
                     "failure_in_batch": STRIKE, "hang_timeout": HANG, "startup_timeout": STARTUP, "save_timeout": SAVE,
                     "slurmd_timeout": 10, "cred_expire": 5},
        "measured": measured,
        "computed": computed(measured),
    }  # fmt: skip


if __name__ == "__main__":
    main()
