"""An agent's connection to the supervisor of its job: one TCP connection, on which both prove that they know the job's
token before anything else is said. Lost connections are found by TCP's keepalive, also where a cable was pulled.
"""

import asyncio
import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ingot.errors import IngotError
from ingot.launch.messages import (
    MAX_LINE_BYTES,
    Challenge,
    FromSupervisor,
    Hello,
    Refused,
    Request,
    Welcome,
    agent_proof,
    encode,
    from_supervisor,
    supervisor_proof,
)
from ingot.launch.supervisor.failure_log import node_name

CONNECT_SECONDS = 5.0  # for the connection, and for each line of the greeting
RECONNECT_SECONDS = 18.0  # before the agent gives up: half a minute with the time that keepalive takes to notice
KEEP_ALIVE = (3, 3, 3)
ELSEWHERE = "192.0.2.1"  # reserved for documentation: the way there is the default route


class SupervisorRefused(IngotError):
    """The supervisor does not want this agent, or is not this job's."""


@dataclass(frozen=True)
class SupervisorAddress:
    """Where the supervisor listens, and the token that it and its agents share."""

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, text: str, token: str) -> "SupervisorAddress":
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit():
            raise SupervisorRefused(f"{text!r} is not the address of a supervisor, HOST:PORT")
        return cls(host.strip("[]"), int(port), token)


class SupervisorLink:
    """An open connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, supervisor: SupervisorAddress, hello: Callable[[str], Hello]) -> "SupervisorLink":
        """Connect and exchange proofs; OSError if nobody answers properly. `hello` is given this node's address."""
        try:
            return await asyncio.wait_for(cls._open(supervisor, hello), CONNECT_SECONDS)
        except (msgspec.DecodeError, asyncio.IncompleteReadError, ValueError) as error:
            raise ConnectionError(f"what answers is not a supervisor: {error}") from None

    @classmethod
    async def _open(cls, supervisor: SupervisorAddress, hello: Callable[[str], Hello]) -> "SupervisorLink":
        reader, writer = await asyncio.open_connection(supervisor.host, supervisor.port, limit=MAX_LINE_BYTES)
        link = cls(reader, writer)
        try:
            keep_alive(writer.get_extra_info("socket"), *KEEP_ALIVE)
            challenge = await link._receive()
            if not isinstance(challenge, Challenge):
                raise ConnectionError("it did not begin with a challenge")
            own = writer.get_extra_info("sockname")[0]
            said = msgspec.structs.replace(hello(reachable_address(own)), nonce=secrets.token_hex(16))
            said = msgspec.structs.replace(said, proof=agent_proof(supervisor.token, challenge.nonce, said))
            link.send(said)
            match await link._receive():
                case Welcome(proof=shown):
                    if not secrets.compare_digest(shown, supervisor_proof(supervisor.token, said.nonce)):
                        where = f"{supervisor.host}:{supervisor.port}"
                        raise SupervisorRefused(f"what listens at {where} does not know this job's token")
                case Refused(reason=reason):
                    raise SupervisorRefused(f"the supervisor refuses this agent: {reason}")
                case _:
                    raise ConnectionError("the connection was closed during the greeting")
        except BaseException:
            writer.close()
            raise
        return link

    def send(self, message: Any) -> None:
        """Send; what is lost with the connection is found out by the next `receive`."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> Request | None:
        """The next request; None when the connection is lost."""
        try:
            message = await self._receive()
        except (OSError, msgspec.DecodeError, ValueError):
            return None
        return message if isinstance(message, Request) else None

    async def close(self) -> None:
        """Close, when all that was sent has left this process."""
        try:
            await asyncio.wait_for(self._writer.drain(), CONNECT_SECONDS)
        except OSError:
            pass
        finally:
            self._writer.close()

    async def _receive(self) -> FromSupervisor | None:
        line = await self._reader.readline()
        return from_supervisor(line) if line.endswith(b"\n") else None


def keep_alive(connection: socket.socket, idle: int, interval: int, count: int) -> None:
    """Have TCP ask whether the other side is there: a node that lost its power or its network says nothing.

    idle, interval, count: seconds before the first question and between two, and how many may stay without an answer
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": count,
               "TCP_USER_TIMEOUT": 1000 * (idle + interval * count)}  # fmt: skip
    for name, value in options.items():
        if hasattr(socket, name):  # not all systems have all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reachable_address(own: str) -> str:
    """An address of this machine by which others reach it: `own`, its end of the connection to the supervisor, unless
    the supervisor runs on this machine and the system took the short way."""
    if not _is_loopback(own):
        return own
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ELSEWHERE, 9))  # no packet is sent
        return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):  # no default route: what the machine's name stands for
        found = [str(info[4][0]) for info in socket.getaddrinfo(node_name(), None, type=socket.SOCK_STREAM)]
        return next((address for address in found if not _is_loopback(address)), own)
    return own


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
