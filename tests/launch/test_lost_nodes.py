"""Nodes whose loss makes Slurm end more than what ran on them: the agents of other nodes, or the whole job. Whoever was
ended is not at fault, and nobody has asked for a stop. On coroutine agents; on a real Slurm in test_slurm_lost_nodes."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from specs import put_on_path, spec
from test_supervise import Job, once
from waiting import until

from ingot.launch.messages import ADDRESS_VARIABLE, Collect, Signalled
from ingot.launch.slurm import allocation
from ingot.launch.slurm.allocation import SlurmCluster
from ingot.launch.supervisor import judge
from ingot.launch.supervisor.cluster import AgentEnded, LostNode
from ingot.launch.supervisor.diagnose import diagnose
from ingot.launch.supervisor.records import Excluded, StopRequested

PHASES = ("hello", "preflight", "starting")
MISSING = "srun: error: Aborting, io error and missing step on node 2"


def sleep(agent: Any, body: Any) -> Any:
    return asyncio.sleep(60) if body.epoch == 1 else None


async def reached(job: Job, phase: str) -> None:
    agents = job.cluster.agents
    await until(lambda: phase in job.phases() and "n1" in agents and agents["n1"].messages)
    if phase == "starting":
        await until(lambda: all(agents[node].running for node in ("n1", "n2")))


@pytest.mark.parametrize("phase", PHASES)
def test_nobody_has_asked_for_a_stop_if_signals_follow_the_death_of_a_node(tmp_path: Path, phase: str) -> None:
    """Without spares. The other node's connection is still open, as one is that nobody has closed."""
    job = Job(tmp_path / "run", spares=0)
    job.cluster.ends_with_a_node = True
    job.cluster.everywhere(sleep)
    if phase == "hello":
        job.cluster.of("n2").hangs_at_start = True
    elif phase == "preflight":
        job.cluster.of("n2").silent_from = object

    async def die(job: Job) -> None:
        await reached(job, phase)
        job.cluster.lost = [LostNode("n2", "down*: Not responding")]
        job.cluster.agents["n1"].say(Signalled(15))

    job.launch().start(die)
    assert job.causes == [("lost", "n2")] and job.actions == ["requeue"]
    assert job.cluster.requeued == [["n2"]] and not job.of(StopRequested)
    assert judge.strikes(job.records) == {"n2": 1}


