"""Where the agents of a job report: a TCP server of JSON lines, one connection per node.

An agent shows with the job's token that it belongs here (see `messages`); anybody else is told no and is forgotten. A
connection that breaks is not yet a lost node: its agent comes back within seconds, and only then is it given up. A node
that answers nothing at all is found by TCP itself, within 25 seconds.
"""

import asyncio
import hmac
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from ingot.launch.agent.client import keep_alive
from ingot.launch.messages import (
    MAX_LINE_BYTES,
    Answer,
    Challenge,
    Failed,
    Hello,
    Refused,
    Request,
    Signalled,
    Welcome,
    agent_proof,
    encode,
    from_agent,
    supervisor_proof,
)

AUTHENTICATION_SECONDS = 10.0
HELLO_BYTES = 1 << 16  # what somebody may send who has not shown the token
MOST_STRANGERS = 64  # connections without it, beyond one for each node
BACKLOG = 4096
KEEP_ALIVE = (5, 5, 4)


class AgentLost(Exception):
    """The connection broke before the answer came."""


@dataclass(frozen=True)
class AgentEvent:
    """Something that a node did without being asked."""

    node: str
    report: Any
    """A report of `messages`, or None: its connection broke."""


class AgentLink:
    """The connection to the agent of one node."""

    def __init__(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.node, self.address, self.boot_id = hello.node, hello.address, hello.boot_id
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._turn = asyncio.Lock()
        self.is_open = True

    async def request(self, body: Any) -> Any:
        """The answer of the agent. Requests wait for each other, as an agent does one thing at a time."""
        async with self._turn:
            if not self.is_open:
                raise AgentLost(self.node)
            self._number += 1
            number = self._number
            future = self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                self._writer.write(encode(Request(number, body)))
                await self._writer.drain()
                return await future
            except OSError:
                raise AgentLost(self.node) from None
            finally:
                self._waiting.pop(number, None)

    async def read(self, events: "asyncio.Queue[AgentEvent]", on_signal: Callable[[str, int], None]) -> None:
        """Until the connection ends: answers go to those who wait for them, reports to the queue."""
        try:
            while line := await self._reader.readline():
                message = from_agent(line)
                if isinstance(message, Answer):
                    future = self._waiting.get(message.number)
                    if future is not None and not future.done():
                        future.set_result(message.body)
                elif isinstance(message, Signalled):
                    on_signal(self.node, message.signal)
                elif not isinstance(message, Hello):
                    events.put_nowait(AgentEvent(self.node, message))
        except (OSError, ValueError, msgspec.DecodeError, asyncio.IncompleteReadError):
            pass  # it has gone, or no longer speaks our language: either way it is of no use
        finally:
            self.close()

    def close(self) -> None:
        self.is_open = False
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(AgentLost(self.node))
        with suppress(OSError, RuntimeError):
            self._writer.close()


class AgentServer:
    """All connections. `links` has those that are open, by node."""

    def __init__(self, launch: str, start: str, token: str, nodes: Iterable[str]):
        self.launch, self.start, self.token, self.nodes = launch, start, token, frozenset(nodes)
        self.links: dict[str, AgentLink] = {}
        self.dropped: dict[str, float] = {}
        """When connections broke."""
        self.events: asyncio.Queue[AgentEvent] = asyncio.Queue()
        self.arrived = asyncio.Condition()
        self.refused: deque[str] = deque(maxlen=1)
        """Why an agent was turned away last."""
        self._strangers = 0
        self.on_signal: Callable[[str, int], None] = lambda node, number: None
        """Called at once, whatever the phase, when somebody has sent an agent a signal to stop."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str | None = None, port: int = 0) -> int:
        """Returns the port; 0 takes one that is free."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=HELLO_BYTES, backlog=BACKLOG,
                                                  family=socket.AF_INET)  # fmt: skip
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self.links.values()):
            link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def link(self, node: str) -> AgentLink | None:
        return self.links.get(node)

    def hang_up(self, nodes: Iterable[str]) -> None:
        """Nobody waits for the answers of nodes that have gone; TCP alone would notice half a minute later."""
        for link in [self.links[node] for node in nodes if node in self.links]:
            link.close()

    async def request(self, node: str, body: Any, seconds: float) -> Any:
        """The answer of a node; a `Failed` that says why if there is none."""
        link = self.links.get(node)
        if link is None:
            return Failed(f"{node}: its agent has gone", "lost")
        try:
            async with asyncio.timeout(seconds):
                return await link.request(body)
        except AgentLost:
            return Failed(f"{node}: its agent has gone", "lost")
        except TimeoutError:
            return Failed(f"{node}: its agent did not answer within {seconds:g} s", "silent")

    async def request_all(self, bodies: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Ask several nodes at once; returns all answers, `Failed` where there is none."""
        answers = await asyncio.gather(*(self.request(node, body, seconds) for node, body in bodies.items()))
        return dict(zip(bodies, answers, strict=True))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection, *KEEP_ALIVE)
            hello = await self._meet(reader, writer)
            if hello is None:
                return
            reader._limit = MAX_LINE_BYTES  # type: ignore[attr-defined]  # asyncio has no public name for it
            link = AgentLink(hello, reader, writer)
            await self._add(link)
            await link.read(self.events, self.on_signal)
            if self.links.get(link.node) is link:  # otherwise a newer connection has taken its place
                del self.links[link.node]
                self.dropped[link.node] = time.monotonic()
                self.events.put_nowait(AgentEvent(link.node, None))
        except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError):
            pass  # a stranger that knocked and left, or the deputy that looks whether we are there
        except asyncio.CancelledError:
            pass  # by `close`; the callback of asyncio's streams would print it as an error
        finally:
            self._tasks.discard(task)
            with suppress(OSError, RuntimeError):
                writer.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello | None:
        """Only so many at a time: strangers must not use up this process's memory and files."""
        if self._strangers >= MOST_STRANGERS + len(self.nodes):
            return None
        self._strangers += 1
        try:
            async with asyncio.timeout(AUTHENTICATION_SECONDS):
                return await self._authenticate(reader, writer)
        finally:
            self._strangers -= 1

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello | None:
        nonce = secrets.token_hex(16)
        writer.write(encode(Challenge(nonce)))
        await writer.drain()
        try:
            hello = from_agent(await reader.readline())
        except msgspec.DecodeError:
            return None
        reason = self._objection(hello, nonce)
        assert isinstance(hello, Hello) or reason
        if reason:
            self.refused.append(reason)
            writer.write(encode(Refused(reason)))
            await writer.drain()
            return None
        assert isinstance(hello, Hello)
        writer.write(encode(Welcome(supervisor_proof(self.token, hello.nonce))))
        await writer.drain()
        return hello

    def _objection(self, hello: Any, nonce: str) -> str:
        """Why an agent may not take part; empty if it may."""
        if not isinstance(hello, Hello):
            return "the first message must be a hello"
        if not hmac.compare_digest(agent_proof(self.token, nonce, hello).encode(), hello.proof.encode()):
            return f"{hello.node[:64]!r} does not know the job's token"
        if (hello.launch, hello.start) != (self.launch, self.start):
            theirs = f"{hello.launch[:256]} {hello.start[:64]}"
            return f"{hello.node[:64]} belongs to {theirs}, and this is {self.launch} {self.start}"
        if hello.node not in self.nodes:
            return f"{hello.node[:64]} is not a node of this job"
        return ""

    async def _add(self, link: AgentLink) -> None:
        before = self.links.get(link.node)
        self.links[link.node] = link
        if before is not None:
            before.close()
        async with self.arrived:
            self.arrived.notify_all()
