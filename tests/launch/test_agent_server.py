"""Strangers at the supervisor's port: what they can cost it is bounded, and agents are served meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from msgspec.structs import replace

from ingot.launch.agent.evidence import NodeEvidence
from ingot.launch.messages import (
    Answer,
    Challenge,
    Collect,
    Collected,
    Hello,
    Refused,
    Welcome,
    agent_proof,
    encode,
    from_supervisor,
)
from ingot.launch.supervisor import server as server_module
from ingot.launch.supervisor.server import AgentServer

TOKEN = "correct horse"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def with_server(test: Callable[[AgentServer, int], Awaitable[None]]) -> None:
    async def run() -> None:
        server = AgentServer("/runs/a", "7.0", TOKEN, ["n1"])
        try:
            await test(server, await server.listen("127.0.0.1"))
        finally:
            await server.close()

    asyncio.run(run())


async def greet(port: int, token: str, node: str = "n1") -> tuple[Streams, object]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    challenge = from_supervisor(await reader.readline())
    assert isinstance(challenge, Challenge)
    hello = Hello("/runs/a", "7.0", node, "boot", "10.0.0.1", "nonce", "")
    writer.write(encode(replace(hello, proof=agent_proof(token, challenge.nonce, hello))))
    line = await reader.readline()
    return (reader, writer), from_supervisor(line) if line else None


def test_strangers_leave_one_short_sentence_behind() -> None:
    async def test(server: AgentServer, port: int) -> None:
        for _ in range(5):
            (_, writer), said = await greet(port, "wrong", "x" * 50_000)
            assert isinstance(said, Refused)
            writer.close()
        assert len(server.refused) == 1 and len(server.refused[0]) < 200
        with suppress(ConnectionError):
            (_, writer), said = await greet(port, "wrong", "x" * 200_000)
            assert said is None
        assert len(server.refused) == 1 and not server.links

    with_server(test)


def test_only_so_many_strangers_wait_at_a_time_and_agents_may_say_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_STRANGERS", 2)

    async def test(server: AgentServer, port: int) -> None:
        waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]  # one for the node, too
        for reader, _ in waiting:
            assert await reader.readline()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""  # told nothing, and closed
        writer.close()
        waiting.pop()[1].close()
        await asyncio.sleep(0.1)
        (reader, writer), said = await greet(port, TOKEN)
        assert isinstance(said, Welcome) and "n1" in server.links
        asked = asyncio.ensure_future(server.request("n1", Collect(1, False), 30))
        assert await reader.readline()
        evidence = NodeEvidence("n1", device_errors=("x" * 1_000_000,))
        writer.write(encode(Answer(1, Collected(evidence))))
        answer = await asked
        assert isinstance(answer, Collected) and len(answer.evidence.device_errors[0]) == 1_000_000
        for _, other in waiting:
            other.close()
        writer.close()

    with_server(test)
