"""The agent of a node against a supervisor's side of the connection: real agents, real ranks, real sockets."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from conftest import TINY
from disks import mounted
from specs import spec
from waiting import until

from ingot.launch.agent.node_ranks import prune_logs
from ingot.launch.agent.node_state import boot_id
from ingot.launch.messages import (
    AllReduce,
    Answer,
    Challenge,
    CheckNode,
    Collect,
    EndProbe,
    Hello,
    KillRanks,
    Leave,
    RankProgress,
    RanksEnded,
    Refused,
    Request,
    ReservePort,
    RunRanks,
    Signalled,
    StartProbe,
    StopRanks,
    Suspicion,
    Welcome,
    agent_proof,
    encode,
    from_agent,
    supervisor_proof,
)

TOKEN = "the token of this job"
SLEEP = "import time; time.sleep(60)"
HOOK = """
import os, sys
if "ingot.launch.agent.cluster_agent" in sys.orig_argv:
    import ingot.launch.agent.client as client
    client.RECONNECT_SECONDS = {reconnect}
elif "RANK" in os.environ:
    exec({script!r})
"""


class Side:
    """The supervisor's side: it takes agents' connections, and asks."""

    def __init__(self, token: str = TOKEN, checks: bool = True):
        self.token, self.checks, self.port = token, checks, 0
        self.hellos: list[Hello] = []
        self.reports: list[Any] = []
        self.server: asyncio.Server | None = None
        self.connections: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.number = 0

    async def listen(self) -> None:
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = secrets.token_hex(8)
        writer.write(encode(Challenge(nonce)))
        hello = from_agent(await reader.readline())
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        if self.checks and hello.proof != agent_proof(self.token, nonce, hello):
            writer.write(encode(Refused("it has another token")))
            writer.close()
            return
        writer.write(encode(Welcome(supervisor_proof(self.token, hello.nonce))))
        self.connections[hello.node] = reader, writer
        while line := await reader.readline():
            message = from_agent(line)
            if isinstance(message, Answer):
                self.answers.pop(message.number).set_result(message.body)
            else:
                self.reports.append(message)
        self.connections.pop(hello.node, None)
        writer.close()

    async def ask(self, body: Any, node: str = "n1", seconds: float = 60) -> Any:
        await until(lambda: node in self.connections)
        self.number += 1
        self.answers[self.number] = answer = asyncio.get_running_loop().create_future()
        self.connections[node][1].write(encode(Request(self.number, body)))
        return await asyncio.wait_for(answer, seconds)

    async def drop(self) -> None:
        """Lose all connections, and do not take new ones."""
        assert self.server is not None
        self.server.close()
        for _, writer in self.connections.values():
            writer.transport.abort()
        self.connections.clear()

    def seen(self, kind: type) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]


class Nodes:
    """Agents of this machine, each with a node's name of its own."""

    def __init__(self, folder: Path, side: Side, script: str, reconnect: float, arguments: list[str]):
        self.folder, self.side, self.processes = folder, side, {}
        self.run = folder / "run"
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK.format(reconnect=reconnect, script=script))
        launch = spec(run_folder=str(self.run), workdir=str(folder), image=None, nodes=2, arguments=arguments)
        self.spec = launch.write()

    def start(self, name: str = "n1", token: str = TOKEN, **env: str) -> subprocess.Popen[bytes]:
        own = {"SLURMD_NODENAME": name, "INGOT_SUPERVISOR": f"127.0.0.1:{self.side.port}", "INGOT_JOB_TOKEN": token,
               "INGOT_JOB_START": "7.0.1", "PYTHONPATH": str(self.folder / "hook")}  # fmt: skip
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "ingot.launch.agent.cluster_agent", "--spec", str(self.spec)],
            env=os.environ | own | env, stderr=(self.folder / f"{name}.err").open("wb"),
        )  # fmt: skip
        return self.processes[name]

    def order(self, **changes: Any) -> RunRanks:
        return RunRanks(
            **({"epoch": 3, "attempt": "7.0.3", "node_rank": 0, "nodes": 1, "address": "", "port": 0} | changes)
        )

    def errors(self, name: str = "n1") -> str:
        return (self.folder / f"{name}.err").read_text()


