"""Histories of a launch, made by a job that obeys the judge while everything around it fails at random."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ingot.launch.supervisor.diagnose import diagnose_unfinished
from ingot.launch.supervisor.history import read_history
from ingot.launch.supervisor.judge import Verdict, choose_nodes, judge, judge_start, launch_end
from ingot.launch.supervisor.records import (
    Cause,
    Closed,
    Excluded,
    Launched,
    Opened,
    Started,
    StopRequested,
)

KINDS = ("user", "data", "numeric", "memory", "program", "device", "machine", "transport", "hang", "lost", "silent",
         "site", "supervisor")  # fmt: skip
RUN = "/runs/a"


@dataclass
class Job:
    """A job whose supervisor writes records and does what the judge says."""

    nodes: int = 2
    spares: int = 1
    pool: int = 6
    """Nodes of the whole cluster."""
    records: list[Any] = field(default_factory=list)
    verdicts: list[tuple[int, Verdict]] = field(default_factory=list)
    """After how many records, and what was judged."""
    clock: datetime = field(default_factory=lambda: datetime(2026, 1, 1, tzinfo=UTC))
    step: int = 0
    epoch: int = 0
    restart: int = -1
    ended: str = ""

    def __post_init__(self) -> None:
        self.add(Launched(time=self.now(), launch="L", back_end="slurm", nodes=self.nodes, spares=self.spares))

    def now(self, seconds: float = 1.0) -> str:
        self.clock += timedelta(seconds=seconds)
        return self.clock.isoformat(timespec="milliseconds")

    def add(self, record: Any) -> None:
        self.records.append(record)

    def start(self, allocation: tuple[str, ...] = (), back: Sequence[str] = ()) -> bool:
        """The job starts, after these nodes were booted; returns whether it may open attempts."""
        self.restart += 1
        history = read_history(self.records)
        if history.open is not None:
            self.close(diagnose_unfinished(history, {}, dict.fromkeys(back, "it was booted at 12:00:00")))
            if self.ended in ("halt", "finish"):
                return False
            self.ended = ""
        if not allocation:  # Slurm does not give nodes that the job excludes, if there are others
            out = read_history(self.records).excluded
            names = [f"n{i}" for i in range(1, self.pool + 1)]
            free = [name for name in names if name not in out]
            allocation = tuple(free[: self.nodes + self.spares])
        if len(allocation) < self.nodes:
            self.ended = "queued"  # for ever, and the cluster says why
            return False
        host = allocation[0]
        self.add(Started(time=self.now(), launch="L", job="7", restart=self.restart, host=host, nodes=allocation,
                         step=self.step))  # fmt: skip
        history = read_history(self.records)
        verdict = judge_start(self.records, self.now(), RUN)
        if verdict is not None and launch_end(history) is None:
            self.take(verdict)
        elif verdict is not None:
            self.ended = verdict.judged.action
        return verdict is None and not self.ended

    def open(self) -> Opened:
        nodes = choose_nodes(self.records)
        assert nodes, "an attempt without nodes"
        self.epoch += 1
        record = Opened(time=self.now(), epoch=self.epoch, attempt=f"7.{self.restart}.{self.epoch}", nodes=nodes,
                        step=self.step)  # fmt: skip
        self.add(record)
        return record

    def close(self, cause: Cause, steps: int = 0) -> str:
        self.step += steps
        self.add(Closed(time=self.now(), epoch=self.epoch, cause=cause, step=self.step))
        return self.take(judge(self.records, self.now(), RUN))

    def take(self, verdict: Verdict) -> str:
        self.verdicts.append((len(self.records), verdict))
        for record in verdict.exclude:
            self.add(record)
        self.add(verdict.judged)
        action = verdict.judged.action
        if action in ("finish", "stop", "halt"):
            self.ended = action
        self.now(verdict.judged.wait_seconds)
        return action

    def fail(self, *causes: Cause, steps: int = 0) -> list[str]:
        """Attempts that end so, one after another, as far as the judge lets them; returns what it said."""
        said = []
        for cause in causes:
            if self.ended:
                break
            self.open()
            said.append(self.close(cause, steps))
            if said[-1] == "requeue":
                self.start()
        return said


def random_cause(random: random.Random, nodes: tuple[str, ...]) -> Cause:
    kind = random.choice(KINDS)
    node = random.choice((*nodes, ""))
    message = f"{kind} {random.randrange(2)}"
    suspects = () if node or random.random() < 0.5 else nodes
    fits = random.choice((None, 1, 2, 4)) if kind == "memory" else None
    bad = tuple(n for n in nodes if n != node and random.random() < 0.1) if node else ()
    return Cause(kind, message, node, suspects=suspects, is_local=bool(node) and random.random() < 0.4, bad_nodes=bad,
                 fits=fits)  # fmt: skip


def random_job(seed: int, limit: int = 400) -> Job:
    """A job under random faults, until it ends or has had `limit` attempts. A third of all jobs never save anything,
    and in a third the same fault comes again and again."""
    draw = random.Random(seed)
    job = Job(nodes=draw.choice((1, 2, 4)), spares=draw.choice((0, 1, 3)), pool=draw.choice((4, 8, 40)))
    saves = draw.choice((0.0, 0.1, 0.5))
    same = random_cause(draw, ("n1", "n2")) if draw.random() < 0.33 else None
    running = job.start()
    for _ in range(limit):
        if job.ended or not running:
            break
        opened = job.open()
        event = draw.random()
        if event < 0.05:  # Slurm requeues the job, or its batch host dies
            if draw.random() < 0.3:
                job.add(StopRequested(time=job.now(), reason="signal", detail="SIGTERM"))
            back = draw.choice(((), opened.nodes[:1], opened.nodes[-1:], opened.nodes))
            running = job.start(back=back)
            continue
        if event < 0.07:
            job.add(StopRequested(time=job.now(), reason=draw.choice(("user", "wall-time", "time-limit", "signal"))))
        if event > 0.95:
            job.add(Excluded(time=job.now(), node=draw.choice(opened.nodes), reason="drained", is_drained=True))
        steps = 10 if draw.random() < saves else 0
        stop = read_history(job.records).stop
        cause = same or random_cause(draw, opened.nodes)
        if stop is not None and draw.random() < 0.8:
            cause = Cause("stopped", "saved and stopped")
        elif draw.random() < 0.02:
            cause = draw.choice((Cause("finished", ""), Cause("stopped", "who asked?")))
        action = job.close(cause, steps)
        if action == "requeue":
            running = job.start()
    return job
