"""The supervisor against light agents: every fault ends as it should, in bounded time, with the right culprit."""

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from light_agents import LightAgent, LightCluster, lose_peer
from specs import spec
from state_records import StateRecords
from waiting import until

from ingot.launch import messages
from ingot.launch.messages import RankProgress, RanksEnded, RunRanks, Signalled
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor import judge
from ingot.launch.supervisor.cluster import LostNode, Times
from ingot.launch.supervisor.records import (
    Closed,
    Excluded,
    Judged,
    Launched,
    Opened,
    PhaseBegan,
    Started,
    StopRequested,
)
from ingot.launch.supervisor.state_file import StateFile, now, read_state
from ingot.launch.supervisor.supervise import Share, Supervisor

NODES = ("n1", "n2", "n3")
TIMES = Times(hello=1.0, hello_image=1.0, hello_grace=0.2, reserve=1.0, start=1.0, settle=0.1, collect=2.0, teardown=2.0,
              apart=0.1, reconnect=0.5, stop=1.0, poll=0.05, leave=0.5, disk=2.0)  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> "Job":
    return Job(tmp_path / "run")


class Job(StateRecords):
    """A run of two nodes and a spare, and the starts of its job."""

    def __init__(self, run: Path, nodes: int = 2, spares: int = 1, **changes: Any):
        run.mkdir(parents=True, exist_ok=True)
        self.folder = run
        self.spec: LaunchSpec = spec(run_folder=str(run), workdir=str(run), nodes=nodes, spares=spares, image=None,
                                     **changes)  # fmt: skip
        self.cluster = LightCluster(NODES[: nodes + spares], str(run))
        self.steps, self.times = 0, TIMES

    def launch(self) -> "Job":
        state = StateFile(self.folder / "launch")
        state.append(Launched(time=now(), launch=f"L{len(state.records)}", back_end="slurm", nodes=self.spec.nodes,
                              spares=self.spec.spares))  # fmt: skip
        return self

    def start(
        self, during: Callable[["Job"], Any] | None = None, share: Share | None = None, seconds: float = 20
    ) -> int:
        self.supervisor = Supervisor(self.spec, self.cluster, self.times, share)

        async def lead() -> int:
            helper = asyncio.ensure_future(during(self)) if during is not None else None
            try:
                return await asyncio.wait_for(self.supervisor.run(), seconds)
            finally:
                if helper is not None:
                    helper.cancel()

        begin = time.monotonic()
        try:
            return asyncio.run(lead())
        finally:
            self.seconds = time.monotonic() - begin

    def again(self) -> int:
        """Slurm starts the job again, on nodes that it is not told to leave out."""
        out = self.cluster.requeued[-1] if self.cluster.requeued else []
        before = self.cluster
        self.cluster = LightCluster([n for n in (*NODES, "n4", "n5") if n not in out][: len(before.names)],
                                    str(self.folder), before.restart + 1)  # fmt: skip
        self.cluster.behaviors, self.cluster.staging = before.behaviors, before.staging
        return self.start()

    def phases(self) -> list[str]:
        return [record.phase for record in self.of(PhaseBegan)]

    def checkpoint(self, step: int) -> None:
        path = self.folder / "checkpoints" / str(step)
        path.mkdir(parents=True, exist_ok=True)
        (path / "manifest.json").write_text("{}")


def once(fault: Callable[[LightAgent, RunRanks], Any]) -> Callable[[LightAgent, RunRanks], Any]:
    return lambda agent, body: fault(agent, body) if body.epoch == 1 else None


def test_a_run_that_goes_well(job: Job) -> None:
    assert job.launch().start() == 0
    assert job.causes == [("finished", "")] and job.actions == ["finish"] and job.nodes == [("n1", "n2")]
    phases = [record.phase for record in job.records if type(record).__name__ == "PhaseBegan"]
    assert phases == ["hello", "preflight", "starting", "running"]
    assert job.cluster.comments[-1].startswith("ingot: finish")
    assert [agent.seen[-1] for agent in job.cluster.all_agents] == ["Leave"] * 3
    (started,) = job.of(Started)
    assert (started.job, started.restart, started.nodes) == ("7", 0, NODES)


def test_a_second_start_finds_nothing_to_do(job: Job) -> None:
    assert job.launch().start() == 0
    assert job.again() == 0 and len(job.of(Opened)) == 1


