"""An attempt that is asked to stop before its processes can listen ends as asked, and blames nobody."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from conftest import TINY

from ingot.errors import EXIT_CONTINUE
from ingot.launch.attempt import run_attempt
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