@asynccontextmanager
async def nodes(
    folder: Path,
    script: str = SLEEP,
    reconnect: float = 30,
    arguments: list[str] | None = None,
    side: Side | None = None,
) -> AsyncIterator[Nodes]:
    side = side or Side()
    await side.listen()
    found = Nodes(folder, side, script, reconnect, arguments or [])
    try:
        yield found
    finally:
        for process in found.processes.values():
            process.kill()
            process.wait()
        await side.drop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children]


def test_a_kill_of_a_rank_is_reported_with_evidence_and_the_others_end_when_asked(tmp_path: Path) -> None:
    async def test() -> None:
        script = "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)"
        async with nodes(tmp_path, script) as here:
            agent = here.start()
            side = here.side
            port = (await side.ask(ReservePort())).port
            for _ in range(2):  # the second time after a connection was lost, say: it is the same request
                await side.ask(here.order(nodes=2, address="127.0.0.1", port=port))
            assert (hello := side.hellos[0]).start == "7.0.1" and hello.launch == str(here.run)
            assert hello.boot_id == boot_id()
            await asyncio.sleep(0.5)
            assert side.seen(RankProgress) and not side.seen(Suspicion)  # rank 1 is on the other node
            (pid,) = ranks_of(agent)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: side.seen(Suspicion))
            (found,) = (await side.ask(Collect(3))).evidence.ranks
            assert (found.rank, found.exit_code) == (0, -9)
            assert (await side.ask(KillRanks(3))).left == ()
            assert (await side.ask(Collect(3))).evidence.ranks[0].exit_code == -9  # still known
            assert (await side.ask(Collect(2))).evidence.ranks == ()
            await side.ask(Leave())
            assert await asyncio.to_thread(agent.wait, 20) == 0

    run(test)


def test_ranks_have_neither_the_token_nor_the_supervisors_address(tmp_path: Path) -> None:
    async def test() -> None:
        script = (
            f"import json, os; open({str(tmp_path / 'env')!r}, 'w').write(json.dumps(dict(os.environ))); os._exit(0)"
        )
        async with nodes(tmp_path, script) as here:
            here.start()
            await here.side.ask(here.order())
            await until(lambda: here.side.seen(RanksEnded))
            assert here.side.seen(RanksEnded) == [RanksEnded(3, {0: 0})]
            env = json.loads((tmp_path / "env").read_text())
            assert TOKEN not in env.values() and "INGOT_SUPERVISOR" not in env and env["INGOT_EPOCH"] == "3"
            assert (here.run / "logs" / "7.0.3" / "rank-0.log").exists()

    run(test)


def test_ranks_run_on_while_the_agent_connects_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path) as here:
            agent, side = here.start(), here.side
            await side.ask(here.order())
            before = ranks_of(agent)
            await side.drop()
            os.kill(before[0], signal.SIGKILL)  # nobody can be told now
            await asyncio.sleep(0.5)
            side.reports.clear()
            await side.listen()
            await until(lambda: side.seen(Suspicion))
            assert len(side.hellos) == 2 and "signal 9" in side.seen(Suspicion)[0].what

    run(test)


def test_without_a_supervisor_an_agent_kills_its_ranks_and_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, reconnect=1.0) as here:
            agent = here.start()
            await here.side.ask(here.order())
            (pid,) = ranks_of(agent)
            await here.side.drop()
            assert await asyncio.to_thread(agent.wait, 20) == 1
            assert not alive(pid) and "no supervisor for 1 s" in here.errors()

    run(test)


def test_ranks_die_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path) as here:
            agent = here.start()
            await here.side.ask(here.order())
            (pid,) = ranks_of(agent)
            agent.kill()
            await until(lambda: not alive(pid))

    run(test)


