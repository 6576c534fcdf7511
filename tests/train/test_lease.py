"""Who owns a run folder when attempts follow each other, and how what is left of an earlier one ends: processes that
hold a lease for real, with shorter times."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm_process import WarmProcess

from ingot.errors import EXIT_FAULT, FencedError, IngotError, OwnerError
from ingot.training.runtime import lease
from ingot.training.runtime.fence import AgentClock
from ingot.training.runtime.lease import Lease, clear_stop_request

HOLD = """
import sys, threading, time
from pathlib import Path
from ingot.training.runtime import fence, lease
lease.BEAT_SECONDS, fence.FENCE_SECONDS, fence.CHECK_SECONDS, fence.GRACE_SECONDS = 0.1, 1.0, 0.1, 1.0
lease.FENCE_SECONDS = fence.FENCE_SECONDS
"""
OWNER = HOLD + "held = lease.Lease(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(60)"
WATCHED = HOLD + "fence.watch_agent()\nprint('held', flush=True)\ntime.sleep(60)"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def begin(script: str, *arguments: object, **env: str) -> subprocess.Popen[str]:
        process = WarmProcess(
            [sys.executable, "-c", script, *map(str, arguments)], env=os.environ | env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def owner_elsewhere(run: Path, epoch: int | None, age: float) -> None:
    owner = {"host": "elsewhere", "pid": 1, "started": "1", "job": "7"} | ({"epoch": epoch} if epoch else {})
    (run / "owner.json").write_text(json.dumps(owner))
    then = time.time() - age
    os.utime(run / "owner.json", (then, then))


def test_the_owner_of_an_attempt_ends_when_a_later_one_has_the_folder(start: Start, tmp_path: Path) -> None:
    process = start(OWNER, tmp_path, INGOT_EPOCH="3")
    owner_elsewhere(tmp_path, 4, 0)
    assert process.wait(10) == EXIT_FAULT
    assert "this rank ends itself" in process.communicate()[1]
    assert json.loads((tmp_path / "owner.json").read_text())["epoch"] == 4


def test_the_owner_of_an_attempt_ends_when_the_file_system_does_not_answer(start: Start, tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to waits, as for a server that has gone."""
    process = start(OWNER, tmp_path, INGOT_EPOCH="3")
    os.mkfifo(tmp_path / "pipe")
    os.replace(tmp_path / "pipe", tmp_path / "owner.json")
    assert process.wait(10) == EXIT_FAULT
    assert "has not answered" in process.communicate()[1]


def test_an_owner_without_an_epoch_is_not_ended_from_outside(start: Start, tmp_path: Path) -> None:
    process = start(OWNER, tmp_path)
    owner_elsewhere(tmp_path, 4, 0)
    time.sleep(1.5)
    assert process.poll() is None


def test_an_owner_that_was_suspended_goes_on_if_nobody_has_taken_over(start: Start, tmp_path: Path) -> None:
    process = start(OWNER, tmp_path, INGOT_EPOCH="3")
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    process.send_signal(signal.SIGCONT)
    time.sleep(2)
    assert process.poll() is None
    (tmp_path / "owner.json").unlink()  # nor does a file that somebody has removed end it
    time.sleep(2)
    assert process.poll() is None and json.loads((tmp_path / "owner.json").read_text())["epoch"] == 3


def test_a_rank_ends_when_its_agent_has_gone(start: Start, tmp_path: Path) -> None:
    clock = AgentClock(tmp_path / "agent")
    process = start(WATCHED, INGOT_AGENT_FILE=str(tmp_path / "agent"))
    for _ in range(20):
        time.sleep(0.1)
        clock.show()
        (tmp_path / "agent").unlink(missing_ok=True)  # somebody cleans the temporary folder
    assert process.poll() is None
    assert process.wait(10) == EXIT_FAULT
    assert "the agent of this node has given no sign of life" in process.communicate()[1]


