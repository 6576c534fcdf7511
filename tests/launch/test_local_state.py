"""`launch/state.jsonl` of a run on one machine: its launcher writes down each attempt, why it ended and what follows, and
`ingot status` shows that, whichever command started the run and however it ended."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import Run, ranks
from specs import spec
from state_records import StateRecords

from ingot.errors import EXIT_INTERRUPTED
from ingot.launch.agent.attempt import StopNow, pause
from ingot.launch.agent.local_ranks import Node
from ingot.launch.build_spec import strikes
from ingot.launch.local import run as local_run
from ingot.launch.local import state as local_state
from ingot.launch.local.state import LocalState
from ingot.launch.monitor.status import Status, read_status
from ingot.launch.protocol import LaunchFolder
from ingot.launch.register import register_train
from ingot.launch.submit import spec_to_resume
from ingot.launch.supervisor.failure_log import mark_start, node_name, record
from ingot.launch.supervisor.records import Cause, Closed, Launched, Opened, PhaseBegan, Started, StopRequested
from ingot.launch.supervisor.state_file import StateError, StateFile, read_state

__all__ = ["ranks"]
SLOW_STEPS = {"kind": "slow", "rank": 0, "batch": 1}
KILLED = Cause("machine", "the process was killed by signal 9", rank=1, batch=10)


class LocalRun(Run, StateRecords):
    """`ingot train --nproc 1`, and what its launcher has written down."""

    def status(self) -> Status:
        return read_status(self.folder)


def test_a_run_that_gave_up_says_why_and_what_to_do(data: Path, tmp_path: Path, ingot_here: Callable[..., Any]) -> None:
    run = LocalRun(data, tmp_path / "run", nproc=1, kind="exception", rank=0, batch=6, attempts=[1, 2])
    run.run(code=3)
    text = ingot_here("status", str(run.folder)).stdout
    assert text.startswith("state: halted: the same error twice: trying again would not help, since 20")
    assert "next: nothing by itself; the command below continues from batch 4" in text
    assert "command: ingot train --nproc 1 model.d_model=32" in text and f"save_folder={run.folder}" in text
    assert "attempts: 2, failures: 2" in text
    assert "local.0.1 on" in text and "then restart: continuing from batch 4" in text and "1 strike" not in text
    found = json.loads(ingot_here("status", str(run.folder), "--json").stdout)
    assert found["state"].startswith("halted: the same error twice") and found["advice"].startswith("ingot train ")
    assert [attempt["then"] for attempt in found["attempt_list"]] == ["restart", "halt"]
    assert found["strikes"] == found["nodes_out"] == {}


def test_each_attempt_is_marked_in_the_logs_and_errors_are_of_the_one_that_failed(
    data: Path, tmp_path: Path, ingot_here: Callable[..., Any]
) -> None:
    """Attempts on one machine append to the same files."""
    run = LocalRun(data, tmp_path / "run", nproc=1, kind="exception", rank=0, batch=6)
    run.run()
    said = ingot_here("logs", "--errors", str(run.folder)).stdout
    log = said.partition(f"the end of {run.folder}/logs/rank-0.log:\n")[2].splitlines()
    assert log[0].endswith(" ----- attempt local.0.1 -----") and "a bug that strikes here" in "\n".join(log)
    assert "local.0.2" not in said and said.count("local.0.1 on ") == 1
    for more in ([], ["--rank", "0"]):
        marks = [line for line in ingot_here("logs", *more, str(run.folder)).stdout.splitlines() if "-----" in line]
        assert [mark.partition(" ")[2] for mark in marks] == [
            "----- attempt local.0.1 -----", "----- attempt local.0.2 -----"]  # fmt: skip


def test_a_stop_is_recorded_with_its_reason(data: Path, tmp_path: Path, ingot: Callable[..., Any]) -> None:
    """Asked by Ctrl-C, by `ingot stop`, and by a limit of the run's own; each continues the same story."""
    run = LocalRun(data, tmp_path / "run", "max_duration=2000ba", nproc=1, **SLOW_STEPS).start()
    run.wait_for_batch(2)
    assert run.status().state == "running" and run.status().jobs == {str(run.process.pid): "RUNNING"}
    run.process.send_signal(signal.SIGINT)
    run.wait(lambda: run.of(StopRequested))  # before it has stopped
    run.end(code=75)
    assert run.status().state == "stopped: a signal asked it to stop (Ctrl-C)"
    run.start().wait_for_batch(8)
    ingot("stop", str(run.folder))
    run.end(code=75)
    assert run.status().state.startswith("stopped: it was asked to stop (STOP by ")
    assert run.status().advice.startswith("ingot train --nproc 1 ")
    run.command.append("max_wall_time=0.2sec")
    run.run(code=75)
    assert run.status().state == "stopped: max_wall_time is over"
    assert run.actions == ["stop", "stop", "stop"]
    assert [opened.attempt for opened in run.of(Opened)] == ["local.0.1", "local.1.1", "local.2.1"]