def test_the_node_of_the_error_is_named_though_others_report_first(job: Job) -> None:
    job.cluster.of("n1").fault = once(lose_peer)

    async def late(agent: LightAgent, body: RunRanks) -> Any:
        await asyncio.sleep(0.02)
        return agent.fail("internal error: KeyError: 'x'") if body.epoch == 1 else None

    job.cluster.of("n2").fault = late
    assert job.launch().start() == 0
    assert job.causes == [("program", "n2"), ("finished", "")] and job.actions == ["restart", "finish"]
    assert job.nodes == [("n1", "n2")] * 2
    (line,) = (json.loads(text) for text in (job.folder / "failures.jsonl").read_text().splitlines())
    assert (line["host"], line["attempt"], line["kind"]) == ("n2", "7.0.1", "program")


def test_ranks_of_a_failed_attempt_are_killed_before_the_next_starts(job: Job) -> None:
    job.cluster.of("n2").fault = once(lambda agent, body: agent.fail("boom"))
    job.cluster.of("n1").fault = once(lambda agent, body: asyncio.sleep(60))
    assert job.launch().start() == 0
    for node in ("n1", "n2"):
        seen = job.cluster.agents[node].seen
        assert seen.index("KillRanks") < [i for i, name in enumerate(seen) if name == "RunRanks"][1]
    assert len(job.cluster.all_agents) == 3, "an agent lives over attempts"


def test_a_device_error_swaps_the_node_for_the_warm_spare(job: Job) -> None:
    job.cluster.of("n2").fault = lambda agent, body: agent.fail("CUDA error: uncorrectable ECC error encountered")
    job.cluster.of("n1").fault = once(lose_peer)
    assert job.launch().start() == 0
    assert job.causes[0] == ("device", "n2") and job.nodes[1] == ("n1", "n3")
    assert judge.strikes(job.records) == {"n2": 1} and len(job.cluster.all_agents) == 3


