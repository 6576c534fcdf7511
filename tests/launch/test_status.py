"""`ingot status` and `ingot logs --errors` of a supervised run: the state, since when, what happens next and why, all in
`--json` too, and no advice that deletes data or does not suit a cluster."""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from histories import Job, random_job
from specs import put_on_path, spec

from ingot.errors import ConfigError
from ingot.launch.monitor.attempts import names, read_launches, view_of
from ingot.launch.monitor.job_states import JobState
from ingot.launch.monitor.logs import check_rank, error_lines
from ingot.launch.monitor.owner import LivingOwner
from ingot.launch.monitor.run_state import Facts, describe
from ingot.launch.monitor.status import Status, read_status
from ingot.launch.monitor.stop import stop_run
from ingot.launch.protocol import LaunchFolder
from ingot.launch.register import register_train
from ingot.launch.supervisor.history import read_history
from ingot.launch.supervisor.progress import who_asked
from ingot.launch.supervisor.records import Cause, Excluded, PhaseBegan, StopRequested
from ingot.launch.supervisor.state_file import StateFile

RUN = "/runs/a"
HANG = Cause("hang", "rank 2 does not answer; run again with --debug for the stack trace", "n2", rank=2, batch=14,
             is_local=True)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose last job is 7, which Slurm has forgotten unless a test says otherwise."""
    run = tmp_path / "run"
    LaunchFolder(run).path.mkdir(parents=True)
    LaunchFolder(run).add_job("slurm", "7")
    (run / "metrics.jsonl").touch()
    slurm(tmp_path, monkeypatch, "")
    return run


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, by: str = "") -> None:
    """What squeue prints after the header, and who cancelled the job by the accounting."""
    put_on_path(monkeypatch, folder / "bin", "squeue", f"print('JOBID|STATE|COMMAND|END_TIME|REASON\\n{line}')")
    put_on_path(monkeypatch, folder / "bin", "sacct", f"print('CANCELLED{by}')" if by else "sys.exit('disabled')")


def write(run: Path, job: Job) -> None:
    state = StateFile(run / "launch")
    for record in job.records[len(state.records) :]:
        assert state.append(record)


def own(run: Path) -> None:
    """Job 7 trains in the folder, on another machine."""
    (run / "owner.json").write_text(json.dumps({"host": "n1", "pid": 1, "started": "1", "job": "7"}))


def in_phase(run: Path, name: str) -> None:
    """A run whose job 7 is in this phase of its first attempt."""
    job = start()
    job.open()
    phase(job, name)
    write(run, job)
    own(run)


def phase(job: Job, name: str, detail: str = "") -> None:
    job.add(PhaseBegan(time=job.now(), epoch=job.epoch, phase=name, detail=detail))  # type: ignore[arg-type]


def start(**values: int) -> Job:
    job = Job(**values)
    assert job.start()
    return job


def facts(job: Job, **values: Any) -> Facts:
    view = view_of("", job.records)
    values = {
        "jobs": [JobState("7", "RUNNING", end="2026-01-02T00:00:00")],
        "was_started": True,
        "checkpoint": job.step,
        "trains_since": view.trains_since,
    } | values
    return Facts(RUN, history=view.history, phase=view.phase, **values)


OWNER = LivingOwner("n1", 3, "7")


@pytest.mark.parametrize(
    ("name", "detail", "state", "then"),
    [
        ("preflight", "", "starting", "checking the nodes; then it trains from batch 0"),
        ("hello", "2 of 3 nodes", "starting", "waiting for the agents of all nodes (2 of 3 nodes)"),
        ("staging", "", "starting", "copying the image"),
        ("collecting", "", "restarting", "asking all nodes why an attempt ended"),
    ],
)
def test_what_an_attempt_is_doing_is_said(name: str, detail: str, state: str, then: str) -> None:
    job = start()
    job.open()
    phase(job, name, detail)
    found = describe(facts(job))
    assert (found.state, found.since) == (state, job.records[-1].time) and found.next.startswith(then)


def test_a_training_run_says_what_ends_it() -> None:
    job = start()
    job.open()
    phase(job, "running")
    found = describe(facts(job, owner=OWNER))
    assert found.state == "running" and found.since == job.records[-1].time
    assert found.next == "before its time limit (2026-01-02 00:00:00) it saves, and it is queued again"
    since = found.since
    phase(job, "saving")
    found = describe(facts(job, owner=OWNER))
    assert "it is saving now" in found.next and found.since == since
    assert describe(facts(job)).since == since  # its owner's file cannot be seen
    assert "before its time limit" in describe(facts(job, owner=OWNER, has_newer_batch=True)).next
    job.add(StopRequested(time=job.now(), reason="user", detail="ada@login1, 2026-01-01T10:00:00"))
    found = describe(facts(job, owner=OWNER))
    assert found.state == "stopping" and "(user, ada@login1, 2026-01-01T10:00:00)" in found.next


def test_between_attempts_the_decision_and_its_reason_are_shown() -> None:
    job = start()
    job.open()
    assert job.close(HANG) == "swap"
    found = describe(facts(job))
    assert (found.state, found.next) == ("restarting", "attempt 2 starts: the next attempt runs without n2")
    job.open()
    assert job.close(Cause("site", "/fsx is full")) == "wait"
    found = describe(facts(job))
    assert found.state == "waiting: /fsx is full" and found.next.endswith(
        "attempt 3; waiting 10 s for the site to recover"
    )


def test_a_queued_job_says_why_it_waits_and_why_it_is_there_again() -> None:
    job = start(spares=0)
    job.open()
    assert job.close(Cause("device", "Xid 79", "n1", is_local=True)) == "requeue"
    found = describe(facts(job, jobs=[JobState("7", "PENDING", "Resources: it waits for free nodes")]))
    assert found.state == "queued"
    assert found.next == ("job 7 is PENDING: Resources: it waits for free nodes; it was queued again: without n1 too few "
                          "nodes are left; other nodes are needed")  # fmt: skip
    held = describe(facts(job, jobs=[JobState("7", "PENDING", "JobHeldAdmin: an administrator holds it")]))
    assert held.state == "held" and not held.advice and not held.since  # Slurm does not say since when
    asked = describe(facts(job, jobs=[JobState("7", "SPECIAL_EXIT")], asked_to_stop=True))
    assert asked.state == "held" and asked.next.endswith("; a stop was asked for: it ends when it starts")
    assert describe(facts(job, jobs=[JobState("7", "SPECIAL_EXIT")])).advice == "scontrol release 7"
    assert describe(facts(job, jobs=[JobState("7", "SUSPENDED")])).state == "suspended"
    assert describe(facts(job, jobs=None)).state.startswith("unknown")


def test_a_suspended_job_is_not_running_although_its_processes_live(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the next job of its chain waits, which a request to stop must not hide."""
    in_phase(run, "running")
    line = f"7|SUSPENDED|{run}/launch/job.sh|N/A|None"
    for first in ("", f"7_2|PENDING|{run}/launch/job.sh|N/A|JobArrayTaskLimit\\n"):
        slurm(tmp_path, monkeypatch, first + line)
        status = read_status(run)
        assert (status.state, status.warnings) == ("suspended", [])
        assert status.next == "job 7 is SUSPENDED; whoever suspended it can resume it"
    said = stop_run(run, now=False)
    assert said.startswith("job 7: SUSPENDED: it stops after it has been resumed; `ingot stop --now")
    assert read_status(run).next.endswith("; a stop was asked for: it stops after it has been resumed")
    slurm(tmp_path, monkeypatch, f"7|SIGNALING|{run}/launch/job.sh|N/A|None")
    assert read_status(run).state == "stopping"


