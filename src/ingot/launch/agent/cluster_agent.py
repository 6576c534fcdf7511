"""The agent of one node of a job: `python -m ingot.launch.agent.cluster_agent --spec FILE`, started once per node. It
does what the supervisor of the job asks, tells it what it sees, and decides nothing.

It keeps no state across connections but the running ranks. If the connection is lost, the ranks run on while the agent
connects again; without a supervisor for half a minute it kills them and ends, since another job may by then own the
run. A signal from anybody else is reported, and obeyed only if the supervisor then says so.
"""

import argparse
import asyncio
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ingot.errors import EXIT_FAULT, IngotError
from ingot.launch.agent.attempt import STOP_SIGNALS
from ingot.launch.agent.client import RECONNECT_SECONDS, SupervisorAddress, SupervisorLink, SupervisorRefused
from ingot.launch.agent.environment import enter_environment
from ingot.launch.agent.evidence import NodeEvidence
from ingot.launch.agent.failure import SITE_ERRORS
from ingot.launch.agent.node_ranks import NodeRanks, prune_logs
from ingot.launch.agent.node_state import boot_id
from ingot.launch.messages import (
    ADDRESS_VARIABLE,
    START_VARIABLE,
    TOKEN_VARIABLE,
    AllReduce,
    Answer,
    AnswerBody,
    Body,
    CheckNode,
    Collect,
    Collected,
    Done,
    EndProbe,
    Failed,
    FetchCopies,
    Hello,
    KeepCopies,
    KillRanks,
    Leave,
    NodeChecked,
    PortReserved,
    ProbeReady,
    RanksKilled,
    ReportCopies,
    Request,
    ReservePort,
    RunRanks,
    Signalled,
    StartProbe,
    StopRanks,
)
from ingot.launch.peer_copies.node_copies import NodeCopies
from ingot.launch.peer_copies.wire import JobIdentity
from ingot.launch.preflight.node_preflight import NodePreflight
from ingot.launch.spec import LaunchSpec, read_spec
from ingot.launch.supervisor.failure_log import node_name

RETRY_SECONDS = 0.5
CHECK_SECONDS = 15.0  # for what reads files; the supervisor waits 30 s
LOOK_SECONDS = 0.1  # between two looks at the ranks