def test_a_signal_to_a_job_that_has_lost_no_node_is_a_request(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", spares=0)
    job.cluster.ends_with_a_node = True
    job.cluster.everywhere(sleep)

    async def cancel(job: Job) -> None:
        await reached(job, "starting")
        job.cluster.agents["n1"].say(Signalled(15))

    assert job.launch().start(cancel) == 0
    assert job.actions == ["stop"] and [stop.reason for stop in job.of(StopRequested)] == ["signal"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_spare_for_whose_loss_srun_ends_all_agents_is_named(tmp_path: Path, phase: str) -> None:
    job = Job(tmp_path / "run")
    job.cluster.everywhere(sleep)
    if phase == "preflight":
        job.cluster.of("n2").silent_from = object

    async def end_all(job: Job) -> None:
        await reached(job, phase)
        await until(lambda: len(job.cluster.agents) == 3)
        job.cluster.behaviors.clear()
        for node in ("n1", "n2", "n3"):
            job.cluster.ended.put_nowait(AgentEnded(node, MISSING, "n3"))
        for node in ("n2", "n1", "n3"):
            job.cluster.agents[node].die()

    if phase == "hello":
        job.cluster.of("n2").hangs_at_start = True
        job.cluster.of("n3").hangs_at_start = True

        async def end_those_that_wait(job: Job) -> None:
            await reached(job, phase)
            job.cluster.behaviors.clear()
            for node in ("n1", "n2", "n3"):
                job.cluster.ended.put_nowait(AgentEnded(node, MISSING, "n3"))
            job.cluster.agents["n1"].die()

        end_all = end_those_that_wait
    assert job.launch().start(end_all) == 0
    assert job.causes == [("lost", "n3"), ("finished", "")], job.causes
    assert job.nodes == [("n1", "n2")] * 2 and [out.node for out in job.of(Excluded)] == ["n3"]
    assert judge.strikes(job.records) == {}


def test_a_node_that_dies_is_named_and_not_those_that_srun_ends_with_it(tmp_path: Path) -> None:
    """P1 in a job of more than 32 nodes, whose agents share sruns: the node's own connection may break last."""
    job = Job(tmp_path / "run")
    job.cluster.of("n1").fault = once(lambda agent, body: agent.die())
    job.cluster.of("n2").fault = sleep

    async def end(job: Job) -> None:
        await reached(job, "starting")
        for node in ("n1", "n2"):
            job.cluster.ended.put_nowait(AgentEnded(node, MISSING, "n2"))

    assert job.launch().start(end) == 0
    assert job.causes == [("lost", "n2"), ("finished", "")] and job.nodes[1] == ("n1", "n3")


def test_a_supervisor_that_is_cut_off_blames_nobody_for_a_hang_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2: its srun would end a step of its successor when the network is back. The other connection is still open."""
    job = Job(tmp_path / "run", spares=0)
    monkeypatch.setattr(judge, "SITE_FIRST_SECONDS", 0.3)
    job.cluster.host = "n1"
    job.cluster.of("n1").fault = lambda agent, body: agent.wait() if body.epoch == 1 else None
    job.cluster.of("n2").fault, job.cluster.of("n2").silent_from = sleep, Collect
    started: list[list[str]] = []
    plain = job.cluster.start_agents

    async def start_agents(nodes: Any, env: Any) -> None:
        started.append([*nodes, "answers" if job.cluster.answers else "silent"])
        await plain(nodes, env)

    job.cluster.start_agents = start_agents  # type: ignore[method-assign]

    async def cut(job: Job) -> None:
        await reached(job, "starting")
        job.cluster.answers = False
        await until(lambda: job.causes)
        job.cluster.agents["n2"].die()
        await until(lambda: len(job.causes) > 1)
        job.cluster.behaviors.clear()
        job.cluster.answers = True

    assert job.launch().start(cut, seconds=60) == 0
    assert set(job.causes) == {("site", ""), ("finished", "")} and not job.excluded
    assert ["n2", "silent"] not in started and started[-1] == ["n2", "answers"]


def test_the_loss_of_a_spare_is_a_cause_of_its_own() -> None:
    cause = diagnose(["n1", "n2"], {}, {"n3": "the node was restarted"})
    assert (cause.kind, cause.node, cause.suspects, cause.is_local) == ("lost", "n3", (), False)


def test_the_node_that_srun_misses_is_found_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers count the nodes of the step in the order of the allocation, whatever the order of a job's ranks."""
    run = spec(image=None, run_folder=str(tmp_path / "run"), workdir=str(tmp_path), nodes=2, spares=1)
    run.write()
    monkeypatch.setattr("ingot.launch.slurm.allocation.MAX_SRUNS", 1)
    put_on_path(monkeypatch, tmp_path / "bin", "scontrol", "print('n1\\nn2\\nn3')")
    put_on_path(monkeypatch, tmp_path / "bin", "srun", f"print({MISSING!r}, file=sys.stderr, flush=True)")

    async def start() -> list[AgentEnded]:
        env = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]"}
        cluster = SlurmCluster(run, env)
        await cluster.start_agents(["n3", "n1", "n2"], {ADDRESS_VARIABLE: "n1:1"})
        async with asyncio.timeout(20):
            return [await cluster.ended.get() for _ in range(3)]

    said = asyncio.run(start())
    assert {item.node for item in said} == {"n1", "n2", "n3"} and {item.ended_for for item in said} == {"n3"}


@pytest.mark.parametrize(
    ("restarts", "state", "lost"), [(1, "down*|Not responding", ["n2"]), (0, "down*|Not responding", []), (1, "idle|none", [])]
)  # fmt: skip
def test_slurm_ends_a_job_for_a_node_if_it_has_lost_one_and_queued_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, state: str, lost: list[str]
) -> None:
    """Queued again without a lost node, an administrator has done it; a lost node alone ends no job."""
    run = spec(image=None, run_folder=str(tmp_path / "run"), workdir=str(tmp_path), nodes=2, spares=0)
    run.write()
    shown = f"JobId=7 JobState=COMPLETING Reason=None Requeue=1 Restarts={restarts} BatchFlag=1"
    calls = put_on_path(monkeypatch, tmp_path / "bin", "scontrol", f"print({shown!r})")
    put_on_path(monkeypatch, tmp_path / "bin", "sinfo", f"print('n1|completing|none\\nn2|{state}')")
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MAX": "3"}
    cluster = SlurmCluster(run, {**os.environ, "SLURM_JOB_ID": "8", **array})
    assert [item.node for item in asyncio.run(cluster.ended_for(["n1", "n2"]))] == lost
    assert asyncio.run(cluster.hand_over(["n2"])) == (not lost), "the next job of the chain would wait for this one"
    asked = calls.read_text()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert asyncio.run(cluster.requeue(["n2"]))
    asked = calls.read_text().removeprefix(asked)
    assert ('"requeue"' in asked) == (not lost) and '"JobId=7_1", "ExcNodeList=n2"' in asked


