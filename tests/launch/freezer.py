"""A fixture for whoever names it: processes that not even SIGKILL ends."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose frozen processes are in state D and survive SIGKILL."""
    group = Path("/sys/fs/cgroup/freezer") / f"ingot-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("there is no freezer to make a process that cannot be killed")
    yield group
    (group / "freezer.state").write_text("THAWED")
    end = time.monotonic() + 30
    while (group / "cgroup.procs").read_text() and time.monotonic() < end:
        time.sleep(0.05)
    group.rmdir()
