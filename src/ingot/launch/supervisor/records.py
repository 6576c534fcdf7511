"""What the supervisor of a job writes down: `launch/state.jsonl`, a record per line.

The file has one writer at a time: `ingot launch` while no job of the run lives, then the supervisor of the job; on one
machine, the launcher. Each record is on disk before the supervisor acts on it, so whoever starts next knows what was
going on. `judge` decides by these records alone, and `ingot status` shows them.
"""

from typing import Literal

import msgspec

Kind = Literal[
    "finished",
    "stopped",
    "user",  # the same command fails again: config, code, environment on every node
    "data",
    "numeric",
    "memory",
    "program",  # an unforeseen error
    "device",  # a GPU, its memory or its driver: the node's
    "machine",  # a rank was killed, a node failed its checks
    "transport",  # a slow network in place of a fast one
    "hang",
    "lost",  # a node, or the agent on it, has gone
    "silent",  # the agent of a node never reported
    "site",  # the shared file system or the cluster's controller
    "supervisor",  # the supervisor of an attempt ended before it could close it
]
FINAL_KINDS = ("user", "data", "numeric")
"""Kinds that fail again wherever they run."""
StopReason = Literal["user", "time-limit", "preempt", "signal", "wall-time"]
Phase = Literal[
    "staging", "hello", "preflight", "starting", "running", "evaluating", "saving", "stopping", "collecting", "waiting"
]
Action = Literal["restart", "swap", "wait", "requeue", "finish", "stop", "halt"]


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an attempt ended."""

    kind: Kind
    message: str
    node: str = ""
    """The node at fault; empty if several are, none is, or it is undecided."""
    rank: int = -1
    batch: int = -1
    suspects: tuple[str, ...] = ()
    """Nodes among which the evidence does not decide."""
    is_local: bool = False
    """Whether the evidence is the node's own, and not what others say of it."""
    bad_nodes: tuple[str, ...] = ()
    """Further nodes that failed their checks, in addition to `node`."""
    fits: int | None = None
    """After an out-of-memory error: the microbatch size to try next."""
    evidence: str = ""
    """The folder of logs to look at."""


class _Record(msgspec.Struct, frozen=True, tag_field="event", kw_only=True, omit_defaults=True):
    time: str
    """When it was written, ISO 8601 with time zone."""


class Launched(_Record, frozen=True, tag="launched"):
    """A user started the run; earlier failures no longer count."""

    launch: str
    back_end: str
    nodes: int
    spares: int = 0
    chain: int = 1
    run: str = ""
    """The run folder, of a job on a cluster."""
    command: str = ""
    """The user's command, where no launch spec says how to launch the run again."""


class Started(_Record, frozen=True, tag="started"):
    """A supervisor started: a job, or a requeue of it."""

    launch: str
    job: str
    restart: int
    """How often the cluster has restarted this job."""
    host: str
    """The node that the supervisor runs on."""
    nodes: tuple[str, ...]
    """The allocation."""
    step: int
    """The newest checkpoint; for a preparation, pieces done."""


class Opened(_Record, frozen=True, tag="opened"):
    """An attempt begins, before anything of it runs."""

    epoch: int
    attempt: str
    nodes: tuple[str, ...]
    step: int
    """The newest checkpoint."""
    copied: int = 0
    """The step of the newer copy in host memory that it continues from, if the supervisor knows of one."""

    @property
    def first(self) -> int:
        """The step that it continues from."""
        return max(self.step, self.copied)


class PhaseBegan(_Record, frozen=True, tag="phase"):
    """What an attempt is doing now."""

    epoch: int
    phase: Phase
    detail: str = ""
    copied: int = 0
    """At the start of ranks: the step of the copies in host memory that they have, if newer than the checkpoint."""


class StopRequested(_Record, frozen=True, tag="stop"):
    """Somebody or something wants the run to save and stop."""

    reason: StopReason
    detail: str = ""


class Closed(_Record, frozen=True, tag="closed"):
    """An attempt has ended."""

    epoch: int
    cause: Cause
    step: int
    """The newest checkpoint; more than when it was opened is progress."""
    reached_step: bool = False
    """Whether a training step ran."""


class Excluded(_Record, frozen=True, tag="excluded"):
    """A node that this launch no longer uses."""

    node: str
    reason: str
    is_drained: bool = False
    """An administrator took it out: it is not at fault."""


class Judged(_Record, frozen=True, tag="judged"):
    """What is done about it."""

    epoch: int
    action: Action
    reason: str
    advice: str = ""
    """The command that helps, if the launch has ended."""
    wait_seconds: float = 0.0


Record = Launched | Started | Opened | PhaseBegan | StopRequested | Closed | Excluded | Judged
