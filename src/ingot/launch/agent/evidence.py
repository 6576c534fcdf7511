"""What an agent reports about its node when an attempt ends. It sees only its own ranks, so it decides nothing."""

import msgspec


class RankEvidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a rank, from outside."""

    rank: int
    exit_code: int | None = None
    """None: it was still running. Negative: the signal that killed it."""
    message: str = ""
    """What the rank wrote before it ended; empty if it could not."""
    kind: str = ""
    """The kind of that failure, by `failure.kind_of`."""
    time: float = 0.0
    """When it failed, by the node's clock; 0 if it could not say."""
    fits: int | None = None
    """After an out-of-memory error: the microbatch size to try next."""
    batch: int = -1
    """The batch that it was working on."""
    late_seconds: float = 0.0
    """How long its heartbeat is overdue; 0 if it is on time."""
    phase: str = ""
    """What it was doing by its heartbeat: start, step, evaluation, save."""
    own_seconds: float = 0.0
    """For its own work on a batch, without waiting for others; 0 if not measured."""
    process_state: str = ""
    """The letter in /proc: T is stopped, D waits for a device or file system."""
    where: str = ""
    """File, line and function of its main thread, of a hanging attempt."""
    in_torch: bool = False
    """Whether that is in torch, where ranks wait for each other."""
    world_collectives: int = 0
    collectives: int = 0


class NodeEvidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a node."""

    node: str
    ranks: tuple[RankEvidence, ...] = ()
    device_errors: tuple[str, ...] = ()
    """Lines of the kernel or the driver since the attempt began: Xid, ECC, a GPU that has fallen off the bus."""
    oom_kills: int = 0
    """Processes that the kernel killed for memory during the attempt."""
    transport: str = ""
    """What is wrong with the transport that NCCL chose."""
    site: str = ""
    """What is wrong with the run folder, as seen from this node: full, read-only, not answering."""
    boot_id: str = ""
    logs: str = ""
    """The folder of its logs."""