@pytest.mark.parametrize(("age", "least", "most"), [(0, 1.0, 3.0), (60, 0.0, 0.9)])
def test_a_later_attempt_waits_until_an_earlier_owner_must_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, least: float, most: float
) -> None:
    monkeypatch.setenv("INGOT_EPOCH", "4")
    monkeypatch.setattr(lease, "FENCE_SECONDS", 1.0)
    monkeypatch.setattr(lease, "MARGIN_SECONDS", 0.5)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 1000.0)  # or this process would end itself
    owner_elsewhere(tmp_path, 3, age)
    began = time.monotonic()
    held = Lease(tmp_path)
    assert least <= time.monotonic() - began <= most
    held.confirm()
    owner_elsewhere(tmp_path, 5, 0)
    with pytest.raises(OwnerError, match="was taken over by process 1 on elsewhere"):
        held.confirm()
    held.release()
    assert (tmp_path / "owner.json").exists()


@pytest.mark.parametrize(("ended", "least", "most"), [("3", 0.0, 0.9), ("2", 1.0, 3.0)])
def test_nobody_waits_for_an_owner_whose_end_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str, least: float, most: float
) -> None:
    monkeypatch.setenv("INGOT_EPOCH", "4")
    monkeypatch.setenv("INGOT_ENDED_EPOCH", ended)
    monkeypatch.setattr(lease, "FENCE_SECONDS", 1.0)
    monkeypatch.setattr(lease, "MARGIN_SECONDS", 0.5)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 1000.0)
    owner_elsewhere(tmp_path, 3, 0)
    began = time.monotonic()
    held = Lease(tmp_path)
    assert least <= time.monotonic() - began <= most
    held.release()


def test_what_is_left_of_an_earlier_attempt_does_not_start_and_is_not_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_EPOCH", "4")
    owner_elsewhere(tmp_path, 5, 0)
    with pytest.raises(FencedError, match="attempt 5 has begun") as error:
        Lease(tmp_path)
    assert error.value.exit_code == EXIT_FAULT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner.json"]


def test_a_run_of_somebody_else_is_not_taken_over_by_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 1000.0)
    monkeypatch.setenv("INGOT_EPOCH", "4")
    mine = Lease(tmp_path)
    monkeypatch.delenv("INGOT_EPOCH")
    with pytest.raises(OwnerError, match="is in use by"):
        Lease(tmp_path)
    mine.release()
    mine = Lease(tmp_path)
    monkeypatch.setenv("INGOT_EPOCH", "5")
    with pytest.raises(OwnerError, match="is in use by"):
        Lease(tmp_path)
    mine.release()


def test_nothing_of_a_dead_owner_is_left(tmp_path: Path) -> None:
    owner_elsewhere(tmp_path, None, age=120)
    held = Lease(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["owner.json"]
    assert json.loads((tmp_path / "owner.json").read_text())["pid"] == os.getpid()
    held.release()
    assert not list(tmp_path.iterdir())


def test_an_owner_from_the_future_is_dead_if_it_does_not_touch_its_file(tmp_path: Path) -> None:
    owner_elsewhere(tmp_path, None, age=-3600)
    clear_stop_request(tmp_path)  # does not wait at all
    began = time.monotonic()
    Lease(tmp_path, expiry=0.5).release()
    assert 0.4 <= time.monotonic() - began < 5
    owner_elsewhere(tmp_path, None, age=-3600)
    beat = threading.Timer(0.3, os.utime, [tmp_path / "owner.json"])
    beat.start()
    with pytest.raises(OwnerError, match="is in use by process 1 on elsewhere"):
        Lease(tmp_path, expiry=5)
    beat.join()


def test_drafts_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"host": socket.gethostname(), "pid": 1 << 22, "started": "1"}
    kept = {".owner.json.1": here | {"host": "elsewhere"}, ".owner.json.2": {}, ".owner.json.dead-3": here}
    for name, owner in (kept | {".owner.json.4194304": here}).items():
        (tmp_path / name).write_text(json.dumps(owner))
    Lease(tmp_path).release()
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
    monkeypatch.setattr(lease, "DRAFT_SECONDS", -1.0)
    Lease(tmp_path).release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"\xff", None])
def test_another_file_in_its_place_does_not_hold_up_the_owner(tmp_path: Path, content: bytes | None) -> None:
    held = Lease(tmp_path)
    (tmp_path / "owner.json").unlink()
    if content is None:
        os.mkfifo(tmp_path / "owner.json")
    else:
        (tmp_path / "owner.json").write_bytes(content)
    with pytest.raises(IngotError):
        held.confirm()
    held.lost = True
    held.release()
