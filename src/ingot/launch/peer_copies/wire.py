"""What the agents of two nodes say to each other about copies of the training state: JSON objects, a line each, over
TCP, and after some of them the bytes of a copy.

The greeting is that of `messages`, with another role: the listener sends a `Challenge`, the other side a `PeerHello`,
and each proves with the job's token that it belongs to the job. A copy is verified by its hash where it arrives.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ingot.checkpoint.copy_memory import CopyMemory, CopyRecord, content_hash
from ingot.errors import CheckpointError, IngotError
from ingot.launch.messages import Challenge, Refused, Welcome, encode, proof, supervisor_proof

SILENCE_SECONDS = 20.0  # without a byte, the other side is given up
MAX_LINE_BYTES = 4 << 20
BLOCK = 1 << 24
NICENESS = 10


class PeerError(IngotError):
    """The other node has gone, or says no."""


class PeerHello(msgspec.Struct, frozen=True, tag_field="message", tag="peer-hello"):
    launch: str
    start: str
    node: str
    nonce: str
    proof: str


class OfferCopy(msgspec.Struct, frozen=True, tag_field="message", tag="offer-copy"):
    """Keep this copy; its bytes follow an answer without a reason."""

    node_rank: int
    local_rank: int
    record: CopyRecord


class AskForCopy(msgspec.Struct, frozen=True, tag_field="message", tag="ask-for-copy"):
    """Send this copy; its bytes follow an answer with a record."""

    node_rank: int
    local_rank: int
    step: int
    life: str


class ForgetCopies(msgspec.Struct, frozen=True, tag_field="message", tag="forget-copies"):
    """Keep no copy of these ranks any longer: they have used or discarded their own."""

    node_rank: int


class CopyAnswer(msgspec.Struct, frozen=True, tag_field="message", tag="copy-answer"):
    reason: str = ""
    """Why not."""
    has_it: bool = False
    """The copy is there already: nothing needs to be sent."""
    record: CopyRecord | None = None


PeerMessage = Challenge | PeerHello | Welcome | Refused | OfferCopy | AskForCopy | ForgetCopies | CopyAnswer
_decoder = msgspec.json.Decoder(PeerMessage)


@dataclass(frozen=True)
class JobIdentity:
    """What all agents of one start of a job have in common, and this one's name."""

    launch: str
    start: str
    token: str
    node: str

    def proof_of(self, challenge: str, hello: PeerHello) -> str:
        return proof(self.token, "peer", challenge, hello.launch, hello.start, hello.node, hello.nonce)


