"""The supervisor of a job: one process, on the node that Slurm runs the job script on, that decides everything.

    Started -> Opened(epoch) -> staging, hello, preflight, starting, running ... -> Closed(cause) -> Judged -> next

It writes every step to `launch/state.jsonl` before it acts on it, so a requeue, the next job of a chain, or a start
after the death of this node continues the same story: what it finds open, it closes first. What follows from a cause is
decided by `judge`, a pure function of those records.

Not torchrun's elastic agent, for reasons that hold in torch 2.13 (`torch/distributed`, read again for this version):
- After a restart the ranks meet in the store of the attempt before: `elastic/rendezvous/dynamic_rendezvous.py` shares
  one store for the whole run unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and `rendezvous._create_c10d_store` adds no
  prefix per attempt, so they read addresses of dead peers.
- Restarts are a counter in the memory of each agent (`elastic/agent/server/api.py`, `_invoke_run`), which the next job
  does not know; a change of membership restarts everything and is not counted at all.
- An agent judges its own workers, by exit codes. Who failed first, over all nodes, nobody asks; and a hang nobody sees,
  since the file timer of `local_elastic_agent.py` watches only workers that set it themselves.
- The agent loads torch: seconds per node, gigabytes on a machine that only decides, and its crashes.
"""

import asyncio
import secrets
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.errors import EXIT_FAULT, EXIT_FINISHED, EXIT_GIVEN_UP, EXIT_USER_ERROR
from ingot.launch.messages import ADDRESS_VARIABLE, START_VARIABLE, TOKEN_VARIABLE, Leave
from ingot.launch.protocol import LaunchFolder
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.attempt import AttemptRun
from ingot.launch.supervisor.cluster import Cluster, LostNode, Share, Times, gone_nodes, say
from ingot.launch.supervisor.diagnose import diagnose_unfinished
from ingot.launch.supervisor.failure_log import record as record_failure
from ingot.launch.supervisor.history import attempts_before, read_history, was_started_again
from ingot.launch.supervisor.judge import Verdict, choose_nodes, judge, judge_start, launch_end
from ingot.launch.supervisor.progress import StopFlag, is_stop_there, progress_of, stop_reason_of, who_asked
from ingot.launch.supervisor.records import (
    FINAL_KINDS,
    Cause,
    Closed,
    Excluded,
    Kind,
    Launched,
    Opened,
    Phase,
    PhaseBegan,
    Started,
    StopRequested,
)
from ingot.launch.supervisor.server import AgentServer
from ingot.launch.supervisor.state_file import STATE, DiskThread, StateFile, Superseded, now, read_state
from ingot.training.runtime.run_files import FINISHED, STOP

RANK_PHASES = ("running", "evaluating", "saving")
RANK_PHASE_SECONDS = 10.0  # at least, between two records of what the ranks are doing
REQUEUE_SECONDS, REQUEUE_PAUSE = 3600.0, 10.0  # for a controller that does not answer