def test_a_killed_launcher_is_said_to_be_gone_and_the_next_one_closes_its_attempt(data: Path, tmp_path: Path) -> None:
    run = LocalRun(data, tmp_path / "run", nproc=1, **SLOW_STEPS).start()
    run.wait_for_batch(5)
    run.process.kill()
    run.process.communicate()
    while (status := run.status()).state == "running":  # its rank is just ending
        time.sleep(0.05)
    assert status.state == "not running" and status.attempts == 1
    assert status.next == "its launcher was killed, or the machine was restarted; nothing by itself"
    assert status.advice.startswith("ingot train --nproc 1 ")
    LocalRun(data, run.folder, nproc=1).run()
    assert [cause for cause, _ in run.causes] == ["supervisor", "finished"]
    assert run.records.index(run.of(Closed)[0]) < run.records.index(run.of(Launched)[1])


def test_a_second_launcher_writes_nothing_while_the_first_lives(data: Path, tmp_path: Path) -> None:
    run = LocalRun(data, tmp_path / "run", nproc=1, **SLOW_STEPS, seconds=1).start()
    run.wait_for_batch(2)
    run.wait(lambda: run.of(PhaseBegan))
    before = run.records
    said = Run(data, run.folder, nproc=1).run(code=2)
    assert f"{run.folder} already has a job: {run.process.pid}: RUNNING; stop it first with `ingot stop" in said
    assert run.records == before and len(LaunchFolder(run.folder).jobs()) == 1
    run.process.terminate()
    run.end(code=75)
    assert run.status().state == "stopped: a signal asked it to stop (SIGTERM)"


@pytest.mark.slow
def test_a_run_that_starts_over_is_measured_from_its_beginning(data: Path, tmp_path: Path) -> None:
    """Not from the checkpoints that `--fresh` removes: three attempts with progress must not count as none."""
    LocalRun(data, tmp_path / "run", nproc=1).run()
    saved = str(tmp_path / "run" / "checkpoints" / "4" / "manifest.json")
    run = LocalRun(data, tmp_path / "run", "--fresh", nproc=1, kind="kill", rank=0, batch=6, after=saved)
    run.run()
    again = run.records[run.records.index(run.of(Launched)[1]) :]
    assert [record.step for record in again if isinstance(record, Started | Opened)] == [0, 0, 4]
    assert run.status().attempts == 2 and "--fresh" not in run.of(Launched)[1].command


def test_a_disk_that_takes_no_records_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state = LocalState(tmp_path)
    monkeypatch.setattr(StateFile, "flush", lambda self: False)
    state.begin("ingot train", 0)
    state.open(1, 0, 0)
    state.act(state.close(KILLED, 0))
    state.end()
    (line,) = capfd.readouterr().err.splitlines()  # said once
    assert line.startswith(f"warning: {tmp_path}/launch/state.jsonl cannot be written: its disk is full or read-only; ")
    assert len(state.records) == 5 and not (tmp_path / "launch").exists()


