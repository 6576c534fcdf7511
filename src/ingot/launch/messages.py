"""What the supervisor of a job and the agents on its nodes say to each other: JSON objects, a line each, over TCP.

An agent connects, the supervisor sends a `Challenge`, the agent answers with `Hello`, and each proves with the job's
token (HMAC-SHA256, see `proof`) that it belongs to the job; the token itself never travels. From then on the supervisor
sends a `Request` at a time per agent and the agent answers it with its number; what happens to the ranks meanwhile the
agent reports without being asked.

Nothing here names a command or a file to run: an agent runs the ranks of its launch spec, and nothing else.
"""

import hashlib
import hmac
from typing import Any

import msgspec

from ingot.launch.agent.evidence import NodeEvidence
from ingot.launch.supervisor.records import Phase, StopReason

ADDRESS_VARIABLE, TOKEN_VARIABLE = "INGOT_SUPERVISOR", "INGOT_JOB_TOKEN"
START_VARIABLE = "INGOT_JOB_START"
"""Which life of the supervisor started this agent: JOB.RESTART.LIFE."""
MAX_LINE_BYTES = 16 << 20


class _Message(msgspec.Struct, frozen=True, tag_field="message", omit_defaults=True):
    pass


# --- both ways, before anything else


class Challenge(_Message, frozen=True, tag="challenge"):
    nonce: str


class Hello(_Message, frozen=True, tag="hello"):
    """An agent is ready to be used."""

    launch: str
    """The run folder of its spec."""
    start: str
    node: str
    """What the cluster calls it."""
    boot_id: str
    """Of the system: another one than before means that the node was restarted."""
    address: str
    """Where other nodes reach it."""
    nonce: str
    proof: str


class Welcome(_Message, frozen=True, tag="welcome"):
    proof: str


class Refused(_Message, frozen=True, tag="refused"):
    reason: str


# --- requests of the supervisor, and their answers


class CheckNode(_Message, frozen=True, tag="check-node"):
    """Examine the node: its disk, memory, descriptors, GPUs, and what must be the same everywhere."""


class NodeChecked(_Message, frozen=True, tag="node-checked"):
    checks: dict[str, str]
    """Failed checks: name -> sentence."""
    common: dict[str, str]
    """What must be the same on all nodes: name -> value."""
    node_seconds: float
    """The node's clock when it received the request."""


class StartProbe(_Message, frozen=True, tag="start-probe"):
    """Start the processes that measure devices and network; answered when they have imported torch."""

    seconds: float


class ProbeReady(_Message, frozen=True, tag="probe-ready"):
    port: int
    """Where the first process of this node can lead an all-reduce."""
    tflops: tuple[float, ...] = ()
    error: str = ""


class AllReduce(_Message, frozen=True, tag="all-reduce"):
    address: str
    port: int
    first_rank: int
    world: int
    seconds: float


class Reduced(_Message, frozen=True, tag="reduced"):
    gb_s: float = 0.0
    error: str = ""
    transport: str = ""
    """What NCCL chose, if that is not what the profile demands."""


class EndProbe(_Message, frozen=True, tag="end-probe"):
    pass


class ReservePort(_Message, frozen=True, tag="reserve-port"):
    """Open the socket on which rank 0 will listen; asked of the first node of an attempt."""


class PortReserved(_Message, frozen=True, tag="port-reserved"):
    port: int


class ReportCopies(_Message, frozen=True, tag="report-copies"):
    """Say which copies of the training state are in this node's memory, and listen for those who want them."""


class CopiesHeld(_Message, frozen=True, tag="copies-held"):
    """Copies that are complete for all ranks of a node: step, and which life of the ranks wrote them."""

    port: int
    """Where other agents fetch them, and send theirs."""
    node_rank: int = -1
    """Of the ranks that this agent has started last; -1 if it has started none."""
    own: tuple[tuple[int, str], ...] = ()
    guest: int = -1
    """Whose copies it keeps."""
    guests: tuple[tuple[int, str], ...] = ()


class FetchCopies(_Message, frozen=True, tag="fetch-copies"):
    """Fetch copies of the ranks of a node of this rank from the agent at an address, to start those ranks here."""

    node_rank: int
    step: int
    life: str
    address: str


class KeepCopies(_Message, frozen=True, tag="keep-copies"):
    """Keep copies of the ranks of the node of this rank: asked of a spare, if there is no other node."""

    node_rank: int


