"""An attempt that is asked to stop before its processes can listen ends as asked, and blames nobody. A process that
fails leaves its reason for the launcher before it prints it."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

import pytest
from conftest import TINY

from ingot.errors import EXIT_CONTINUE
from ingot.launch.agent import hang_diagnosis
from ingot.launch.agent.attempt import run_attempt
from ingot.launch.agent.failure import FAILURE_VARIABLE, exit_code_of, read_failure
from ingot.launch.agent.local_ranks import Node
from ingot.launch.agent.rank_group import own_folder
from ingot.launch.protocol import ATTEMPT_VARIABLE
from ingot.training.runtime.heartbeat import Beat


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_request_while_the_processes_start_is_not_a_failure(
    data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """The time limit's signal may come a minute early, into the imports."""

    def ask() -> None:
        while not (tmp_path / "logs" / "rank-1.log").exists():
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    command = ["train", *TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", "max_duration=100000ba"]
    outcome = run_attempt(command, Node(2, 2), tmp_path / "logs", "1")
    thread.join()
    assert (outcome.code, outcome.signal, outcome.failure) == (EXIT_CONTINUE, number, None)


def test_a_failure_is_recorded_even_if_it_cannot_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "failure"
    command = [sys.executable, "-m", "ingot.cli.main", "recipes", "show", "no-such-recipe"]
    with open("/dev/full", "w") as full:
        subprocess.run(command, env=os.environ | {FAILURE_VARIABLE: str(path)}, stdout=full, stderr=full, timeout=120)
    failure = read_failure(path, 1)
    assert (failure.kind, failure.exit_code) == ("user", 2) and "no-such-recipe" in failure.message


def test_a_failure_is_printed_even_if_it_cannot_be_recorded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ingot.cli.main", "recipes", "show", "no-such-recipe"]
    env = os.environ | {FAILURE_VARIABLE: str(tmp_path / "absent" / "failure")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "no-such-recipe" in done.stderr


def test_the_rank_that_the_others_wait_for_is_found_by_the_most_reliable_sign() -> None:
    def stack(function: str, file: str = "torch/distributed.py") -> str:
        return f'Current thread 0x1 (most recent call first):\n  File "{file}", line 7 in {function}\n'

    def beat(world: int = 9, total: int = 20, batch: int = 4, at: float = 100.0) -> Beat:
        return Beat(at, 3.0, 0.0, batch, "step", 0.0, world, total)

    stacks, beats = {rank: stack("all_reduce") for rank in range(3)}, {rank: beat() for rank in range(3)}
    cases = [
        ({1: stack("read", "data.py")}, {2: beat(world=8)}, 1, "it is in data.py:7 (read) while the others wait"),
        ({2: stack("barrier")}, {1: beat(world=8)}, 1, "it has joined 8 collectives and others 9"),
        ({2: stack("barrier")}, {1: beat(total=19)}, 1, "it has joined 19 collectives and others 20"),
        (
            {2: stack("barrier")},
            {1: beat(at=99.0)},
            2,
            "it waits in barrier and the others in all_reduce, as collective 9",
        ),
        ({}, {1: beat(at=99.0)}, 1, "all ranks wait"),
        ({}, {1: beat(at=99.0), 2: beat(batch=3)}, 2, "all ranks wait"),
    ]
    for odd_stacks, odd_beats, rank, words in cases:
        found, why = hang_diagnosis._find_culprit(stacks | odd_stacks, beats | odd_beats)
        assert found == rank and words in why


@pytest.mark.parametrize("given", [{}, {"TRITON_CACHE_DIR": "/own"}])
def test_in_a_job_kernels_are_cached_on_the_disk_of_the_node_unless_the_user_says_where(
    tmp_path: Path, given: dict[str, str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ.get('TRITON_CACHE_DIR', ''))"
    )
    for job, expected in (({ATTEMPT_VARIABLE: "7.0.1"}, given.get("TRITON_CACHE_DIR", tempfile.gettempdir())),
                          ({}, given.get("TRITON_CACHE_DIR", ""))):  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(tmp_path), **job, **given}
        run_attempt(["--version"], Node(1, 1), tmp_path, "1", env=env)
        seen = (tmp_path / "seen").read_text()
        assert seen.startswith(expected) and bool(seen) == bool(expected)


def test_a_folder_that_another_launcher_removed_as_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plain, removed = fcntl.flock, []

    def lose_once(lock: IO[str], how: int) -> None:
        if not removed:  # the other launcher was first, between opening the lock and taking it
            removed.append(Path(lock.name).parent)
            shutil.rmtree(removed[0])
        plain(lock, how)

    monkeypatch.setattr(fcntl, "flock", lose_once)
    with own_folder() as folder:
        assert folder.is_dir() and folder != removed[0]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_as_such_and_not_as_an_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAILURE_VARIABLE, str(tmp_path / "failure"))

    def write() -> int:
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)
        return 0

    assert exit_code_of(write) != 0
    said = capfd.readouterr().err.splitlines()[0]
    assert said == "error: cannot write a file: No space left on device; free some space or choose another folder"
    failure = read_failure(tmp_path / "failure", 1)
    assert failure is not None and failure.kind == "machine" and "internal" not in failure.message