def test_a_disk_that_does_not_answer_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher that waits for it sees neither a hang nor a signal."""
    answers, flush = threading.Event(), StateFile.flush
    monkeypatch.setattr(StateFile, "flush", lambda self: answers.wait() and flush(self))
    monkeypatch.setattr(local_state, "DISK_SECONDS", 0.05)
    monkeypatch.setattr(local_state, "STUCK_SECONDS", 0.05)
    state = LocalState(tmp_path)
    state.begin("ingot train", 0)
    state.open(1, 0, 0)
    (line,) = capfd.readouterr().err.splitlines()
    assert "its disk does not answer; the run goes on" in line and not (tmp_path / "launch").exists()
    monkeypatch.setattr(local_state, "DISK_SECONDS", 60.0)
    monkeypatch.setattr(local_state, "STUCK_SECONDS", 60.0)
    answers.set()
    state.act(state.close(KILLED, 0))
    state.end()
    assert read_state(tmp_path / "launch" / "state.jsonl") == state.records and len(state.records) == 5


def test_a_launcher_that_another_one_has_followed_leaves_the_file_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = LocalState(tmp_path)
    first.begin("", 0)
    second = LocalState(tmp_path)
    second.begin("", 0)
    first.open(1, 0, 0)
    first.act(first.close(KILLED, 0))
    assert "another process has written it since; the run goes on" in capfd.readouterr().err
    second.open(1, 0, 0)
    assert [record.launch for record in read_state(tmp_path / "launch" / "state.jsonl") if isinstance(record, Launched)] == [
        "local.0", "local.1"]  # fmt: skip
    first.end(), second.end()


def test_one_machine_of_several_keeps_its_records_to_itself(tmp_path: Path) -> None:
    state = LocalState(tmp_path, is_kept=False)
    state.begin("", 0)
    state.open(1, 0, 0)
    assert state.close(KILLED, 0).action == "restart" and not (tmp_path / "launch").exists()


def test_a_restart_from_host_memory_says_so(tmp_path: Path) -> None:
    """And not the checkpoint, which is older."""
    state = LocalState(tmp_path)
    LaunchFolder(tmp_path).path.mkdir()
    LaunchFolder(tmp_path).add_job("train", str(os.getpid()))
    state.begin("ingot train", 0)
    state.open(1, 0, 0)
    state.act(state.close(KILLED, 8), "continuing from the copy of batch 14 in host memory")
    state.open(2, 8, 14)
    state.end()
    status = read_status(tmp_path)
    first, second = status.attempt_list
    assert first.reason == "continuing from the copy of batch 14 in host memory"
    assert (second.first_batch, second.is_copy) == (14, True)
    assert f"local.0.2 on {node_name()}, from batch 14 (a copy in host memory): not ended" in "\n".join(status.lines())


def test_a_lost_launcher_of_another_machine_is_not_called_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_NODE_NAME", "n7")
    state = LocalState(tmp_path)
    state.begin("ingot train", 0)
    state.open(1, 0, 0)
    state.end()
    monkeypatch.setenv("INGOT_NODE_NAME", "n8")
    status = read_status(tmp_path)
    assert status.state == "unknown: this machine cannot see its launcher" and not status.over
    assert status.next == "it was launched on n7: `ingot status` there says whether it still runs"


def test_the_only_machine_gets_no_strikes_in_folders_of_earlier_versions_either(tmp_path: Path) -> None:
    mark_start(tmp_path)
    for attempt in ("1", "2", "local.0.3"):
        record(tmp_path, attempt=attempt, rank=1, batch=10, kind="machine", message="killed", progress=False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert strikes(tmp_path, 1) == {}
    status = read_status(tmp_path)
    assert status.state == "not running" and status.attempts == 3 and not status.strikes


def test_a_damaged_state_file_refuses_the_run_before_anything_starts(tmp_path: Path) -> None:
    LaunchFolder(tmp_path).path.mkdir()
    (tmp_path / "launch" / "state.jsonl").write_text("not a record\n")
    with pytest.raises(StateError, match="is damaged, or something else has written it"):
        register_train(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["launch", "state.jsonl"]
    status = read_status(tmp_path)
    assert status.state == "never started" and "is damaged" in status.warnings[0]
    (tmp_path / "metrics.jsonl").touch()
    assert "after the command below, the command that started the run continues" in read_status(tmp_path).next


def test_a_run_that_is_ended_by_a_second_interrupt_says_that_it_has_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise StopNow

    monkeypatch.setattr(local_run, "run_attempt", interrupt)
    assert local_run.run_processes(["train"], Node(1, 1), tmp_path, command="ingot train") == EXIT_INTERRUPTED
    status = read_status(tmp_path)
    assert status.state == "stopped: a signal asked it to stop (Ctrl-C)" and status.advice == "ingot train"
    assert "stopped: ended at once by a second Ctrl-C, without saving; then stop" in "\n".join(status.lines())


def test_a_signal_between_two_attempts_ends_the_pause() -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert pause(60) == signal.SIGTERM and pause(0) == 0


def test_a_run_of_a_cluster_that_was_continued_by_hand_is_resumed_on_the_cluster(tmp_path: Path) -> None:
    launch = LaunchFolder(tmp_path)
    spec(run_folder=str(tmp_path), workdir="/", image=None).write()
    launch.add_job("slurm", "7")
    launch.add_job("train", "4242")
    assert spec_to_resume(tmp_path)[1] == "slurm"