class ClusterAgent:
    """One node's agent, from its first connection to `Leave`."""

    def __init__(self, spec_file: Path, supervisor: SupervisorAddress, env: Mapping[str, str]):
        self.supervisor, self.env = supervisor, dict(env)
        self.run_folder = spec_file.absolute().parent.parent
        self.spec: LaunchSpec | None = None
        self.problem = ""
        """Why this node cannot be used."""
        try:
            self.spec = read_spec(spec_file)
            self.run_folder = Path(self.spec.run_folder)
        except (IngotError, OSError) as error:
            self.problem = f"{error}; does this node share the run folder?"
        self._has_entered = False
        self._copies: NodeCopies | None = None
        self._preflight: NodePreflight | None = None
        self._ranks: NodeRanks | None = None
        self._last_evidence: tuple[int, NodeEvidence] | None = None
        self._listener: socket.socket | None = None
        self._link: SupervisorLink | None = None
        self._signals: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve the supervisor until it says `Leave` or is gone. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        watch = asyncio.create_task(self._watch())
        try:
            while (link := await self._connect()) is not None:
                if await self._serve(link):
                    return 0
            print(f"{node_name()}: no supervisor for {RECONNECT_SECONDS:g} s: ending", file=sys.stderr)
            return EXIT_FAULT
        finally:
            watch.cancel()
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)
            await asyncio.to_thread(self._end)

    async def _connect(self) -> SupervisorLink | None:
        """A connection; None if nobody answers for too long."""
        end = time.monotonic() + RECONNECT_SECONDS
        while time.monotonic() < end:
            try:
                return await SupervisorLink.open(self.supervisor, self._hello)
            except OSError:
                await asyncio.sleep(RETRY_SECONDS * random.uniform(0.5, 1.5))
        return None

    def _hello(self, address: str) -> Hello:
        start = self.env.get(START_VARIABLE, "")
        return Hello(str(self.run_folder), start, node_name(), boot_id(), address, "", "")

    async def _serve(self, link: SupervisorLink) -> bool:
        """Answer requests until the connection is lost; returns whether the supervisor has said `Leave`."""
        self._link = link
        for number in self._signals:
            link.send(Signalled(number))
        if self._ranks is not None:
            for report in self._ranks.facts():
                link.send(report)
        try:
            while (request := await link.receive()) is not None:
                if isinstance(request.body, Leave):
                    await asyncio.to_thread(self._end)
                    link.send(Answer(request.number, Done()))
                    return True
                self._keep(asyncio.create_task(self._answer(link, request)))
            return False
        finally:
            self._link = None
            await link.close()

    async def _answer(self, link: SupervisorLink, request: Request) -> None:
        try:
            body = await self._carry_out(request.body)
        except OSError as error:
            body = self._failed(error)
        except IngotError as error:
            body = Failed(str(error))
        except Exception as error:  # the supervisor must hear of it rather than wait
            body = Failed(f"internal error: {type(error).__name__}: {error}", "program")
        link.send(Answer(request.number, body))

    def _failed(self, error: OSError) -> Failed:
        """A full disk of this node is its own fault, that of the run folder the site's."""
        where = f": {error.filename}" if error.filename else ""
        is_site = error.errno in SITE_ERRORS and Path(str(error.filename)).is_relative_to(self.run_folder)
        return Failed(f"{error.strerror or error}{where}", "site" if is_site else "machine")

    async def _carry_out(self, body: Body) -> AnswerBody:
        now = time.time()
        match body:
            case CheckNode():
                return await self._check(now)
            case StartProbe(seconds=seconds):
                preflight = self._checks()
                preflight.start()
                return await asyncio.to_thread(preflight.ready, seconds)
            case AllReduce():
                return await asyncio.to_thread(self._checks().all_reduce, body)
            case EndProbe():
                if self._preflight is not None:
                    await asyncio.to_thread(self._preflight.end)
            case ReservePort():
                self._close_listener()
                self._listener = socket.create_server(("", 0), backlog=4096)
                return PortReserved(int(self._listener.getsockname()[1]))
            case ReportCopies():
                return await asyncio.to_thread(self._own_copies().report)
            case FetchCopies():
                await asyncio.to_thread(self._own_copies().fetch, body)
            case KeepCopies(node_rank=node_rank):
                await asyncio.to_thread(self._own_copies().keep, node_rank)
            case RunRanks():
                await self._run_ranks(body)
            case StopRanks(epoch=epoch):
                if self._ranks is not None and self._ranks.epoch == epoch:
                    self._ranks.stop()
            case Collect(epoch=epoch, is_hang=is_hang):
                return Collected(await self._collect(epoch, is_hang))
            case KillRanks():
                return RanksKilled(await self._kill())
            case Leave():  # answered where the connection ends
                pass
        return Done()

    def _keep(self, task: asyncio.Task[None]) -> None:
        """The loop itself holds only a weak reference."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- requests

    def _usable_spec(self) -> LaunchSpec:
        if self.spec is None:
            raise IngotError(self.problem)
        return self.spec

    def _enter(self) -> LaunchSpec:
        """Set the variables and the working directory of the ranks, once."""
        spec = self._usable_spec()
        if not self._has_entered:
            self.env = enter_environment(spec, self.env)
            self._has_entered = True
        return spec

    def _own_copies(self) -> NodeCopies:
        """The memory that keeps copies of the ranks' state."""
        if self._copies is None:
            spec = self._enter()
            job = JobIdentity(spec.run_folder, self.env.get(START_VARIABLE, ""), self.supervisor.token, node_name())
            self._copies = NodeCopies(job, spec.processes if spec.verb == "train" else 0)
        return self._copies

    def _checks(self) -> NodePreflight:
        spec = self._enter()
        if self._preflight is None:
            self._preflight = NodePreflight(spec, self.env)
        return self._preflight

    async def _check(self, now: float) -> NodeChecked | ProbeReady:
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                report = await asyncio.to_thread(self._checks().check)
        except TimeoutError:
            hangs = f"{self.run_folder} has not answered for {CHECK_SECONDS:g} s, or another disk that the checks read"
            return NodeChecked({"disk": hangs}, {}, now)
        except (IngotError, OSError) as error:
            return NodeChecked({"environment": str(error)}, {}, now)
        return NodeChecked(report.checks, report.common, now)

    async def _run_ranks(self, order: RunRanks) -> None:
        if self._ranks is not None:
            if self._ranks.epoch == order.epoch:
                return  # asked again, after the connection was lost
            if order.epoch < self._ranks.epoch:
                raise IngotError(f"epoch {order.epoch} is over: this node runs epoch {self._ranks.epoch}")
            await self._kill()
        spec = self._enter()
        if self._preflight is not None:  # its processes hold memory of the devices
            await asyncio.to_thread(self._preflight.end)
        copies = self._own_copies()
        await asyncio.to_thread(copies.begin, order)
        ranks = NodeRanks(spec, order, copies.environment(self.env))
        try:
            ranks.start(self._listener if order.node_rank == 0 else None)
        except BaseException:
            await asyncio.to_thread(ranks.close)
            raise
        finally:
            self._close_listener()
        self._ranks = ranks
        if order.node_rank == 0:
            self._keep(asyncio.create_task(asyncio.to_thread(prune_logs, ranks.group.plan.logs.parent)))

    async def _collect(self, epoch: int, is_hang: bool) -> NodeEvidence:
        if self._ranks is not None and self._ranks.epoch == epoch:
            return await asyncio.to_thread(self._ranks.evidence, is_hang)
        if self._last_evidence is not None and self._last_evidence[0] == epoch:
            return self._last_evidence[1]
        return NodeEvidence(node_name(), boot_id=boot_id())

    async def _kill(self) -> tuple[int, ...]:
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return ()
        left, evidence = await asyncio.to_thread(ranks.end)
        self._last_evidence = ranks.epoch, evidence
        return left

    def _end(self) -> None:
        """Leave nothing behind."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
        if self._preflight is not None:
            self._preflight.end()
        self._close_listener()
        if self._copies is not None:
            self._copies.close()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- reports

    def _signalled(self, number: int) -> None:
        self._signals.append(number)
        print(f"{node_name()}: {signal.Signals(number).name}; the supervisor decides", file=sys.stderr, flush=True)
        if self._link is not None:
            self._link.send(Signalled(number))

    async def _watch(self) -> None:
        """Look at the ranks, and report what is new."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            ranks = self._ranks
            if ranks is None:
                continue
            try:
                reports = ranks.look()
            except Exception as error:
                reports = ranks.failed_to_look(error)
            for report in reports:
                if self._link is not None:
                    self._link.send(report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", type=Path, required=True)
    options = parser.parse_args()
    token = os.environ.pop(TOKEN_VARIABLE, "")  # the ranks must not have it
    try:
        supervisor = SupervisorAddress.parse(os.environ.pop(ADDRESS_VARIABLE, ""), token)
        # not asyncio.run, which waits for threads: one may wait for a file system that does not answer
        return asyncio.new_event_loop().run_until_complete(ClusterAgent(options.spec, supervisor, os.environ).run())
    except SupervisorRefused as error:
        print(f"{node_name()}: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