class RunRanks(_Message, frozen=True, tag="run-ranks"):
    """Start this node's ranks; answered when they are started."""

    epoch: int
    attempt: str
    node_rank: int
    nodes: int
    address: str
    port: int
    peer: str = ""
    """HOST:PORT of the agent that also keeps copies of these ranks' state; empty if none does."""
    guest: int = -1
    """The rank of the node whose copies this one keeps."""
    ended_epoch: int = 0
    """Of an earlier attempt whose first node has confirmed that its ranks have ended; 0 if none has."""


class StopRanks(_Message, frozen=True, tag="stop-ranks"):
    """Have the ranks save after the current step and end."""

    epoch: int
    reason: StopReason


class Collect(_Message, frozen=True, tag="collect"):
    """Say what is known of the ranks: of a hang, with the place where each is."""

    epoch: int
    is_hang: bool = False


class Collected(_Message, frozen=True, tag="collected"):
    evidence: NodeEvidence


class KillRanks(_Message, frozen=True, tag="kill-ranks"):
    """End all ranks at once."""

    epoch: int


class RanksKilled(_Message, frozen=True, tag="ranks-killed"):
    left: tuple[int, ...] = ()
    """Ranks that did not die within the time: they wait for a device or file system (state D)."""


class Leave(_Message, frozen=True, tag="leave"):
    """End the agent; it exits with 0."""


class Done(_Message, frozen=True, tag="done"):
    """The answer where there is nothing to say."""


class Failed(_Message, frozen=True, tag="failed"):
    """The request could not be carried out on this node."""

    reason: str
    kind: str = "machine"


Body = (CheckNode | StartProbe | AllReduce | EndProbe | ReservePort | ReportCopies | FetchCopies | KeepCopies | RunRanks
        | StopRanks | Collect | KillRanks | Leave)  # fmt: skip
AnswerBody = NodeChecked | ProbeReady | Reduced | PortReserved | CopiesHeld | Collected | RanksKilled | Done | Failed


class Request(_Message, frozen=True, tag="request"):
    number: int
    body: Body


class Answer(_Message, frozen=True, tag="answer"):
    number: int
    body: AnswerBody


# --- reports of an agent


class RankProgress(_Message, frozen=True, tag="rank-progress"):
    """At most every ten seconds, and whenever the phase changes."""

    epoch: int
    phase: Phase
    batch: int
    own_seconds: float = 0.0
    """Of the node's slowest rank, per batch: its own work, without waiting for others; 0 if not measured."""


class Suspicion(_Message, frozen=True, tag="suspicion"):
    """Something is wrong with this node's ranks: the supervisor decides what, after it has heard all nodes."""

    epoch: int
    rank: int
    what: str
    is_hang: bool = False


class RanksEnded(_Message, frozen=True, tag="ranks-ended"):
    """All ranks of this node have ended, and none has failed."""

    epoch: int
    codes: dict[int, int]


class Signalled(_Message, frozen=True, tag="signalled"):
    """Somebody other than the supervisor sent this agent a signal to stop, as a preemption does."""

    signal: int


Report = RankProgress | Suspicion | RanksEnded | Signalled
FromAgent = Hello | Answer | Report
FromSupervisor = Challenge | Welcome | Refused | Request

_from_agent, _from_supervisor = msgspec.json.Decoder(FromAgent), msgspec.json.Decoder(FromSupervisor)


def encode(message: Any) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def from_agent(line: bytes) -> FromAgent:
    """A message of an agent; `msgspec.DecodeError` if it is none."""
    return _from_agent.decode(line)


def from_supervisor(line: bytes) -> FromSupervisor:
    """A message of the supervisor; `msgspec.DecodeError` if it is none."""
    return _from_supervisor.decode(line)


def proof(token: str, *parts: str) -> str:
    """Shows that one knows the token, without sending it. Parts cannot be moved between fields: lengths go in."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def agent_proof(token: str, challenge: str, hello: Hello) -> str:
    """What an agent's `Hello` proves: that it knows the token, and that nobody has changed the rest."""
    return proof(token, "agent", challenge, hello.launch, hello.start, hello.node, hello.boot_id, hello.address,
                 hello.nonce)  # fmt: skip


def supervisor_proof(token: str, nonce: str) -> str:
    """What `Welcome` proves to the agent whose `Hello` had this nonce."""
    return proof(token, "supervisor", nonce)