def test_an_agent_with_another_token_ends_with_one_sentence(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path) as here:
            agent = here.start(token="guessed")
            assert await asyncio.to_thread(agent.wait, 20) == 2
            assert here.errors() == "n1: error: the supervisor refuses this agent: it has another token\n"

    run(test)


def test_an_agent_does_nothing_for_a_supervisor_that_does_not_know_the_token(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, side=Side("guessed", checks=False)) as here:
            agent = here.start()
            assert await asyncio.to_thread(agent.wait, 20) == 2
            assert "does not know this job's token" in here.errors() and here.errors().count("\n") == 1

    run(test)


def test_a_signal_is_reported_and_decides_nothing(tmp_path: Path) -> None:
    """srun sends TERM when another task has failed, a preemption when the node is wanted: only the supervisor knows."""

    async def test() -> None:
        async with nodes(tmp_path) as here:
            agent, side = here.start(), here.side
            await side.ask(here.order())
            agent.send_signal(signal.SIGTERM)
            await until(lambda: side.seen(Signalled))
            assert side.seen(Signalled) == [Signalled(signal.SIGTERM)]
            await asyncio.sleep(0.3)
            assert agent.poll() is None and alive(ranks_of(agent)[0])

    run(test)


def test_a_run_that_is_asked_to_stop_saves_and_ends(data: Path, tmp_path: Path) -> None:
    async def test() -> None:
        command = ["--", *TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", "max_duration=100000ba"]
        async with nodes(tmp_path, "pass", arguments=command) as here:
            here.start()
            side = here.side
            await side.ask(here.order())
            await until(lambda: any(report.phase == "running" for report in side.seen(RankProgress)), 90)
            assert side.seen(RankProgress)[0].phase == "starting"
            await side.ask(StopRanks(3, "user"))
            await until(lambda: side.seen(RanksEnded), 90)
            assert side.seen(RanksEnded)[0].codes == {0: 75}
            assert list((here.run / "checkpoints").glob("*/manifest.json"))

    run(test)


def test_ranks_that_do_not_listen_yet_end_at_once_when_asked_to_stop(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path) as here:
            here.start()
            side = here.side
            await side.ask(here.order())
            await asyncio.sleep(0.5)
            await side.ask(StopRanks(3, "user"))
            await until(lambda: side.seen(RanksEnded))
            assert side.seen(RanksEnded)[0].codes == {0: 75} and not side.seen(Suspicion)

    run(test)


def test_a_hang_is_suspected_once_and_explained_when_asked(tmp_path: Path) -> None:
    async def test() -> None:
        script = """
import time
from ingot.training.runtime.heartbeat import *
dump_stacks_on_request()
heart = Heartbeat(HangBudgets(step=0.5, start=0.5, save=0.5))
def read_data(): time.sleep(60)
read_data()
"""
        async with nodes(tmp_path, script) as here:
            here.start()
            await here.side.ask(here.order())
            await until(lambda: here.side.seen(Suspicion))
            (found,) = (await here.side.ask(Collect(3, is_hang=True))).evidence.ranks
            assert "read_data" in found.where and found.late_seconds > 0 and found.phase == "start"
            assert len(here.side.seen(Suspicion)) == 1 and here.side.seen(Suspicion)[0].is_hang

    run(test)


def test_an_epoch_that_is_over_cannot_be_started_and_a_newer_one_replaces_the_ranks(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path) as here:
            agent, side = here.start(), here.side
            await side.ask(here.order())
            (old,) = ranks_of(agent)
            assert "epoch 2 is over" in (await side.ask(here.order(epoch=2))).reason
            await side.ask(here.order(epoch=4, attempt="7.0.4"))
            assert not alive(old) and len(ranks_of(agent)) == 1

    run(test)


def test_two_nodes_are_checked_measured_and_measured_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path) as here:
            side, tmp = here.side, tmp_path / "tmp"
            tmp.mkdir()
            for name in ("n1", "n2"):
                here.start(name, TMPDIR=str(tmp))
            checked = [await side.ask(CheckNode(), name) for name in ("n1", "n2")]
            assert checked[0].checks == {} and checked[0].common == checked[1].common
            assert abs(checked[0].node_seconds - time.time()) < 10
            for _ in range(2):  # the second time, they have imported torch
                ready = await asyncio.gather(*(side.ask(StartProbe(60), name) for name in ("n1", "n2")))
                assert [answer.error for answer in ready] == ["", ""] and all(answer.tflops for answer in ready)
                port = ready[0].port
                processes = ranks_of(here.processes["n1"])
                reduced = await asyncio.gather(*(
                    side.ask(AllReduce("127.0.0.1", port, rank, 2, 20), name) for rank, name in enumerate(("n1", "n2"))
                ))  # fmt: skip
                assert [(answer.error, answer.gb_s > 0) for answer in reduced] == [("", True)] * 2
            assert ranks_of(here.processes["n1"]) == processes
            alone = await side.ask(AllReduce("127.0.0.1", port, 0, 2, 1), "n1")  # the other one does not come
            assert alone.error
            assert (await side.ask(StartProbe(60), "n1")).error == "" and ranks_of(here.processes["n1"]) != processes
            await side.ask(EndProbe(), "n1")
            await until(lambda: not ranks_of(here.processes["n1"]))
            here.processes["n2"].kill()  # what it leaves is removed by the next one
            await asyncio.to_thread(here.processes["n2"].wait)
            await side.ask(StartProbe(60), "n1")
            assert len(list(tmp.glob("ingot-*"))) == 1
            await side.ask(EndProbe(), "n1")
            assert not list(tmp.glob("ingot-*"))

    run(test)