class Supervisor:
    """One start of a job."""

    def __init__(
        self,
        spec: LaunchSpec,
        cluster: Cluster,
        times: Times | None = None,
        share: Share | None = None,
        token: str = "",
        port: int = 0,
    ):
        """token, port: what agents that the cluster starts by itself have been told; otherwise, new ones"""
        self.token, self.port = token or secrets.token_hex(32), port
        self.spec, self.cluster, self.times, self.share = spec, cluster, times or Times(), share
        self.run_folder = Path(spec.run_folder)
        self.launch = LaunchFolder(self.run_folder)
        self.folder = self.launch.path if share is None else self.launch.path / "shares" / share.name
        self.stop = StopFlag()
        self.start = f"{cluster.job}.{cluster.restart}"
        self.number, self.ended_epoch = 0, 0
        self.staged = spec.stage is None
        self.fatal: Superseded | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stop_note: asyncio.Task[None] | None = None
        self.disk, self._rank_phase_at = DiskThread(self.times.disk), float("-inf")
        self._pending_phase: PhaseBegan | None = None

    async def run(self) -> int:
        """Returns the exit code of the job."""
        self.state = await self.disk.do(lambda: StateFile(self.folder))
        if why := await self.disk.do(self._nothing_to_do):
            say(f"nothing to do: {why}")
            return EXIT_FINISHED
        nodes = await self.cluster.nodes()
        if (before := attempts_before(self.state.records, self.cluster.job, self.cluster.restart)) is not None:
            await self.cluster.end_earlier_steps()
            self.number = before
        self.server = AgentServer(self.spec.run_folder, f"{self.start}.0", self.token, nodes)
        self.server.on_signal = self._agent_signalled
        address = f"{self.cluster.host}:{await self.server.listen(port=self.port)}"
        await self.cluster.start_deputy(nodes, address)
        self.env = {ADDRESS_VARIABLE: address, TOKEN_VARIABLE: self.server.token, START_VARIABLE: self.server.start}
        self._listen_to_signals()
        try:
            return await self._lead(nodes)
        except Superseded as error:
            say(str(error))
            await self.cluster.abandon_steps()
            return EXIT_FAULT
        finally:
            watch = [self._watch] if self._watch is not None else []
            for task in watch:
                task.cancel()
            leave = self.server.request_all(dict.fromkeys(list(self.server.links), Leave()), self.times.leave)
            await asyncio.gather(leave, *watch, return_exceptions=True)
            await self.server.close()
            await self.cluster.end_agents()

    async def _lead(self, nodes: list[str]) -> int:
        await self._begin()
        found = await self._close_what_is_open()
        if found is not None and found.judged.action in ("halt", "finish"):
            return await self._act(found)
        step = await self._progress()
        await self._add(Started(time=now(), launch=self.launch_id, job=self.cluster.job, restart=self.cluster.restart,
                                host=self.cluster.host, nodes=tuple(nodes), step=step))  # fmt: skip
        self._watch = asyncio.ensure_future(self._watch_stop_file())
        await self._leave_out_lost_nodes(nodes)
        verdict = judge_start(self.state.records, now(), self.spec.run_folder)
        if verdict is not None:
            if launch_end(read_history(self.state.records)) is None:
                await self._record(verdict)
            return await self._act(verdict)
        while True:
            verdict = await self._attempt()
            if verdict.judged.action not in ("restart", "swap", "wait"):
                return await self._act(verdict)
            await self._pause(verdict.judged.wait_seconds)

    @property
    def launch_id(self) -> str:
        launched = read_history(self.state.records).launched
        return launched.launch if launched else ""

    async def _begin(self) -> None:
        """A launch by an earlier version, or a share of a preparation, has no record of it."""
        launched = read_history(self.state.records).launched
        whole = None
        if self.share is not None:  # the whole preparation's record is in the folder above
            whole = await self.disk.do(lambda: read_history(read_state(self.launch.path / STATE)).launched)
        launch = whole.launch if whole is not None else self.cluster.job
        if launched is None or (self.share is not None and launched.launch != launch):
            spec, nodes = self.spec, self.spec.nodes if self.share is None else 1
            await self._add(Launched(time=now(), launch=launch, back_end="slurm", nodes=nodes, spares=spec.spares,
                                     chain=spec.chain, run=spec.run_folder))  # fmt: skip

    def _nothing_to_do(self) -> str:
        for path in (self.run_folder / FINISHED, self.run_folder / STOP):
            if path.exists():
                return f"{path} is there"
        if was_started_again(self.state.records, self.cluster.job, self.cluster.restart):  # on other nodes
            return f"job {self.cluster.job} has been started again since"
        halted = self.launch.halted()
        return "" if halted is None else f"the launch was halted: {halted}"

    # --- attempts

    async def _attempt(self) -> Verdict:
        nodes = choose_nodes(self.state.records)
        epochs = [r.epoch for r in self.state.records if isinstance(r, Opened)]
        first = max(epochs, default=0) + 1
        epoch = await self.disk.do(lambda: self.state.claim_epoch(first), default=first)
        self.number += 1
        step = await self._progress()
        opened = Opened(time=now(), epoch=epoch, attempt=f"{self.start}.{self.number}", nodes=nodes, step=step)
        await self._add(opened)
        say(f"attempt {opened.attempt} on {','.join(nodes)}")
        usable = read_history(self.state.records).usable_nodes()
        spares = [node for node in usable if node not in nodes]
        share = (self.share.number, self.share.count) if self.share is not None else None
        attempt = AttemptRun(
            opened, self.spec, self.server, self.cluster, self.stop, self._note_phase, self.times, share
        )
        attempt.on_lost_spare, attempt.ended_epoch = self._leave_out, self.ended_epoch
        cause = await self._stage(nodes, spares)
        if cause is None:
            self.server.nodes = frozenset((*nodes, *spares, *self.server.nodes))
            cause = await attempt.run(spares, self.env)
        self.ended_epoch = attempt.ended_epoch
        for line in attempt.notes:
            say(f"preflight: {line}")
        return await self._close(opened, cause, attempt)

    async def _stage(self, nodes: tuple[str, ...], spares: list[str]) -> Cause | None:
        if self.staged:
            return None
        self._note_phase("staging", "")
        failed = await self.cluster.stage()
        where = f"cannot copy {self.spec.image} to {self.spec.stage}"
        bad = [node for node in nodes if node in failed]
        if bad and len(bad) == len(nodes) and all(node in failed for node in spares) and len(nodes) + len(spares) > 1:
            return Cause("user", f"{where} on any node: {failed[bad[0]]}")
        self.staged = True
        for node in [node for node in failed if node not in bad]:
            await self._add(Excluded(time=now(), node=node, reason=f"{where}: {failed[node]}"))
        if not bad:
            return None
        kind: Kind = "machine" if len(nodes) + len(spares) > 1 else "site"  # one vote decides nothing
        return Cause(kind, f"{bad[0]}: {where}: {failed[bad[0]]}", bad[0], is_local=True, bad_nodes=tuple(bad[1:]))

    async def _close(self, opened: Opened, cause: Cause, attempt: AttemptRun | None = None) -> Verdict:
        """Write down how an attempt ended, and judge it."""
        self._pending_phase = None
        step = await self._progress(opened.step)
        if cause.kind == "stopped" and self.stop.reason is None and attempt is not None:
            with suppress(TimeoutError):
                if (said := await self.disk.do(lambda: stop_reason_of(self.run_folder))) is not None:
                    self._note_signal(said[1]) if said[0] == "signal" else self.stop.set(*said)
        await self.stop.settled()
        await self._note_stop()
        await self._add(Closed(time=now(), epoch=opened.epoch, cause=cause, step=step,
                               reached_step=attempt is not None and attempt.reached_step))  # fmt: skip
        say(f"attempt {opened.attempt} ended: {cause.kind}" + (f": {cause.message}" if cause.message else ""))
        if cause.kind not in ("finished", "stopped"):
            await self._log_failure(opened, cause, step > opened.step)
        for node, reason in (attempt.unfit_spares if attempt is not None else {}).items():
            await self._add(Excluded(time=now(), node=node, reason=reason))
        if attempt is not None:
            await self._leave_out_lost_nodes(read_history(self.state.records).usable_nodes())
        verdict = judge(self.state.records, now(), self.spec.run_folder)
        await self._record(verdict)
        if verdict.judged.action == "wait":  # nothing else may reach people while the disk is full
            await self.cluster.comment(f"ingot: {verdict.judged.reason}: {cause.message}")
        return verdict

    async def _close_what_is_open(self) -> Verdict | None:
        """An attempt whose supervisor could not close or judge it: it died with its node, or was killed."""
        history = read_history(self.state.records)
        if history.open is None:
            judged = max((j.epoch for j in history.judgments), default=0)
            if history.attempts and history.attempts[-1].closed.epoch > judged:
                verdict = judge(self.state.records, now(), self.spec.run_folder)
                await self._record(verdict)
                return verdict
            return None
        last = history.starts[-1] if history.starts else None
        down, back = await gone_nodes(self.cluster, last, history.open.nodes)
        cause = diagnose_unfinished(history, down, back)
        return await self._close(history.open, cause)

    async def _leave_out_lost_nodes(self, nodes: list[str]) -> None:
        known = read_history(self.state.records).excluded
        for item in await self.cluster.lost_nodes(nodes):
            if item.node not in known:
                await self._leave_out(item)

    async def _leave_out(self, item: LostNode) -> None:
        await self._add(Excluded(time=now(), node=item.node, reason=item.reason, is_drained=item.is_drained))

    # --- ends

    async def _act(self, verdict: Verdict) -> int:
        judged = verdict.judged
        say(text := f"{judged.action}: {judged.reason}" + (f"; {judged.advice}" if judged.advice else ""))
        await self.cluster.comment(f"ingot: {text}")
        if judged.action == "finish" and self.share is not None and self.share.name == "last":
            await self.disk.try_to((self.run_folder / FINISHED).touch)
        if judged.action in ("finish", "stop"):
            return EXIT_FINISHED
        if judged.action == "halt":
            await self.disk.try_to(lambda: self.launch.halt(judged.reason))
            attempts = read_history(self.state.records).attempts
            final = attempts and attempts[-1].cause.kind in FINAL_KINDS
            return EXIT_USER_ERROR if final else EXIT_GIVEN_UP
        return await self._requeue()

    async def _requeue(self) -> int:
        code, waited = EXIT_FINISHED if self.stop.reason in ("time-limit", "preempt") else EXIT_FAULT, 0.0
        out = list(read_history(self.state.records).excluded)
        if await self.cluster.hand_over(out):
            return code
        while not await self.cluster.requeue(out):
            if waited >= REQUEUE_SECONDS or await self.cluster.is_answering():
                say("the cluster refuses to queue the job again; `ingot launch resume` continues")
                return EXIT_FAULT
            await asyncio.sleep(REQUEUE_PAUSE)
            waited += REQUEUE_PAUSE
        return code

    # --- stops

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread: a test
            loop.add_signal_handler(signal.SIGUSR2, lambda: self.stop.set("time-limit", "SIGUSR2"))
            loop.add_signal_handler(signal.SIGTERM, self._terminated)
            loop.add_signal_handler(signal.SIGINT, lambda: self.stop.set("signal", "SIGINT"))

    def _agent_signalled(self, node: str, number: int) -> None:
        self._note_signal(f"signal {number} to the agent of {node}")

    def _terminated(self) -> None:
        if self.stop.reason is None:
            self._note_signal("SIGTERM")
        else:
            self.stop.terminate()

    def _note_signal(self, detail: str) -> None:
        if self.stop.signal is None and self.stop.reason is None:
            self.stop.signal = asyncio.ensure_future(self._interpret_signal(detail))

    async def _interpret_signal(self, detail: str) -> None:
        """Slurm ends a job by a signal, too, when it has lost one of its nodes: nobody has asked for a stop."""
        if lost := await self.cluster.ended_for(read_history(self.state.records).allocation):
            self.stop.lose({item.node: item.reason for item in lost})
            self.server.hang_up([item.node for item in lost])
        else:
            self.stop.set("signal", detail)

    async def _watch_stop_file(self) -> None:
        while True:
            self._write_phase(False)
            if self.stop.event.is_set():
                await self._note_stop()
                await asyncio.sleep(self.times.poll)
                continue
            if await self.disk.do(lambda: is_stop_there(self.run_folder), default=False):
                self.stop.set("user", await self.disk.do(lambda: who_asked(self.run_folder), default=STOP))
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self.times.poll):
                    await self.stop.event.wait()

    async def _note_stop(self) -> None:
        """The request is a record before anything follows from it."""
        if self.stop.reason is not None:
            self._stop_note = self._stop_note or asyncio.ensure_future(self._add_stop())
            await asyncio.shield(self._stop_note)

    async def _add_stop(self) -> None:
        assert self.stop.reason is not None
        if self.stop.reason == "signal":
            self.stop.reason = await self.cluster.signal_reason()
        await self._add(StopRequested(time=now(), reason=self.stop.reason, detail=self.stop.detail))

    async def _pause(self, seconds: float) -> None:
        if seconds:
            self._note_phase("waiting", f"{seconds:.0f} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.stop.event.wait()

    # --- records

    async def _record(self, verdict: Verdict) -> None:
        for excluded in verdict.exclude:
            await self._add(excluded)
            say(f"{excluded.node} is left out: {excluded.reason}")
        await self._add(verdict.judged)

    async def _add(self, record: Any) -> None:
        if self.fatal is not None:
            raise self.fatal
        self.state.add(record)
        if not await self.disk.do(self.state.flush, default=False):
            say(f"cannot write {self.state.path}: {type(record).__name__} is kept in memory")

    def _note_phase(self, phase: Phase, detail: str, copied: int = 0) -> None:
        history = read_history(self.state.records)
        epoch = history.open.epoch if history.open is not None else 0
        self._pending_phase = PhaseBegan(time=now(), epoch=epoch, phase=phase, detail=detail, copied=copied)
        self._write_phase(phase not in RANK_PHASES)

    def _write_phase(self, at_once: bool) -> None:
        """What the ranks do changes with every save: it is written down every ten seconds at most."""
        clock = asyncio.get_running_loop().time()
        if self._pending_phase is None or (not at_once and clock - self._rank_phase_at < RANK_PHASE_SECONDS):
            return
        self._rank_phase_at = float("-inf") if at_once else clock
        self.state.add(self._pending_phase)
        self._pending_phase = None
        self.disk.submit(self._flush)

    def _flush(self) -> None:
        try:
            self.state.flush()
        except Superseded as error:
            self.fatal = error

    async def _progress(self, before: int = 0) -> int:
        try:
            return max(before, await self.disk.do(lambda: progress_of(self.run_folder, self.spec.verb)))
        except (OSError, TimeoutError):
            return before

    async def _log_failure(self, opened: Opened, cause: Cause, progress: bool) -> None:
        await self.disk.try_to(lambda: record_failure(
            self.run_folder, attempt=opened.attempt, rank=cause.rank, batch=cause.batch, kind=cause.kind,
            message=cause.message, progress=progress, host=cause.node,
        ))  # fmt: skip