class PeerLine:
    """A connection between two agents. Every failure is a `PeerError`."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._socket.settimeout(SILENCE_SECONDS)
        self._file = connection.makefile("rb")

    @classmethod
    def connect(cls, address: str, job: JobIdentity, seconds: float = 10.0) -> "PeerLine":
        """Connect to HOST:PORT, and exchange proofs."""
        host, _, port = address.rpartition(":")
        try:
            line = cls(socket.create_connection((host, int(port)), seconds))
        except (OSError, ValueError) as error:
            raise PeerError(f"cannot connect to {address}: {error}") from None
        try:
            line._greet(job, address)
        except BaseException:
            line.close()
            raise
        return line

    def _greet(self, job: JobIdentity, address: str) -> None:
        challenge = self.receive()
        if not isinstance(challenge, Challenge):
            raise PeerError(f"what listens at {address} is not an agent")
        hello = PeerHello(job.launch, job.start, job.node, secrets.token_hex(16), "")
        self.send(msgspec.structs.replace(hello, proof=job.proof_of(challenge.nonce, hello)))
        match self.receive():
            case Welcome(proof=shown):
                if not secrets.compare_digest(shown, supervisor_proof(job.token, f"peer {hello.nonce}")):
                    raise PeerError(f"what listens at {address} does not know this job's token")
            case Refused(reason=reason):
                raise PeerError(f"{address} refuses: {reason}")
            case _:
                raise PeerError(f"what listens at {address} is not an agent")

    def admit(self, job: JobIdentity) -> str:
        """On the listening side: the name of the node that has connected, or `PeerError`."""
        nonce = secrets.token_hex(16)
        self.send(Challenge(nonce))
        hello = self.receive()
        reason = ""
        if not isinstance(hello, PeerHello):
            reason = "the first message must be a hello"
        elif not secrets.compare_digest(job.proof_of(nonce, hello).encode(), hello.proof.encode()):
            reason = "it does not know the job's token"
        elif (hello.launch, hello.start) != (job.launch, job.start):
            reason = f"it belongs to {hello.launch} {hello.start}, and this is {job.launch} {job.start}"
        if reason or not isinstance(hello, PeerHello):
            self.send(Refused(reason))
            raise PeerError(reason)
        self.send(Welcome(supervisor_proof(job.token, f"peer {hello.nonce}")))
        return hello.node

    def send(self, message: PeerMessage) -> None:
        try:
            self._socket.sendall(encode(message))
        except OSError as error:
            raise PeerError(f"the connection was lost: {error}") from None

    def receive(self) -> PeerMessage:
        try:
            line = self._file.readline(MAX_LINE_BYTES)
            if not line.endswith(b"\n"):
                raise PeerError("the connection was closed")
            return _decoder.decode(line)
        except (OSError, msgspec.DecodeError, ValueError) as error:
            raise PeerError(f"the connection was lost: {error}") from None

    def ask(self, message: PeerMessage) -> CopyAnswer:
        """An answer that is not a refusal."""
        self.send(message)
        return self.confirm()

    def confirm(self) -> CopyAnswer:
        """The other side's answer, if it is not a refusal."""
        answer = self.receive()
        if not isinstance(answer, CopyAnswer):
            raise PeerError("the other node answers something else")
        if answer.reason:
            raise PeerError(answer.reason)
        return answer

    def send_content(self, memory: CopyMemory, slot: int, record: CopyRecord, pace: Callable[[int], None]) -> None:
        """The bytes of a copy, from the system's memory to the network without passing through this process.

        pace: called with the number of bytes after each block; it may wait, or raise
        """
        try:
            with os.fdopen(os.dup(memory.descriptor), "rb", buffering=0) as file:
                for begin in range(0, record.bytes, BLOCK):
                    size = min(BLOCK, record.bytes - begin)
                    if self._socket.sendfile(file, memory.offset_of(slot) + begin, size) != size:
                        raise PeerError(f"the copy of step {record.step} is cut short")
                    pace(size)
        except OSError as error:
            raise PeerError(f"the connection was lost: {error}") from None

    def receive_content(self, memory: CopyMemory, slot: int, record: CopyRecord) -> None:
        """Fill a slot with the bytes of a copy; it counts as complete only if its hash is that of the record."""
        with memory.begin(slot)(record.bytes) as content, memoryview(content) as view:
            begin = 0
            while begin < record.bytes:
                try:
                    with view[begin : begin + BLOCK] as block:
                        count = self._file.readinto(block)
                except OSError as error:
                    raise PeerError(f"the connection was lost: {error}") from None
                if not count:
                    raise PeerError("the connection was closed")
                begin += count
            digest = content_hash(view)
        if digest != record.xxh3:
            raise PeerError(f"the copy of step {record.step} is damaged: its hash differs")
        try:
            memory.complete(slot, record)
        except CheckpointError as error:
            raise PeerError(str(error)) from None

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a thread that reads or writes
        with suppress(OSError):
            self._file.close()
            self._socket.close()


class Pace:
    """Bounds a rate, and ends a transfer when its thread is to end."""

    def __init__(self, bytes_per_second: float, stopping: threading.Event):
        self._rate, self._stopping = bytes_per_second, stopping
        self._begin, self._sent = time.monotonic(), 0

    def __call__(self, count: int) -> None:
        self._sent += count
        early = self._begin + self._sent / self._rate - time.monotonic()
        if self._stopping.wait(max(0.0, early)):
            raise PeerError("this node does something else now")


def lower_priority() -> None:
    """Of this thread: training on the same cores comes first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
