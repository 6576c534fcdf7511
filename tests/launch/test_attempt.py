"""An attempt that is asked to stop before its processes can listen ends as asked, and blames nobody. A process that
fails leaves its reason for the launcher before it prints it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import TINY

from ingot.errors import EXIT_CONTINUE
from ingot.launch.attempt import run_attempt
from ingot.launch.failure import VARIABLE, read_failure
from ingot.launch.node import Node


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_request_while_the_processes_start_is_no_failure(data: Path, tmp_path: Path, number: signal.Signals) -> None:
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
    assert (outcome.code, outcome.asked, outcome.failure) == (EXIT_CONTINUE, True, None)


def test_a_failure_is_recorded_even_if_it_cannot_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "failure"
    command = [sys.executable, "-m", "ingot.cli.main", "recipes", "show", "no-such-recipe"]
    with open("/dev/full", "w") as full:
        subprocess.run(command, env=os.environ | {VARIABLE: str(path)}, stdout=full, stderr=full, timeout=120)
    failure = read_failure(path, 1)
    assert (failure.kind, failure.exit_code) == ("user", 2) and "no-such-recipe" in failure.message


def test_a_failure_is_printed_even_if_it_cannot_be_recorded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ingot.cli.main", "recipes", "show", "no-such-recipe"]
    env = os.environ | {VARIABLE: str(tmp_path / "absent" / "failure")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "no-such-recipe" in done.stderr
