"""metrics.jsonl on a disk that is full."""

import json
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from conftest import TINY
from disks import mounted
from warm_process import run_warm

from ingot.report.metrics_file import MetricsFile, read_rows
from ingot.training.runtime.run_folder import ResumeState


def test_rows_that_cannot_be_written_are_kept_and_written_whole_when_there_is_room(tmp_path: Path) -> None:
    warnings: list[str] = []
    metrics = MetricsFile(str(tmp_path), warnings.append)
    metrics.begin(0, 100, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)  # for this process, its files end where a full disk would
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        for batch in range(20):
            metrics.row({"time/batch": batch}, batch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert metrics.path.stat().st_size == 100 and len(warnings) == 1
    assert "cannot write" in warnings[0] and "the run continues" in warnings[0]
    metrics.row({"time/batch": 20}, 20)
    metrics.end()
    assert [row["time/batch"] for row in read_rows(tmp_path)] == list(range(21))


def test_rows_that_wait_for_room_survive_the_process_in_a_copy_of_its_state(tmp_path: Path) -> None:
    """A restart that continues from host memory does not run those steps again."""
    metrics = MetricsFile(str(tmp_path))
    metrics.begin(0, 100, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        for batch in range(20):
            metrics.row({"time/batch": batch}, batch)
        state = json.loads(json.dumps(metrics.state()))
        assert msgspec.convert({"data": {}, "scaler": {}, "reporter": state}, ResumeState).reporter == state
        metrics.row({"time/batch": 20}, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    following = MetricsFile(str(tmp_path))
    following.begin(20, 100, state)
    assert list(following.state()) == ["metrics_bytes"]
    following.row({"time/batch": 20}, 20)
    following.end()
    assert [row["time/batch"] for row in read_rows(tmp_path)] == list(range(21))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=8m") as folder:
        yield folder


def test_a_run_goes_on_while_its_disk_is_full(data: Path, small_disk: Path) -> None:
    run = small_disk / "run"
    filled = threading.Event()

    def fill() -> None:
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_bytes().count(b"\n") < 3:
            time.sleep(0.01)
        with (small_disk / "filler").open("wb", buffering=0) as filler:
            for size in (1 << 16, 1):  # every byte
                try:
                    while True:
                        filler.write(bytes(size))
                except OSError:
                    pass
        filled.set()

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    command = [sys.executable, "-m", "ingot.cli.main", "train", *TINY, f"data={data}", f"save_folder={run}",
               "max_duration=60ba", "save_interval=1000ba"]  # fmt: skip
    done = run_warm(command, capture_output=True, text=True, timeout=120)
    thread.join(10)
    assert filled.is_set() and "warning: cannot write" in done.stdout and "60/60" in done.stdout, done.stdout
    assert done.returncode == 1 and "No space left on device" in done.stderr  # but its weights must be saved
    assert "Traceback" not in done.stderr