def test_without_a_spare_the_job_is_queued_without_the_node_and_goes_on(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", spares=0)
    job.cluster.of("n2").fault = lambda agent, body: agent.fail("Xid 79: GPU has fallen off the bus")
    assert job.launch().start() == 1 and job.cluster.requeued == [["n2"]]
    assert job.again() == 0 and job.nodes[-1] == ("n1", "n3")


def test_a_wrong_token_is_refused_and_the_node_left_out(job: Job) -> None:
    job.cluster.of("n2").token = "guessed"
    assert job.launch().start() == 0
    assert job.causes[0] == ("silent", "n2") and job.nodes[1] == ("n1", "n3")
    assert any("does not know the job's token" in reason for reason in job.supervisor.server.refused)
    assert "guessed" not in (job.folder / "launch" / "state.jsonl").read_text()


@pytest.mark.parametrize("line", [b"", b"\n", b"GET / HTTP/1.1\r\n", b"\xff\x00", b"{}\n", b"x" * 100_000])
def test_strangers_on_the_port_disturb_nobody(job: Job, line: bytes) -> None:
    async def knock(job: Job) -> None:
        await until(lambda: hasattr(job.supervisor, "env"))
        for _ in range(20):
            port = int(job.supervisor.env[messages.ADDRESS_VARIABLE].rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(line)
            writer.close()

    assert job.launch().start(knock) == 0 and job.causes == [("finished", "")]


def test_the_token_is_never_written_down(job: Job) -> None:
    job.launch().start()
    token = job.supervisor.server.token
    assert len(token) == 64
    assert not any(
        token in path.read_text() for path in job.folder.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20
    )


def test_an_agent_that_ends_at_once_is_left_out_without_waiting(job: Job) -> None:
    """P3, U1."""
    job.cluster.of("n2").never_starts = "execve(): python3: No such file or directory"
    assert job.launch().start() == 0
    closed = job.of(Closed)[0]
    assert (closed.cause.kind, closed.cause.node) == ("silent", "n2") and "No such file" in closed.cause.message
    assert job.nodes[1] == ("n1", "n3") and job.seconds < TIMES.hello + 1


def test_an_agent_that_never_comes_is_left_out_after_a_while(job: Job) -> None:
    job.cluster.of("n1").hangs_at_start = True
    assert job.launch().start() == 0
    assert job.causes[0] == ("silent", "n1") and job.nodes[1] == ("n3", "n2")


def test_no_agent_at_all_is_three_attempts_and_an_end_that_says_why(job: Job) -> None:
    for node in NODES:
        job.cluster.of(node).never_starts = "exit code 2"
    assert job.launch().start() == 3
    assert job.causes == [("silent", "")] * 3 and "exit code 2" in job.of(Judged)[-1].reason
    assert not job.of(Excluded)


def test_a_silent_controller_is_the_sites_and_is_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1."""
    monkeypatch.setattr(judge, "SITE_FIRST_SECONDS", 0.05)
    for node in NODES:
        job.cluster.of(node).never_starts = "Unable to contact slurm controller"
    job.cluster.answers = False

    async def repair(job: Job) -> None:
        await until(lambda: len(job.of(Closed)) == 2)
        for node in NODES:
            job.cluster.of(node).never_starts = ""
        job.cluster.answers = True

    assert job.launch().start(repair) == 0
    assert job.causes[0] == ("site", "") and job.actions[:2] == ["wait", "wait"] and not job.of(Excluded)


def test_a_lost_agent_is_waited_for_and_its_node_replaced(job: Job) -> None:
    """L4."""
    job.cluster.of("n2").fault = lambda agent, body: agent.die()
    job.cluster.of("n1").fault = once(lose_peer)
    assert job.launch().start() == 0
    assert job.causes[0] == ("lost", "n2") and job.nodes[1] == ("n1", "n3") and judge.strikes(job.records) == {}


def test_the_node_whose_agent_went_first_is_the_one(job: Job) -> None:
    """P1: a node dies and is back at once, on which srun ends the agents of the others."""

    async def soon(agent: LightAgent, body: RunRanks) -> Any:
        await asyncio.sleep(0.25)
        return agent.die() if body.epoch == 1 else None

    job.cluster.of("n1").fault = soon
    job.cluster.of("n2").fault = lambda agent, body: agent.die()
    assert job.launch().start() == 0
    assert job.causes[0] == ("lost", "n2") and job.nodes[1] == ("n1", "n3")


def test_a_lost_agent_without_a_spare_is_started_again_on_its_node(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", spares=0)
    job.cluster.of("n2").fault = once(lambda agent, body: agent.die())
    assert job.launch().start() == 0
    assert job.causes == [("lost", "n2"), ("finished", "")] and job.nodes == [("n1", "n2")] * 2
    assert [agent.node for agent in job.cluster.all_agents].count("n2") == 2


def test_a_node_that_the_cluster_has_lost_is_struck(job: Job) -> None:
    """P2."""
    job.cluster.lost = [LostNode("n2", "down*: Not responding")]
    job.cluster.of("n2").fault = lambda agent, body: agent.die()
    job.cluster.of("n1").fault = lambda agent, body: asyncio.sleep(60) if body.epoch == 1 else None
    job.cluster.lost = []

    async def down(job: Job) -> None:
        await until(lambda: "n2" in job.cluster.agents and job.cluster.agents["n2"].epoch)
        job.cluster.lost = [LostNode("n2", "down*: Not responding")]

    assert job.launch().start(down) == 0
    assert job.causes[0] == ("lost", "n2") and judge.strikes(job.records) == {"n2": 1}


def test_a_drained_node_is_replaced_and_not_blamed(job: Job) -> None:
    """C2."""
    job.cluster.of("n2").fault = once(lambda agent, body: agent.fail("boom"))

    async def drain(job: Job) -> None:
        await until(lambda: "n1" in job.cluster.agents and job.cluster.agents["n1"].epoch)
        job.cluster.lost = [LostNode("n1", "maintenance", is_drained=True)]

    assert job.launch().start(drain) == 0
    (out,) = job.of(Excluded)
    assert (out.node, out.is_drained) == ("n1", True) and job.nodes[1] == ("n3", "n2")
    assert judge.strikes(job.records) == {}


def test_the_node_that_hangs_is_named_by_all_nodes_evidence(job: Job) -> None:
    """H2: the first to report sees only that all its ranks wait."""
    job.cluster.of("n1").fault = once(lambda agent, body: agent.wait())
    job.cluster.of("n2").fault = once(lambda agent, body: agent.wait(where="", in_torch=False))
    assert job.launch().start() == 0
    assert job.causes[0] == ("hang", "n2") and not job.of(Excluded)


def test_a_stopped_process_is_the_nodes(job: Job) -> None:
    """H1."""
    job.cluster.of("n1").fault = once(lambda agent, body: agent.wait(where="train.py:3", in_torch=False))
    job.cluster.of("n2").fault = once(lambda agent, body: agent.wait(process_state="T"))
    assert job.launch().start() == 0 and job.causes[0] == ("hang", "n2")


def test_ranks_in_state_d_are_recorded_and_left_behind(job: Job) -> None:
    """H5, at the seam of the agent: what cannot be killed is told, and does not keep the others."""
    job.cluster.of("n2").fault = lambda agent, body: agent.wait(process_state="D", where="")
    job.cluster.of("n2").left = (1,)
    job.cluster.of("n1").fault = once(lambda agent, body: agent.wait())
    assert job.launch().start() == 0
    assert job.causes[0] == ("hang", "n2") and "state D" in job.of(Closed)[0].cause.message
    assert job.nodes[1] == ("n1", "n3") and judge.strikes(job.records) == {"n2": 1}


@pytest.mark.parametrize("body", [messages.CheckNode, messages.RunRanks, messages.Collect, messages.KillRanks])
def test_an_agent_that_stops_answering_delays_nobody_for_long(
    job: Job, body: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.launch.supervisor.node_tests.CHECK_SECONDS", 0.3)
    monkeypatch.setattr("ingot.launch.supervisor.node_tests.ANSWER_SECONDS", 0.1)
    job.cluster.of("n2").silent_from = body
    job.cluster.of("n1").fault = once(lambda agent, b: agent.fail("boom"))
    code = job.launch().start()
    assert (code == 0 and ("n1", "n3") in job.nodes) or body in (messages.Collect, messages.KillRanks)
    assert job.seconds < 10


def test_a_full_run_folder_is_the_sites_and_every_end_is_told_elsewhere(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1f, I9: nothing can be written; the cause reaches the operator by the job's comment, and no node is blamed."""
    for name in ("SITE_FIRST_SECONDS", "SITE_TOTAL_SECONDS"):
        monkeypatch.setattr(judge, name, 0.05)
    full = "No space left on device"

    def fill(agent: LightAgent, body: RunRanks) -> str:
        agent.fail("", "machine")
        agent.evidence = messages.NodeEvidence(agent.node, agent.evidence.ranks, site=full)
        return "over"

    job.cluster.everywhere(fill)
    job.launch()
    plain, path = os.pwrite, job.folder / "launch" / "state.jsonl"

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            raise OSError(errno.ENOSPC, full)
        return plain(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert job.start() == 3
    assert "halt" in job.cluster.comments[-1] and full in job.cluster.comments[-1]
    kept = job.supervisor.state.records
    assert [r.cause.kind for r in kept if isinstance(r, Closed)] == ["site"] * 2 and not job.of(Closed)
    assert not [r for r in kept if isinstance(r, Excluded)]


def test_a_damaged_state_file_is_one_sentence_and_nothing_starts(job: Job) -> None:
    (job.folder / "launch").mkdir()
    (job.folder / "launch" / "state.jsonl").write_text("something else\n")
    with pytest.raises(Exception, match="line 1 is not a record"):
        job.start()
    assert not job.cluster.all_agents


def stop_when(job: Job, phase: str) -> Callable[[Job], Any]:
    async def stop(job: Job) -> None:
        await until(
            lambda: any(getattr(r, "phase", "") == phase for r in job.supervisor.__dict__.get("state", job).records)
        )
        (job.folder / "STOP").touch()

    return stop


@pytest.mark.parametrize("phase", ["hello", "preflight", "starting", "running", "waiting"])
def test_a_stop_in_any_phase_is_a_record_and_ends_the_launch(
    job: Job, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1, I5."""
    job.cluster.seconds = 60
    if phase == "hello":
        job.cluster.of("n2").hangs_at_start = True
    elif phase == "preflight":
        job.cluster.of("n2").silent_from = messages.CheckNode
    elif phase == "starting":
        job.cluster.of("n1").silent_from = messages.ReservePort
    elif phase == "waiting":
        monkeypatch.setattr(judge, "BACK_OFF_SECONDS", (30.0,) * 3)
        job.cluster.of("n2").fault = lambda agent, body: agent.fail("boom")
    assert job.launch().start(stop_when(job, phase)) == 0
    assert [record.reason for record in job.of(StopRequested)] == ["user"]
    assert job.actions[-1] == "stop" and job.seconds < 10
    assert (job.folder / "STOP").exists(), "nobody but the user removes it"
    opened = len(job.of(Opened))
    assert job.again() == 0 and len(job.of(Opened)) == opened
    (job.folder / "STOP").unlink()
    assert job.again() == 0 and len(job.of(Opened)) == opened, "the stop is a fact of this launch"
    job.launch().cluster.behaviors.clear()
    assert job.again() == 0 and job.causes[-1] == ("finished", "")


def test_a_time_limit_before_the_first_checkpoint_ends_it(job: Job) -> None:
    """L2: not one more start."""

    async def limit(job: Job) -> None:
        await until(lambda: "n1" in job.cluster.agents and job.cluster.agents["n1"].epoch)
        job.supervisor.stop.set("time-limit", "SIGUSR2")

    job.cluster.seconds = 60
    assert job.launch().start(limit) == 3 and job.cluster.requeued == []
    assert "shorter than start-up, a step and a save" in job.of(Judged)[-1].reason
    assert (job.folder / "launch" / "HALT").exists()


@pytest.mark.parametrize("successor", [False, True])
def test_a_time_limit_after_a_checkpoint_continues_in_the_next_job(job: Job, successor: bool) -> None:
    async def limit(job: Job) -> None:
        await until(lambda: "n1" in job.cluster.agents and job.cluster.agents["n1"].epoch)
        job.checkpoint(5)
        job.supervisor.stop.set("time-limit", "SIGUSR2")

    job.cluster.seconds = 60
    job.cluster.successor = successor
    assert job.launch().start(limit) == 0
    assert (job.cluster.requeued, job.cluster.handed_over) == (([], [[]]) if successor else ([[]], []))
    assert job.again() == 0 and job.causes[-1] == ("finished", "")


def test_a_run_that_stops_by_itself_for_its_wall_time_is_not_queued_again(job: Job) -> None:
    """L5."""

    def over(agent: LightAgent, body: RunRanks) -> str:
        (job.folder / "stopped.json").write_text(
            json.dumps({"reason": "max_wall_time is over", "batch": 3, "total": 9})
        )
        agent.end(75)
        return "over"

    job.cluster.everywhere(over)
    assert job.launch().start() == 0 and job.cluster.requeued == []
    assert [record.reason for record in job.of(StopRequested)] == ["wall-time"] and job.actions == ["stop"]
    assert job.again() == 0 and len(job.of(Opened)) == 1


def test_exit_code_75_without_a_reason_is_a_failure(job: Job) -> None:
    """I4."""
    job.cluster.everywhere(once(lambda agent, body: agent.end(75) or "over"))
    assert job.launch().start() == 0
    assert job.actions == ["restart", "finish"] and not job.of(StopRequested)


@pytest.mark.parametrize("moment", ["preflight", "running"])
def test_a_preempted_job_goes_back_into_the_queue_whenever_the_signal_comes(job: Job, moment: str) -> None:
    """The signal goes to the agents, and ends what measures the nodes, too."""
    job.cluster.signal_means = "preempt"

    def preempt(agent: LightAgent, body: Any) -> Any:
        agent.say(Signalled(15))
        return asyncio.sleep(60)

    if moment == "running":
        job.cluster.everywhere(preempt)
    else:
        job.cluster.of("n2").on_check = lambda agent: (agent.say(Signalled(15)), {"torch": "exit code -15"})[1]
    assert job.launch().start() == 0
    assert job.actions == ["requeue"] and job.cluster.requeued == [[]]
    assert [record.reason for record in job.of(StopRequested)] == ["preempt"] and not job.of(Excluded)
    job.cluster.behaviors.clear()
    assert job.again() == 0 and job.causes[-1] == ("finished", "")


@pytest.mark.parametrize("harm", ["memory", "down", "everywhere"])
def test_a_spare_is_tested_again_while_it_waits_and_left_out_before_it_is_used(job: Job, harm: str) -> None:
    job.times = replace(TIMES, recheck=0.3)
    job.cluster.seconds = 1.5
    broken = {"disk": "n3: /tmp has 0.00 GB free"}

    def break_spare(agent: LightAgent, body: RunRanks) -> Any:
        if body.epoch > 1:
            return None
        if harm == "down":
            job.cluster.lost.append(LostNode("n3", "down: no power"))
        else:
            job.cluster.of("n3").checks = broken
        if harm == "everywhere":
            job.cluster.of("n1").checks = {"disk": "n1: /runs has 0.00 GB free"}
        return None

    job.cluster.of("n1").fault = break_spare
    assert job.launch().start() == 0 and job.causes == [("finished", "")]
    out = [(record.node, record.reason) for record in job.of(Excluded)]
    expected = {"memory": [("n3", broken["disk"])], "down": [("n3", "down: no power")], "everywhere": []}
    assert out == expected[harm]
    closed = next(number for number, record in enumerate(job.records) if isinstance(record, Closed))
    assert all(number < closed for number, record in enumerate(job.records) if isinstance(record, Excluded))


def test_the_ranks_know_which_attempt_has_ended_for_certain(job: Job) -> None:
    """Then the next first rank, on another node, does not wait for the last one to give up."""
    orders: list[RunRanks] = []

    def note(agent: LightAgent, body: RunRanks) -> Any:
        orders.append(body)
        return agent.fail("Xid 79: fallen off the bus", "device") if agent.node == "n1" else None

    def vanish(agent: LightAgent, body: RunRanks) -> Any:
        orders.append(body)
        return agent.die() if body.epoch == 2 else None

    job.cluster.everywhere(note)
    job.cluster.of("n3").fault = vanish
    job.launch().start()
    first = {order.epoch: order.ended_epoch for order in orders if order.node_rank == 0}
    assert first[1] == 0 and first[2] == 1
    assert 2 not in first.values(), "nobody has confirmed that the ranks of the node that vanished have ended"


def test_a_disk_that_hangs_holds_up_no_decision(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2f: records wait in memory, in order, and are written when the disk answers again."""
    hangs, plain = threading.Event(), StateFile._write

    def write(self: StateFile, data: bytes) -> None:
        hangs.wait(20)
        plain(self, data)

    def hang(agent: LightAgent, body: RunRanks) -> Any:
        if body.epoch == 1:
            monkeypatch.setattr(StateFile, "_write", write)
            threading.Timer(6.0, hangs.set).start()
            return agent.fail("boom")
        return None

    job.cluster.of("n2").fault = hang
    assert job.launch().start() == 0 and job.causes == [("program", "n2"), ("finished", "")]
    assert job.actions == ["restart", "finish"] and job.seconds < 20


def test_a_save_that_outlasts_the_time_limit_is_given_up_for_the_queue(job: Job) -> None:
    """The job script gets USR2 in time, and TERM when the limit is over."""
    job.times = replace(TIMES, stop=60.0)

    def deaf(agent: LightAgent, body: RunRanks) -> Any:
        agent.end = lambda code: None  # type: ignore[method-assign]
        job.checkpoint(4)
        return asyncio.sleep(60)

    async def limit(job: Job) -> None:
        await until(lambda: (job.folder / "checkpoints").exists())
        job.supervisor.stop.set("time-limit", "SIGUSR2")
        await until(lambda: "stopping" in job.phases())
        job.supervisor.stop.terminate()

    job.cluster.everywhere(deaf)
    assert job.launch().start(limit) == 0 and job.seconds < 10
    assert job.causes == [("stopped", "")] and job.actions == ["requeue"] and job.cluster.requeued == [[]]


def test_a_signal_to_an_agent_stops_the_job(job: Job) -> None:
    def preempt(agent: LightAgent, body: RunRanks) -> Any:
        agent.say(Signalled(15))
        return asyncio.sleep(60)

    job.cluster.of("n2").fault = preempt
    job.cluster.of("n1").fault = lambda agent, body: asyncio.sleep(60)
    assert job.launch().start() == 0 and job.actions == ["stop"]
    assert [record.reason for record in job.of(StopRequested)] == ["signal"]
    job.cluster.behaviors.clear()
    assert job.again() == 0 and job.causes[-1] == ("finished", ""), "Slurm has brought it back"


def test_ranks_that_do_not_stop_are_ended(job: Job) -> None:
    def deaf(agent: LightAgent, body: RunRanks) -> Any:
        agent.end = lambda code: None  # type: ignore[method-assign]
        return asyncio.sleep(60)

    job.cluster.everywhere(deaf)
    assert job.launch().start(stop_when(job, "starting")) == 0
    assert job.actions == ["stop"] and job.seconds < 10


def leave_open(job: Job, restart: int, epoch: int) -> None:
    """What a supervisor leaves that is killed with its node."""
    state = StateFile(job.folder / "launch")
    state.append(Started(time=now(), launch="L0", job="7", restart=restart, host="n1", nodes=NODES, step=0))
    state.append(Opened(time=now(), epoch=epoch, attempt=f"7.{restart}.1", nodes=("n1", "n2"), step=0))


def test_what_a_dead_supervisor_left_open_is_closed_by_the_next(job: Job) -> None:
    """I1."""
    leave_open(job.launch(), 0, 1)
    assert job.again() == 0
    assert job.causes == [("supervisor", "n1"), ("finished", "")] and not job.of(Excluded)
    assert [closed.epoch for closed in job.of(Closed)] == [opened.epoch for opened in job.of(Opened)]


def test_a_supervisor_that_is_killed_is_followed_by_one_in_the_same_allocation(job: Job) -> None:
    leave_open(job.launch(), 0, 1)
    assert job.start() == 0 and job.cluster.ended_steps == 1
    assert [opened.attempt for opened in job.of(Opened)] == ["7.0.1", "7.0.2"]
    assert job.causes == [("supervisor", "n1"), ("finished", "")]
    other = Job(job.folder.parent / "other")
    leave_open(other.launch(), 0, 1)
    other.cluster.restart = 1
    assert other.start() == 0 and other.cluster.ended_steps == 0
    assert [opened.attempt for opened in other.of(Opened)] == ["7.0.1", "7.1.1"]


def test_a_host_on_which_supervisors_die_is_left_out_and_then_it_ends(job: Job) -> None:
    """L3."""
    job.launch()
    for restart in range(2):
        leave_open(job, restart, restart + 1)
        job.supervisor = Supervisor(job.spec, job.cluster, TIMES)
        asyncio.run(close_only(job.supervisor))
    job.cluster.restart = 2
    assert job.start() == 0
    assert job.causes == [("supervisor", "n1")] * 2 + [("finished", "")]
    assert [out.node for out in job.of(Excluded)] == ["n1"] and job.nodes[-1] == ("n2", "n3")


async def close_only(supervisor: Supervisor) -> None:
    supervisor.state = StateFile(supervisor.folder)
    await supervisor._close_what_is_open()


def test_a_batch_host_that_died_is_named_and_struck(job: Job) -> None:
    leave_open(job.launch(), 0, 1)
    job.cluster.lost = [LostNode("n1", "down")]
    job.cluster.restart = 1
    assert job.start() == 0
    assert job.causes[0] == ("lost", "n1") and job.nodes[-1] == ("n2", "n3")
    assert judge.strikes(job.records) == {"n1": 1}


@pytest.mark.parametrize("back", ["n1", "n3"])
def test_a_node_that_died_and_is_back_before_the_requeue_is_struck_and_left_out(job: Job, back: str) -> None:
    """Slurm sees nothing wrong with it any more, except since when it is there."""
    leave_open(job.launch(), 0, 1)
    job.cluster.back = {back: "it was booted at 12:00:00"}
    job.cluster.restart = 1
    assert job.start() == 0
    assert job.causes[0] == ("lost", back) and back not in job.nodes[-1]
    assert judge.strikes(job.records) == {back: 1} and [out.node for out in job.of(Excluded)] == [back]


@pytest.mark.parametrize("back", [("n1",), ("n1", "n2", "n3")])
def test_a_killed_supervisor_and_a_power_cut_strike_nobody(job: Job, back: tuple[str, ...]) -> None:
    leave_open(job.launch(), 0, 1)
    job.cluster.back = dict.fromkeys(back, "it was booted at 12:00:00")
    job.cluster.restart = int(len(back) == 3)  # 0: Slurm has not queued the job again
    assert job.start() == 0
    assert job.causes[0] == ("supervisor", "n1") and judge.strikes(job.records) == {} and not job.of(Excluded)


def test_the_next_job_of_a_chain_is_told_which_nodes_are_out(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", spares=0)
    job.cluster.successor = True
    job.cluster.of("n2").fault = lambda agent, body: agent.fail("Xid 79: GPU has fallen off the bus")
    assert job.launch().start() == 1
    assert job.actions == ["requeue"] and job.cluster.handed_over == [["n2"]] and not job.cluster.requeued


def test_bad_checks_swap_the_node_and_bad_spares_are_known_before_they_are_needed(job: Job) -> None:
    job.cluster.of("n2").checks["disk"] = "/tmp is full"
    assert job.launch().start() == 0
    assert job.causes[0] == ("machine", "n2") and job.nodes[1] == ("n1", "n3")
    assert judge.strikes(job.records) == {"n2": 1}


def test_an_unfit_spare_is_left_out_before_it_is_needed(job: Job) -> None:
    job.cluster.of("n3").checks["disk"] = "/tmp is full"
    assert job.launch().start() == 0
    assert [(out.node, out.reason) for out in job.of(Excluded)] == [("n3", "/tmp is full")]


def test_two_nodes_that_differ_are_undecided(job: Job) -> None:
    """P5."""
    job.cluster.of("n1").common = {"version": "2"}
    code = job.launch().start()
    assert job.causes[0] == ("machine", "") and set(job.of(Closed)[0].cause.suspects) == {"n1", "n2"}
    assert judge.strikes(job.records) == {} and code in (0, 3)


def test_a_disk_that_is_full_for_all_nodes_is_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "SITE_FIRST_SECONDS", 0.05)
    for node in NODES:
        job.cluster.of(node).checks["disk"] = "the run folder has 0.0 GB free"

    async def make_room(job: Job) -> None:
        await until(lambda: len(job.of(Closed)) == 2)
        for node in NODES:
            job.cluster.of(node).checks.clear()

    assert job.launch().start(make_room) == 0
    assert set(job.causes) == {("site", ""), ("finished", "")} and not job.of(Excluded)


def test_a_check_that_fails_everywhere_is_final(job: Job) -> None:
    for node in NODES:
        job.cluster.of(node).checks["config"] = "the config is wrong"
    assert job.launch().start() == 2 and job.causes == [("user", "")]


def test_a_node_that_breaks_the_network_is_found_in_pairs(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", nodes=3, spares=0)
    job.cluster.of("n2").cannot_reduce = True
    assert job.launch().start() == 1
    assert job.causes[0][0] == "machine" and job.cluster.requeued[0]


def test_staging_that_fails_everywhere_is_final_at_once(tmp_path: Path) -> None:
    """L1."""
    job = Job(tmp_path / "run")
    job.spec = job.spec.model_copy(update={"image": "/images/a.sqsh", "stage": "/proc/nowhere"})
    job.cluster.staging = dict.fromkeys(NODES, "Permission denied")
    assert job.launch().start() == 2 and "/proc/nowhere" in job.of(Judged)[-1].reason and not job.cluster.all_agents


def test_staging_that_fails_on_a_node_leaves_it_out(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.spec = job.spec.model_copy(update={"image": "/images/a.sqsh", "stage": "/proc/nowhere"})
    job.cluster.staging = {"n2": "No space left"}
    assert job.launch().start() == 0 and job.causes[0] == ("machine", "n2") and job.nodes[1] == ("n1", "n3")


def test_staging_that_fails_on_the_only_node_strikes_nobody_and_ends_with_its_reason(tmp_path: Path) -> None:
    """Whether it would fail on every node, nobody can know: a few are tried."""
    job = Job(tmp_path / "run", nodes=1, spares=0)
    job.spec = job.spec.model_copy(update={"image": "/images/a.sqsh", "stage": "/proc/nowhere"})
    job.cluster.staging = dict.fromkeys(NODES, "Permission denied")
    job.launch().start()
    for _ in range(2):
        job.again()
    assert job.causes == [("site", "n1"), ("site", "n2"), ("site", "n3")] and judge.strikes(job.records) == {}
    assert job.actions == ["requeue", "requeue", "halt"] and "cannot copy" in job.of(Judged)[-1].reason


def test_memory_errors_are_steps_of_the_config(job: Job) -> None:
    """M1: more halvings than attempts that may fail."""
    sizes = iter([32, 32, 16, 16, 8, 8, 4, 4])
    job.cluster.everywhere(
        lambda agent, body: agent.fail("out of memory", "memory", fits=next(sizes)) if body.epoch < 5 else None
    )
    assert job.launch().start() == 0 and job.actions == ["restart"] * 4 + ["finish"]


def test_an_orphaned_supervisor_ends_without_touching_the_cluster(job: Job) -> None:
    async def successor(job: Job) -> None:
        await until(lambda: "n1" in job.cluster.agents and job.cluster.agents["n1"].epoch)
        StateFile(job.folder / "launch").append(
            Started(time=now(), launch="L0", job="7", restart=1, host="n3", nodes=NODES, step=0)
        )

    job.cluster.seconds = 0.5
    assert job.launch().start(successor) == 1
    assert job.cluster.requeued == [] and job.causes == [] and not (job.folder / "launch" / "HALT").exists()
    assert job.cluster.abandoned, "srun's end would be that of the successor's step of that number"


def test_a_supervisor_that_is_started_again_where_it_was_cut_off_does_nothing(job: Job) -> None:
    leave_open(job.launch(), 1, 1)
    before = job.records
    assert job.start() == 0 and job.records == before and not job.cluster.started_anything


@pytest.mark.parametrize("answers", [True, False])
def test_who_reaches_nobody_in_the_preflight_blames_nobody(job: Job, answers: bool) -> None:
    def cut(agent: LightAgent) -> dict[str, str]:
        job.cluster.answers = answers
        agent.writer.close()
        return {}

    async def answer_again(job: Job) -> None:
        await until(lambda: job.of(Judged))
        job.cluster.answers, job.cluster.of("n2").on_check = True, None
        job.supervisor.stop.set("user", "enough")

    job.cluster.host = "n1"
    job.cluster.of("n2").on_check = cut
    job.launch().start(answer_again)
    assert job.causes[0] == (("lost", "n2") if answers else ("site", ""))
    assert ("reaches neither n2 nor the cluster's controller" in job.of(Closed)[0].cause.message) != answers


def test_a_share_of_a_preparation_is_its_own_story(tmp_path: Path) -> None:
    job = Job(tmp_path / ".prepare-train", nodes=1, spares=0, verb="prepare")
    seen: list[RunRanks] = []
    job.cluster.of("n1").fault = lambda agent, body: seen.append(body)
    assert job.start(share=Share(2, 3)) == 0
    assert (seen[0].node_rank, seen[0].nodes) == (2, 3)
    assert read_state(job.folder / "launch" / "shares" / "2" / "state.jsonl") and not (job.folder / "FINISHED").exists()
    job.cluster = LightCluster(["n1"], str(job.folder))
    assert job.start(share=Share(3, 3)) == 0 and (job.folder / "FINISHED").exists()


def test_reports_of_an_earlier_attempt_mean_nothing(job: Job) -> None:
    def confuse(agent: LightAgent, body: RunRanks) -> None:
        agent.say(RanksEnded(body.epoch - 1, {0: 1}))
        agent.say(RankProgress(body.epoch + 7, "saving", 3))

    job.cluster.everywhere(confuse)
    assert job.launch().start() == 0 and job.causes == [("finished", "")]
