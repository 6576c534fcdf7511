"""What runs in pods: the supervisor in the first one, agents in all; and the exit codes that tell Kubernetes what to do.
A pod is a process of this machine, with a machine's name of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_cluster import HOOK
from runs import ARGUMENTS, assert_as_if_nothing_happened, whole
from specs import LAUNCH, spec
from state_records import StateRecords

from ingot.launch.kubernetes.pod_agent import decision_of, exit_code_of
from ingot.launch.protocol import EXIT_NEW_PODS, LaunchFolder
from ingot.launch.supervisor.records import (
    Action,
    Cause,
    Closed,
    Judged,
    Launched,
    Opened,
    Started,
    StopReason,
    StopRequested,
)

__all__ = ["whole"]
T = "2026-01-01T00:00:00+00:00"


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the undisturbed run, too."""
    monkeypatch.setattr("runs.RANKS", 2)
    return 2


class Pods(StateRecords):
    """Both pods of a run, as Kubernetes starts them."""

    def __init__(self, data: Path, folder: Path, *more: str, **fault: Any):
        self.folder, self.restart = folder / "run", 0
        self.spec = spec(
            run_folder=str(self.folder), workdir=str(folder), image=None, claims=[],
            arguments=["--", *ARGUMENTS, f"data={data}", f"save_folder={self.folder}", *more],
        )  # fmt: skip
        self.spec_file = folder / "spec.json"
        self.spec_file.write_text(self.spec.model_dump_json())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.fault = fault or None
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, order: tuple[int, ...] = (1, 0), **env: str) -> "Pods":
        self.processes = []
        for index in order:
            own = {
                "INGOT_JOB_ATTEMPT": f"{LAUNCH}.{self.restart}", "INGOT_RESTART": str(self.restart),
                "JOB_COMPLETION_INDEX": str(index), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
                "INGOT_JOB_TOKEN": "secret", "INGOT_NODE_NAME": f"m{index + 1}", "SLURMD_NODENAME": f"m{index + 1}", "INGOT_TEST_FAULT": json.dumps(self.fault),
                "PYTHONPATH": os.pathsep.join(filter(None, [HOOK, os.environ.get("PYTHONPATH")])),
            }  # fmt: skip
            with (self.folder.parent / f"pod-{index}.log").open("ab") as log:
                self.processes.append(subprocess.Popen(
                    [sys.executable, "-m", "ingot.launch.kubernetes.pod_agent", "--spec", str(self.spec_file)],
                    env=os.environ | own | env, stdout=log, stderr=log,
                ))  # fmt: skip
        self.restart += 1
        return self

    def codes(self, seconds: float = 180) -> set[int]:
        """The exit codes of all pods."""
        try:
            return {process.wait(seconds) for process in self.processes}
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_for_batch(self, batch: int) -> None:
        path = self.folder / "metrics.jsonl"
        end = time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < batch:
            assert time.monotonic() < end and self.processes[0].poll() is None, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.parent.glob("pod-*.log")))


@pytest.fixture
def pods(data: Path, tmp_path: Path) -> Iterator[Any]:
    made: list[Pods] = []

    def make(*more: str, **fault: Any) -> Pods:
        made.append(Pods(data, tmp_path, *more, **fault))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_two_pods_train_as_two_nodes_do_and_a_failing_rank_is_started_again_in_them(pods: Any, whole: Path) -> None:
    run = pods(kind="kill", node="m2", batch=11, attempts=[f"{LAUNCH}.0.1"]).start()
    assert run.codes() == {0}, run.said()
    assert run.of(Opened)[0].nodes == ("m1", "m2")  # machines, in the order of the pods
    (launched,) = run.of(Launched)
    assert (launched.launch, launched.back_end) == (LAUNCH, "kubernetes")
    assert run.of(Closed)[-1].cause.kind == "finished"
    assert_as_if_nothing_happened(run.folder, whole)
    assert run.start().codes(60) == {0}  # they find it finished
    assert "secret" not in "".join(p.read_text(errors="replace") for p in run.folder.rglob("*") if p.is_file())