def test_a_node_without_the_run_folder_or_the_working_directory_says_so(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path) as here:
            here.spec.unlink()
            here.start()
            (sentence,) = (await here.side.ask(CheckNode())).checks.values()
            assert "does this node share the run folder?" in sentence
            assert "does this node share" in (await here.side.ask(here.order())).reason
            spec(run_folder=str(here.run), workdir=str(tmp_path / "absent"), image=None).write()
            here.start("n2")
            (sentence,) = (await here.side.ask(CheckNode(), "n2")).checks.values()
            assert str(tmp_path / "absent") in sentence

    run(test)


def test_a_node_whose_own_disk_is_full_is_at_fault_and_not_the_shared_one(tmp_path: Path) -> None:
    small = tmp_path / "tmp"

    async def test() -> None:
        async with nodes(tmp_path) as here:
            here.start(TMPDIR=str(small))
            failed = await here.side.ask(here.order())
            assert failed.kind == "machine" and "No space left on device" in failed.reason

    with mounted(small, "size=64k,nr_inodes=2"):  # room for one file or folder
        run(test)


def test_ranks_are_watched_although_somebody_cleans_the_temporary_folder(tmp_path: Path) -> None:
    async def test() -> None:
        script = """
import glob, os, time
from ingot.training.runtime.heartbeat import *
heart = Heartbeat(HangBudgets(step=0.5, start=0.5, save=0.5))
os.unlink(os.environ["INGOT_HEARTBEAT_FILE"])
os.unlink(os.environ["INGOT_AGENT_FILE"])
time.sleep(60)
"""
        async with nodes(tmp_path, script) as here:
            here.start()
            await here.side.ask(here.order())
            await until(lambda: here.side.seen(Suspicion))
            assert here.side.seen(Suspicion)[0].is_hang

    run(test)


def test_only_the_newest_attempts_keep_their_logs(tmp_path: Path) -> None:
    for number in range(1, 8):
        (tmp_path / f"7.0.{number}").mkdir()
        os.utime(tmp_path / f"7.0.{number}", (number, number))
    (tmp_path / "rank-0.log").touch()
    (tmp_path / "notes").mkdir()
    prune_logs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"7.0.{n}" for n in range(3, 8)),
        "notes",
        "rank-0.log",
    ]