def test_while_slurm_cleans_up_a_job_it_is_neither_queued_nor_in_the_way_of_stop(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is queued again after that is not known."""
    job = start()
    job.open()
    job.add(StopRequested(time=job.now(), reason="signal", detail="SIGTERM"))
    ending = [JobState("7", "COMPLETING")]
    assert describe(facts(job, jobs=ending, owner=OWNER)).state == "stopping"  # it has KillWait to save
    job.close(Cause("stopped", "saved"), steps=5)
    write(run, job)
    own(run)
    line = f"7|COMPLETING|{run}/launch/job.sh|N/A|None"
    slurm(tmp_path, monkeypatch, line)
    status = read_status(run)
    assert (status.state, status.warnings) == ("ending: job 7 is being cleaned up by Slurm", [])
    assert status.next == "a moment later it can be continued, unless Slurm queues it again by itself"
    with pytest.raises(ConfigError, match=r"job: 7: COMPLETING; wait until Slurm has cleaned up after it, then try"):
        register_train(run)
    assert "Slurm cleans up after it; if that queues it again, it will end when it starts" in stop_run(run, now=False)
    slurm(tmp_path, monkeypatch, line + f"\\n7_2|PENDING|{run}/launch/job.sh|N/A|None")  # the next of its chain
    assert read_status(run).next.startswith("job 7_2 is PENDING") and "job 7_2: PENDING" in stop_run(run, now=False)
    with pytest.raises(ConfigError, match=r"job: 7_2: PENDING; stop it first"):
        register_train(run)
    job = start(spares=0)
    job.open()
    assert job.close(Cause("device", "Xid 79", "n1", is_local=True)) == "requeue"
    assert describe(facts(job, jobs=ending)).next.startswith("a moment later it is queued again: without n1 too few")


@pytest.mark.parametrize(
    ("kind", "state"), [("user", "halted: no such file"), ("numeric", "halted: no such file"), ("finished", "finished")]
)
def test_an_end_says_its_cause_and_one_command(kind: str, state: str) -> None:
    job = start()
    job.open()
    job.close(Cause(kind, "no such file"))  # type: ignore[arg-type]
    found = describe(facts(job, jobs=[JobState("7", "FAILED")]))
    assert (found.state, found.since) == (state, job.records[-1].time)
    assert found.advice == ("" if kind == "finished" else f"ingot launch resume {RUN}")


def test_a_stop_says_who_asked_and_a_cancelled_job_who_cancelled_it() -> None:
    job = start()
    job.open()
    job.add(StopRequested(time=job.now(), reason="signal", detail="SIGTERM"))
    job.close(Cause("stopped", "saved"), steps=5)
    found = describe(facts(job, jobs=[JobState("7", "CANCELLED")], cancelled_by="ada"))
    assert found.state == "stopped: a signal asked it to stop (SIGTERM), cancelled by ada"
    assert found.next == "nothing by itself; the command below continues from batch 5"
    held = describe(facts(job, jobs=[JobState("7", "PENDING", "job requeued in held state: it is held")]))
    assert held.state == "held" and held.advice == "scontrol release 7"  # it goes on when it is released
    assert held.next.endswith("it was queued again: a signal asked it to stop (SIGTERM)")
    job = start()
    job.open()  # killed before it could say anything
    found = describe(facts(job, jobs=[JobState("7", "CANCELLED")]))
    assert found.state == "not running" and "job 7 was cancelled by scancel" in found.next
    found = describe(facts(job, jobs=[JobState("7", "FAILED")], exit="signal 9"))
    assert found.next.startswith("job 7 ended as FAILED (signal 9) and its supervisor left no verdict")
    assert found.state == "not running" and found.advice == f"ingot launch resume {RUN}"
    assert "a node of it died" in describe(facts(job, jobs=[JobState("7", "NODE_FAIL")])).next
    assert "its job has gone" in describe(facts(job, jobs=[])).next


def test_a_run_that_broke_off_without_records_is_as_in_0_1() -> None:
    assert describe(Facts(RUN)).state == "never started"
    assert describe(Facts(RUN, was_started=True)).state == "not running"
    assert describe(Facts(RUN, halted="why")).state == "halted: why"
    assert describe(Facts(RUN, asked_to_stop=True)).state == "stopped by the file STOP"
    assert describe(Facts(RUN, jobs=[JobState("7", "RUNNING")])).state == "starting"
    assert describe(Facts(RUN, "prepare", jobs=[JobState("7", "RUNNING")])).state == "running"


@pytest.mark.parametrize("part", range(4))
def test_no_history_is_without_a_state_or_has_advice_that_deletes(part: int) -> None:
    """At every point of 400 random histories, whatever Slurm says."""
    seen = set()
    for seed in range(part, 400, 4):
        job = random_job(seed, limit=30)
        for count in range(1, len(job.records) + 1, 3):
            history = read_history(job.records[:count])
            for jobs in (None, [], [JobState("7", "RUNNING")], [JobState("7", "PENDING")], [JobState("7", "FAILED")]):
                found = describe(Facts(RUN, history=history, jobs=jobs, was_started=True))
                seen.add(found.state.partition(":")[0])
                over = Status(found.state).over
                assert found.state and "--fresh" not in found.advice and "--debug" not in found.next
                assert not over or found.state == "finished" or found.advice == f"ingot launch resume {RUN}", found
                assert over or found.next or jobs is None, found
    assert {"halted", "finished", "starting", "restarting", "queued", "not running", "unknown", "waiting"} <= seen


def test_status_tells_the_whole_story_in_words_and_in_json(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingot_here: Callable[..., Any]
) -> None:
    job = start(spares=2)
    job.open()
    job.close(HANG, steps=10)
    job.open()
    undecided = Cause("hang", "no rank goes on", suspects=("n1", "n3"))
    job.close(undecided)
    job.add(Excluded(time=job.now(), node="n4", reason="kernel update", is_drained=True))
    job.open()
    phase(job, "running")
    write(run, job)
    slurm(tmp_path, monkeypatch, f"7|RUNNING|{run}/launch/job.sh|2026-01-02T00:00:00|None")
    own(run)
    text = ingot_here("status", str(run)).stdout
    shown = [
        "state: running, since 20",
        "next: before its time limit (2026-01-02 00:00:00) it saves, and it is queued again",
        "job 7: RUNNING",
        "attempts: 3, failures: 0",
        "7.0.1 on n1, n2, from batch 0 to 10: hang: rank 2 does not answer (rank 2, batch 14, node n2); then swap: the next",
        "7.0.2 on n1, n3, from batch 10, no new checkpoint: hang: no rank goes on (undecided between n1, n3); then restart: ",
        "7.0.3 on n1, n3, from batch 10: not ended",
        "nodes: n1, n3",
        "node n2 is left out since 20",
        "node n4 is being drained since 20",
        "node n2: 1 strike",
    ]
    assert [part for part in shown if part not in text] == []
    assert "--debug" not in text
    found = json.loads(ingot_here("status", str(run), "--json").stdout)
    assert found["state"] == "running" and found["jobs"] == {"7": "RUNNING"} and found["strikes"] == {"n2": 1}
    assert [(a["culprit"], a["suspects"], a["then"]) for a in found["attempt_list"]] == [
        ("n2", [], "swap"), ("undecided", ["n1", "n3"], "restart"), ("", [], "")]  # fmt: skip
    assert found["nodes_out"]["n4"]["is_drained"] and found["nodes"] == ["n1", "n3"] and found["job_starts"] == {"7": 1}
    assert json.loads(json.dumps(asdict(read_status(run)))) == found


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("0:9", " (signal 9) and"),
        ("137:0", " (signal 9) and"),
        ("3:0", " (exit code 3) and"),
        ("0:0", " and"),
        ("", " and"),
    ],
)
def test_a_job_that_failed_without_a_verdict_says_what_its_script_ended_with(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: str
) -> None:
    job = start()
    job.open()
    write(run, job)
    slurm(tmp_path, monkeypatch, f"7|FAILED|{run}/launch/job.sh|N/A|None")
    put_on_path(monkeypatch, tmp_path / "bin", "scontrol", f"print('JobId=7 JobName=a ExitCode={said} Requeue=1')")
    status = read_status(run)
    assert f"job 7 ended as FAILED{expected} its supervisor left no verdict" in status.next


def test_an_orphan_of_an_ended_job_is_not_a_running_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start()
    job.open()
    write(run, job)
    slurm(tmp_path, monkeypatch, f"7|FAILED|{run}/launch/job.sh|N/A|None")
    own(run)
    status = read_status(run)
    assert status.state == "not running" and "job 7 ended as FAILED" in status.next
    assert status.warnings == [
        f"process 1 on n1, job 7 still trains in {run} although its job has ended; the next job replaces it"
    ]


def test_the_state_does_not_depend_on_this_machines_clock(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(tmp_path, monkeypatch, f"7|RUNNING|{run}/launch/job.sh|N/A|None")
    owner = run / "owner.json"
    owner.write_text(json.dumps({"host": "n1", "pid": 1, "started": "1", "job": "7"}))
    for skew in (-90.0, 90.0):
        monkeypatch.setattr(time, "time", lambda skew=skew: owner.stat().st_mtime + skew)
        assert read_status(run).state == "running"


@pytest.mark.parametrize(
    ("content", "asked"),
    [("ada@login1, 2026-01-01T10:00:00\n", "STOP by ada@login1, 2026-01-01T10:00:00"), ("", "STOP in the run folder"),
     ("x" * 5000, f"STOP by {'x' * 200}"), ("one\ntwo\n", "STOP by one")],
)  # fmt: skip
def test_who_asked_for_a_stop_is_what_the_file_says(tmp_path: Path, content: str, asked: str) -> None:
    (tmp_path / "STOP").write_text(content)
    assert who_asked(tmp_path) == asked
    (tmp_path / "STOP").write_bytes(b"\xff\xfe")
    assert who_asked(tmp_path) == "STOP in the run folder"


def test_requeues_and_cancellation_are_shown(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start()
    for _ in range(2):
        job.open()
        job.start()  # the batch host died
    job.open()
    write(run, job)
    slurm(tmp_path, monkeypatch, f"7|CANCELLED|{run}/launch/job.sh|N/A|None", by=f" by {os.getuid()}")
    status = read_status(run)
    text = "\n".join(status.lines())
    assert "job 7: CANCELLED, started again 2 times" in text and status.job_starts == {"7": 3}
    job.restart -= 1
    job.start()  # the supervisor alone was killed: the job did not start again
    write(run, job)
    assert read_status(run).job_starts == {"7": 3}
    assert status.cancelled_by == "root" and "job 7 was cancelled by root" in text
    assert [a.kind for a in status.attempt_list] == ["supervisor", "supervisor", ""]


def test_an_object_of_kubernetes_has_started_as_often_as_its_pods() -> None:
    status = Status("running", jobs={"mine-0abc12": "RUNNING", "7": "RUNNING"}, job_starts={"0abc12": 3, "17": 5},
                    job_numbers={"mine-0abc12": "0abc12"})  # fmt: skip
    assert "job mine-0abc12 (attempts 0abc12.*): RUNNING, started again 2 times" in status.lines()
    assert "job 7: RUNNING" in status.lines()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("7|FAILED|{script}|N/A|None", ""),  # a dead job
        ("7|NODE_FAIL|{script}|N/A|None", ""),
        ("", ""),  # which Slurm has forgotten
        ("7|PENDING|{script}|N/A|Resources", "it will end when it starts"),
        ("7|RUNNING|{script}|N/A|None", "asked"),
        ("7|REQUEUED|{script}|N/A|None", "it will end when it starts"),
    ],
)
def test_a_run_whose_job_is_dead_is_not_asked_to_stop(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str
) -> None:
    """The file STOP would hide why it ended, and a later start might obey it."""
    job = start()
    job.open()
    write(run, job)
    slurm(tmp_path, monkeypatch, line.format(script=f"{run}/launch/job.sh"))
    before = read_status(run)
    said = stop_run(run, now=False)
    assert (run / "STOP").exists() == bool(says) and says in said
    if not says:
        assert said == f"{run} is not running, so there is nothing to stop; `ingot launch resume {run}` continues it"
        assert read_status(run) == before


def test_a_halted_run_keeps_its_cause_when_it_is_asked_to_stop(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start()
    job.open()
    job.close(Cause("user", "no such file"))
    write(run, job)
    said = stop_run(run, now=False)
    assert f"{run} is not running (halted: no such file), so there is nothing to stop; `ingot launch resume" in said
    assert not (run / "STOP").exists() and read_status(run).state == "halted: no such file"
    slurm(tmp_path, monkeypatch, f"7|PENDING|{run}/launch/job.sh|N/A|Dependency")  # the next job of its chain
    stop_run(run, now=False)
    assert (run / "STOP").exists()


def test_a_run_that_broke_off_is_not_running_since_its_last_record(run: Path) -> None:
    job = start()
    job.open()
    for name in ("running", "saving"):
        phase(job, name)
        assert describe(facts(job, jobs=[])).since == job.records[-1].time
    job.add(StopRequested(time=job.now(), reason="signal", detail="SIGTERM"))
    assert describe(facts(job, jobs=[])).since == job.records[-1].time


def test_a_save_is_over_when_the_metrics_have_a_newer_batch(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The phase is written down every ten seconds at most."""
    in_phase(run, "saving")
    slurm(tmp_path, monkeypatch, f"7|RUNNING|{run}/launch/job.sh|2026-01-02T00:00:00|None")
    written = (run / "launch" / "state.jsonl").stat().st_mtime
    for later, then in ((-1, "it is saving now"), (1, "before its time limit (2026-01-02 00:00:00)")):
        os.utime(run / "metrics.jsonl", (written + later, written + later))
        assert read_status(run).next.startswith(then)


def test_a_run_that_was_stopped_has_one_piece_of_advice(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start()
    job.open()
    write(run, job)
    (run / "stopped.json").write_text(json.dumps({"reason": "SIGTERM", "batch": 5, "total": 20}))
    slurm(tmp_path, monkeypatch, f"7|CANCELLED|{run}/launch/job.sh|N/A|None")
    status = read_status(run)
    assert (status.stopped, status.advice) == ("stopped by SIGTERM at batch 5 of 20", f"ingot launch resume {run}")
    assert "the same command" not in "\n".join(status.lines())


def test_failures_of_earlier_launches_are_not_those_of_the_attempts(run: Path) -> None:
    job = start()
    job.open()
    failure = {"time": "2026-01-01T00:00:00", "kind": "user", "attempt": "1", "rank": 0, "host": "n1", "batch": 3}
    lines = [json.dumps({**failure, "message": text}) for text in ("no such file", "no such key")]
    (run / "failures.jsonl").write_text("\n".join(lines) + "\n")
    assert "attempts: 2, failures: 2" in read_status(run).lines()
    write(run, job)
    assert "attempts: 1, failures: 2 (in all launches)" in read_status(run).lines()


def test_a_file_stop_does_not_hide_how_a_job_ended(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start()
    job.open()
    write(run, job)
    slurm(tmp_path, monkeypatch, f"7|NODE_FAIL|{run}/launch/job.sh|N/A|None")
    (run / "STOP").touch()
    status = read_status(run)
    assert status.state == "stopped by the file STOP" and "job 7 ended as NODE_FAIL: a node of it died" in status.next


def test_a_run_without_a_launch_is_not_told_to_resume_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    said = stop_run(tmp_path, now=False)
    assert said == f"{tmp_path} is not running, so there is nothing to stop; the same command continues it"
    (tmp_path / "STOP").touch()
    status = read_status(tmp_path)
    assert (status.state, status.advice) == ("stopped by the file STOP", "")
    assert status.next == "nothing by itself; the same command continues"


def test_a_slow_node_is_a_warning_while_the_run_goes_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start()
    job.open()
    phase(job, "running", "n2 is slower than the others: 4 s of its own work per batch; the median is 1 s")
    write(run, job)
    slurm(tmp_path, monkeypatch, f"7|RUNNING|{run}/launch/job.sh|N/A|None")
    status = read_status(run)
    assert status.state == "running" and any("n2 is slower than the others" in line for line in status.warnings)


@pytest.mark.parametrize("content", ["{}\n", "one\ntwo", '{"event": "launched"\n', "\0\n"])
def test_after_damage_to_the_state_file_the_advice_works(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingot_here: Callable[..., Any], content: str
) -> None:
    """What is there stays there, under another name."""
    job = start()
    job.open()
    job.close(HANG)
    write(run, job)
    spec(run_folder=str(run), workdir=str(tmp_path), image=None, spares=0).write()
    state = run / "launch" / "state.jsonl"
    state.write_text(state.read_text() + content + "\n" + state.read_text())
    damaged = state.read_text()
    (run / "launch" / "state.jsonl.damaged").touch()  # the second time
    resume = ["launch", "resume", str(run), "--dry-run"]
    assert "state.jsonl is damaged" in ingot_here(*resume, check=False).stderr
    assert "state.jsonl is damaged" in error_lines(run)[0]
    status = read_status(run)
    assert status.state == "not running" and "state.jsonl is damaged" in status.warnings[0]
    assert status.next == f"nothing by itself; after the command below, `ingot launch resume {run}` continues"
    assert status.advice == f"mv {state} {state}.damaged1"
    assert stop_run(run, now=False).endswith(f"; after `{status.advice}`, `ingot launch resume {run}` continues it")
    subprocess.run(shlex.split(status.advice), check=True)
    assert (run / "launch" / "state.jsonl.damaged1").read_text() == damaged
    assert read_status(run).advice == f"ingot launch resume {run}" and not read_status(run).warnings
    ingot_here(*resume)


def test_records_that_are_missing_are_said_and_do_not_keep_a_run_from_its_next_launch(
    run: Path, tmp_path: Path, ingot_here: Callable[..., Any]
) -> None:
    job = start()
    job.open()
    job.close(HANG)
    job.open()
    write(run, job)
    spec(run_folder=str(run), workdir=str(tmp_path), image=None, spares=0).write()
    state = run / "launch" / "state.jsonl"
    state.write_text("".join(line for line in state.open() if "closed" not in line))
    status = read_status(run)
    (warning,) = status.warnings
    assert warning.startswith(f"{state} lacks records (attempt 7.0.2 was opened before 7.0.1 was closed): ")
    assert status.advice == f"ingot launch resume {run}"
    ingot_here("launch", "resume", str(run), "--dry-run")


def test_the_advice_for_a_folder_that_was_moved_is_of_the_new_one_and_resuming_says_what_to_do(
    run: Path, tmp_path: Path, ingot_here: Callable[..., Any]
) -> None:
    """And nothing starts in the place where it was."""
    job = start()
    job.open()
    job.close(Cause("user", "no such file"))
    write(run, job)
    spec(run_folder=str(run), workdir=str(tmp_path), image=None).write()
    moved = run.rename(tmp_path / "moved")
    assert read_status(moved).advice == f"ingot launch resume {moved}"
    refused = ingot_here("launch", "resume", str(moved), "--dry-run", check=False)
    assert refused.stderr == (f"error: {moved} was launched as {run}; move it back, or launch it again with "
                              f"save_folder={moved}\n")  # fmt: skip
    assert not run.exists()


def test_a_preparation_that_halts_in_one_share_says_which_error(run: Path) -> None:
    (run / "launch" / "spec.json").write_text(
        json.dumps({"name": "p", "verb": "prepare", "run_folder": str(run), "workdir": "/data", "profile": "cpu"})
    )
    for name, kind in (("0", "finished"), ("1", "data")):
        job = start(nodes=1)
        job.open()
        job.close(Cause(kind, "part-7.json is not JSON", "n1"))  # type: ignore[arg-type]
        state = StateFile(run / "launch" / "shares" / name)
        for record in job.records:
            state.append(record)
    status = read_status(run)
    assert status.state == "halted: part-7.json is not JSON" and len(status.attempt_list) == 2
    assert [view.name for view in read_launches(run)[0]] == ["0", "1"]


def test_errors_are_those_of_the_rank_and_attempt_that_failed(run: Path) -> None:
    """And not the newest log of that rank, which is the running attempt's."""
    job = start()
    job.open()
    job.close(HANG)
    job.open()
    write(run, job)
    for attempt, text in (("7.0.1", "the place\n"), ("7.0.2", "all is well\n")):
        for rank in (0, 2):
            path = run / "logs" / attempt / f"rank-{rank}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text if rank == 2 else "another rank\n")
    (run / "logs" / "7.0.1" / "stacks-2.txt").write_text("File a.py, line 3\n")
    lines = error_lines(run)
    assert (
        lines[0].count("rank 2 does not answer") == 1
        and "7.0.1 on n1, n2" in lines[0]
        and "rank 2 does not answer" in lines[0]
    )
    assert lines[1:] == ["", f"the end of {run}/logs/7.0.1/rank-2.log:", "the place", "", f"the end of {run}/logs/7.0.1/stacks-2.txt:",
                         "File a.py, line 3"]  # fmt: skip
    (run / "logs" / "7.0.1" / "rank-2.log").write_text("")  # it could not write: then the stacks alone
    (run / "launch" / "output").mkdir()
    (run / "launch" / "output" / "7.0.0.0.out").write_text("of all attempts\n")
    assert "rank-2.log" not in "\n".join(error_lines(run)) and "of all attempts" not in error_lines(run)


def test_errors_of_a_node_that_never_got_to_its_ranks_are_what_it_printed(run: Path) -> None:
    job = start(spares=0)
    job.open()
    job.close(Cause("silent", "n2 has not reported", "n2"))
    write(run, job)
    output = run / "launch" / "output"
    output.mkdir()
    (output / "7.0.1.out").write_text("execve(): no such file\n")
    (output / "7.0.0.out").write_text("")
    assert error_lines(run)[-2:] == [f"the end of {output}/7.0.1.out:", "execve(): no such file"]


def test_a_resumed_run_takes_another_limit_and_other_nodes(run: Path, ingot_here: Callable[..., Any]) -> None:
    spec = {
        "name": "a",
        "run_folder": str(run),
        "workdir": "/",
        "profile": "cpu",
        "exclude": ["n8", "n9"],
        "arguments": ["--", "x"],
    }
    (run / "launch" / "spec.json").write_text(json.dumps(spec))
    text = ingot_here("launch", "resume", str(run), "--time", "2-0", "-x", "n5", "--use", "n9", "--dry-run").stdout
    assert "#SBATCH --time=2-0\n" in text and "#SBATCH --exclude=n5,n8\n" in text
    refused = ingot_here("launch", "resume", str(run), "--time", "1", "--dry-run", check=False)
    assert "is too short" in refused.stderr


def test_many_nodes_are_counted_and_not_listed() -> None:
    assert names([f"n{i}" for i in range(1024)]) == "n0, n1, n2, n3 and 1,020 more"


def test_the_log_of_a_rank_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    check_rank(tmp_path, 7)  # nothing has started yet
    for name in ("rank-0.log", "1/rank-0.log", "1/rank-1.log"):
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    check_rank(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"no log of rank 7, only of ranks 0 to 1"):
        check_rank(tmp_path, 7)