@pytest.mark.slow
def test_a_drained_machine_saves_and_all_pods_are_replaced(pods: Any, whole: Path) -> None:
    run = pods(kind="slow", node="m1", batch=1, attempts="all", seconds=0.3).start()
    run.wait_for_batch(5)
    run.processes[0].send_signal(signal.SIGTERM)  # of the second pod, as when its machine is drained
    assert run.codes() == {EXIT_NEW_PODS}, run.said()
    (stop,) = run.of(StopRequested)
    assert stop.reason == "signal" and run.of(Closed)[-1].step >= 5
    run.fault = None
    assert run.start().codes() == {0}, run.said()
    assert [started.restart for started in run.of(Started)] == [0, 1] and len(run.of(Launched)) == 1
    assert_as_if_nothing_happened(run.folder, whole)


@pytest.mark.slow
def test_a_users_error_ends_both_pods_and_a_stop_by_the_user_too(pods: Any) -> None:
    run = pods("data.train.path=/nowhere").start((0, 1))
    assert run.codes() == {2}, run.said()
    assert (run.folder / "launch" / "HALT").exists() and run.of(Closed)[-1].cause.kind == "data"
    assert run.start().codes(60) == {2}  # nothing is tried again
    assert len(run.of(Opened)) == 1


def test_a_pod_without_the_token_is_refused_and_the_run_does_not_start(pods: Any) -> None:
    run = pods()
    run.start((1,), INGOT_JOB_TOKEN="another")
    stranger = run.processes
    run.restart = 0
    run.start((0,))
    end = time.monotonic() + 60
    while "does not know the job's token" not in run.said() and time.monotonic() < end:
        time.sleep(0.1)
    assert "does not know the job's token" in run.said() or "refuses this agent" in run.said(), run.said()
    assert not (run.folder / "metrics.jsonl").exists()
    for process in [*stranger, *run.processes]:
        process.kill()
        process.wait()


def records(*more: Any, restart: int = 0) -> list[Any]:
    launched = Launched(time=T, launch=LAUNCH, back_end="kubernetes", nodes=2)
    return [
        launched,
        Started(time=T, launch=LAUNCH, job=LAUNCH, restart=restart, host="m1", nodes=("m1", "m2"), step=0),
        *more,
    ]


def judged(action: Action, epoch: int = 1) -> Judged:
    return Judged(time=T, epoch=epoch, action=action, reason="why")


@pytest.mark.parametrize(
    ("action", "reason", "code"),
    [("finish", None, 0), ("requeue", None, EXIT_NEW_PODS), ("stop", "user", 0), ("stop", "wall-time", 0),
     ("stop", "signal", EXIT_NEW_PODS), ("halt", None, 3)],
)  # fmt: skip
def test_the_exit_code_follows_what_the_supervisor_has_decided(
    action: Action, reason: StopReason | None, code: int
) -> None:
    stop = [StopRequested(time=T, reason=reason)] if reason else []
    found = records(*stop, judged(action))
    assert exit_code_of(found, decision_of(found, LAUNCH, 0)) == code


def test_a_users_error_is_told_from_giving_up() -> None:
    opened = Opened(time=T, epoch=1, attempt=f"{LAUNCH}.0.1", nodes=("m1", "m2"), step=0)
    found = records(opened, Closed(time=T, epoch=1, cause=Cause("user", "no such key"), step=0), judged("halt"))
    assert exit_code_of(found, decision_of(found, LAUNCH, 0)) == 2


def test_the_decision_of_an_earlier_start_is_not_this_ones() -> None:
    before = records(judged("restart"), judged("requeue"))
    assert decision_of(before, LAUNCH, 1) is None  # the pods that replace the others
    assert decision_of(before, LAUNCH, 0) == before[-1]
    assert decision_of(before, LAUNCH, 0, since=len(before)) is None  # a PyTorchJob's restarts have no number
    again = [*before, *records()[1:], judged("requeue", 2)]
    assert decision_of(again, LAUNCH, 0, since=len(before)) == again[-1]
    ended = records(judged("halt"))
    assert decision_of(ended, LAUNCH, 1) == ended[-1]  # the launch is over
    assert decision_of([*ended, *records()], LAUNCH, 0) is None  # until somebody launches it again
    assert LaunchFolder(Path("/x")).path == Path("/x/launch")
