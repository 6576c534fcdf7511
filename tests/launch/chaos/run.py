"""A run on the local Slurm, with the faults of a schedule, watched to its end."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import Cluster
from conftest import TINY
from runs import HOOK

from chaos.inject import inject, processes_of
from chaos.schedule import BATCHES, EVAL_EVERY, EVERY, INSIDE, PHASES, Fault, Schedule
from ingot.launch.supervisor.history import read_history
from ingot.launch.supervisor.records import Closed, Judged, Opened, PhaseBegan, Started
from ingot.launch.supervisor.state_file import StateError, now, read_state

ARGUMENTS = [*TINY, f"max_duration={BATCHES}ba", f"save_interval={EVERY}ba", f"eval_interval={EVAL_EVERY}ba",
             "loggers.samples=true", "optimizer.eps=1e-5", "global_train_batch_size=9",
             "snapshot_interval=1ba", "hang_timeout=20", "save_timeout=20", "startup_timeout=90"]  # fmt: skip
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
PACE = 0.3  # seconds that a batch takes at least, so that faults meet a running run
ORPHAN_SECONDS = 60.0  # ranks of a node that was cut off end themselves after 30, on a busy machine


def seconds_for(schedule: Schedule) -> float:
    """How long a run may take: a start and a restart for each fault, on a machine as slow as INGOT_CHAOS_SLOWNESS says."""
    lasting = sum(fault.seconds for fault in schedule.faults)
    return (120 + 90 * len(schedule.faults)) * float(os.environ.get("INGOT_CHAOS_SLOWNESS", "1")) + lasting


@dataclass
class ChaosRun:
    """A run and its schedule."""

    schedule: Schedule
    cluster: Cluster
    data: Path
    folder: Path
    marks: Path
    """A folder for what the faults inside ranks leave."""
    fired: list[Fault] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Checkpoints that existed and have gone."""
    checkpoints: set[str] = field(default_factory=set)
    late: bool = False
    job: str = ""
    stopped_at: str = ""
    """When `ingot stop` had returned."""
    dead_hosts: dict[str, str] = field(default_factory=dict)
    """Nodes that died while they ran the supervisor of an attempt, and when."""

    def ingot(self, *arguments: str, faults: object = None) -> str:
        path = os.pathsep.join(filter(None, [HOOK, os.environ.get("PYTHONPATH")]))
        env = self.cluster.env | {"PYTHONPATH": path, "INGOT_TEST_FAULT": json.dumps(faults)}
        home = self.cluster.folder / "homes" / "chaos"
        home.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, "-m", "ingot.cli.main", *arguments], env=env, capture_output=True,
                              text=True, cwd=home, timeout=180)  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"ingot {' '.join(arguments)}: {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    # --- what is known

    @property
    def records(self) -> list[Any]:
        try:
            return read_state(self.folder / "launch" / "state.jsonl")
        except StateError:  # just being written
            return []

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def states(self) -> set[str]:
        return set(self.cluster.ask("squeue", "-h", "-r", "-t", "all", "-j", self.job, "-o", "%T").split())

    def is_reached(self, fault: Fault, records: list[Any]) -> bool:
        if fault.kind in ("node", "cable") and fault.node not in self.cluster.processes:
            return False  # it is dead: when it is back
        starts = [number for number, record in enumerate(records) if isinstance(record, Started)]
        if fault.is_after_requeue and len(starts) < 2:
            return False
        since = records[starts[1] if fault.is_after_requeue else 0 :]
        if fault.moment in PHASES:
            return any(isinstance(r, PhaseBegan) and r.phase == fault.moment for r in since)
        metrics = self.folder / "metrics.jsonl"
        running = any(isinstance(r, Opened) for r in since)
        return running and metrics.exists() and metrics.read_bytes().count(b"\n") >= fault.batch

    # --- from the start to the end

    def submit(self) -> None:
        options = ["-N", "2", "--profile", "cpu", "--time", "30", "--spares", str(self.schedule.spares), "--chain",
                   str(self.schedule.chain)]  # fmt: skip
        if any(fault.kind == "stage" for fault in self.schedule.faults):
            options += _image(self.marks)
        if any(fault.kind == "disk" for fault in self.schedule.faults):
            options.append("--no-preflight")  # the small disk has less room than it asks for
        inside: list[dict[str, object]] = [{"kind": "slow", "rank": 0, "batch": 1, "attempts": "all", "seconds": PACE}]
        for number, fault in enumerate(self.schedule.faults):
            if fault.kind in INSIDE:
                phase = {} if fault.moment == "batch" else {"phase": fault.moment}
                inside.append({"kind": fault.kind, "node": fault.node, "batch": fault.batch, **phase,
                               "requeued": fault.is_after_requeue, "once": str(self.marks / str(number))})  # fmt: skip
        for fault in self.schedule.faults:
            if fault.kind == "workdir":
                inject(fault, self.cluster, self.folder, "", self.ingot)
                self.fired.append(fault)
        self.ingot("launch", "slurm", *ARGUMENTS, f"data={self.data}", f"save_folder={self.folder}", *options,
                   faults=inside)  # fmt: skip
        self.note_job()

    def note_job(self) -> None:
        self.job = json.loads((self.folder / "launch" / "jobs.jsonl").read_text().splitlines()[-1])["id"]

    def watch(self) -> None:
        """Until all jobs of the launch have ended, or the time is over."""
        waiting = [f for f in self.schedule.faults if f.kind not in INSIDE and f.moment != "submit"]
        lasting: list[tuple[float, Callable[[], None]]] = []
        end = time.monotonic() + seconds_for(self.schedule)
        try:
            while not (ended := self.is_over()) or lasting:
                if time.monotonic() > end:
                    self.late = True
                    break
                records = self.records
                for fault in list(waiting):
                    if ended or not self.is_reached(fault, records):
                        continue
                    waiting.remove(fault)
                    self.fired.append(fault)
                    if fault.kind == "node" and fault.node == host_of_attempt(records):
                        self.dead_hosts.setdefault(fault.node, now())
                    if undo := inject(fault, self.cluster, self.folder, self.job, self.ingot):
                        lasting.append((time.monotonic() + fault.seconds, undo))
                    if fault.kind == "ingot stop":
                        self.stopped_at = now()
                for item in [item for item in lasting if time.monotonic() >= item[0]]:
                    lasting.remove(item)
                    item[1]()
                self.look_at_checkpoints()
                time.sleep(0.2)
        finally:
            for _, undo in lasting:
                undo()
        struck = [f for number, f in enumerate(self.schedule.faults) if (self.marks / str(number)).exists()]
        self.fired += struck + [f for f in self.schedule.faults if f.kind == "stage"]

    def is_over(self) -> bool:
        states = self.states()
        return bool(states) and states <= ENDED

    def look_at_checkpoints(self) -> None:
        there = {path.parent.name for path in (self.folder / "checkpoints").glob("[0-9]*/manifest.json")}
        self.lost += sorted(self.checkpoints - there - set(self.lost))
        self.checkpoints |= there

    def orphans(self) -> list[str]:
        """What still runs when the time for ending is over."""
        end = time.monotonic() + ORPHAN_SECONDS
        while (left := processes_of(self.folder)) and time.monotonic() < end:
            time.sleep(0.5)
        return [words.replace(b"\0", b" ").decode(errors="replace")[:120] for words in left.values()]

    def resume(self) -> None:
        """As its operator would, with nothing in the way; to the end."""
        self.ingot("launch", "resume", str(self.folder))
        self.note_job()
        end = time.monotonic() + seconds_for(self.schedule)
        while not self.is_over() and time.monotonic() < end:
            self.look_at_checkpoints()
            time.sleep(0.2)

    def closed(self) -> list[Closed]:
        return self.of(Closed)

    def log(self) -> str:
        """What the supervisors have said, as far as it helps."""
        logs = "".join(path.read_text() for path in sorted((self.folder / "launch").glob("slurm-*.out")))
        return logs[-4000:]

    def clear(self) -> None:
        """Nothing of it stays."""
        self.cluster.ask("scancel", "--full", "--signal=KILL", "--user=root")
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.marks, ignore_errors=True)

    @property
    def verdict(self) -> Judged | None:
        """The judgment that ended the launch."""
        judged = self.of(Judged)
        return judged[-1] if judged else None


def host_of_attempt(records: list[Any]) -> str:
    """The node whose supervisor leads the open attempt; empty if none is open."""
    history = read_history(records)
    return history.starts[-1].host if history.open is not None and history.starts else ""


def _image(folder: Path) -> list[str]:
    """An image that no node can be given."""
    import hashlib

    image = folder / "ingot.sqsh"
    image.write_bytes(b"an image")
    digest = hashlib.sha256(b"an image").hexdigest()
    (folder / "ingot.sqsh.sha256").write_text(f"{digest}  ingot.sqsh\n")
    return ["--image", str(image), "--stage", "/proc/nowhere"]