def test_a_question_that_the_signal_to_the_job_interrupts_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sends TERM to every process of the job script, and so to the scontrol that asks what TERM means."""
    run = spec(image=None, run_folder=str(tmp_path / "run"), workdir=str(tmp_path), nodes=2, spares=0)
    run.write()
    body = f"""
import os, signal
times = {str(tmp_path / "times")!r}
open(times, "a").write("x")
if os.path.getsize(times) == 1:
    os.kill(os.getpid(), signal.SIGTERM)
print("PreemptTime=2026-01-01T00:00:00")
"""
    put_on_path(monkeypatch, tmp_path / "bin", "scontrol", body)
    cluster = SlurmCluster(run, {**os.environ, "SLURM_JOB_ID": "8"})
    assert asyncio.run(cluster.signal_reason()) == "preempt"
    assert (tmp_path / "times").read_text() == "xx"


@pytest.mark.parametrize(
    ("answers", "is_answering"),
    [
        (["kill", "UP"], True),
        (["DOWN", "kill", "UP"], True),
        (["DOWN", "DOWN", "DOWN"], False),
    ],
)
def test_one_question_that_fails_does_not_make_the_controller_silent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[str],
    is_answering: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Slurm signals all processes of a job that it ends, the one that asks among them."""
    asked = tmp_path / "asked"
    body = f"""
import signal
with open({str(asked)!r}, "a") as file:
    file.write("x")
answer = {answers}[len(open({str(asked)!r}).read()) - 1]
if answer == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
print("Slurmctld(primary) at n1 is", answer)
sys.exit(answer == "DOWN")
"""
    put_on_path(monkeypatch, tmp_path / "bin", "scontrol", body)
    monkeypatch.setattr(allocation, "PING_PAUSES", (0.0, 0.0, 0.0))
    run = spec(run_folder=str(tmp_path / "run"), workdir=str(tmp_path), image=None)
    cluster = SlurmCluster(run, {**os.environ, "SLURM_JOB_ID": "7"})
    assert asyncio.run(cluster.is_answering()) == is_answering
    assert len(asked.read_text()) == len(answers)
    assert ("scontrol ping: exit code 1, Slurmctld(primary) at n1 is DOWN" in capfd.readouterr().out) != is_answering
