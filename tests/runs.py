"""Runs of several real processes, faults injected into them, and the oracle: they end as if nothing had happened."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY, Shared

from ingot.checkpoint.load import open_weights
from ingot.launch.supervisor.failure_log import read_failures
from ingot.report.metrics_file import read_rows

BATCHES, EVERY = 24, 4
RANKS = 2
HOOK = str(Path(__file__).parent / "faults" / "hook")
ARGUMENTS = [*TINY, f"max_duration={BATCHES}ba", f"save_interval={EVERY}ba", "data.eval=null", "loggers.samples=true",
             "optimizer.eps=1e-5", "global_train_batch_size=9"]  # fmt: skip


class Run:
    """`ingot train` in a folder, as a user starts it, with a fault to come."""

    def __init__(self, data: Path, folder: Path, *more: str, nproc: int | None = None, **fault: object):
        self.folder = folder
        nproc = RANKS if nproc is None else nproc
        self.command = [sys.executable, "-m", "ingot.cli.main", "train", *ARGUMENTS, f"data={data}",
                        f"save_folder={folder}", "--nproc", str(nproc), *more]  # fmt: skip
        path = os.pathsep.join(filter(None, [HOOK, os.environ.get("PYTHONPATH")]))
        self.env = os.environ | {"PYTHONPATH": path, "INGOT_TEST_FAULT": json.dumps(fault or None)}

    def start(self) -> "Run":
        self.process = subprocess.Popen(
            self.command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self

    def end(self, code: int = 0, timeout: float = 150) -> str:
        """Wait for it; returns everything that it printed."""
        out, errors = self.process.communicate(timeout=timeout)
        assert self.process.returncode == code, (self.process.returncode, out, errors)
        return out + errors

    def run(self, code: int = 0) -> str:
        return self.start().end(code)

    def ranks(self) -> dict[int, int]:
        """Ranks and their process ids."""
        pid = self.process.pid
        try:
            found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            env = {int(p): Path(f"/proc/{p}/environ").read_bytes().split(b"\0") for p in found}
        except OSError:  # one has just gone
            return {}
        return {int(v.split(b"=")[1]): p for p, values in env.items() for v in values if v.startswith(b"RANK=")}

    def wait(self, seen: Callable[[], object]) -> None:
        while not seen():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)

    def wait_for_batch(self, batch: int) -> None:
        path = self.folder / "metrics.jsonl"
        self.wait(lambda: path.exists() and path.read_bytes().count(b"\n") >= batch)

    def failures(self) -> list[dict]:
        """Since the run was last started."""
        return read_failures(self.folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    _, tensors = open_weights(folder)
    return {name: tensors.get(name) for name in tensors.names()}


def consumed(folder: Path) -> dict[int, list[int]]:
    """Batches and the samples that all ranks together trained on in each."""
    found: dict[int, list[int]] = {}
    for path in (folder / "samples").iterdir():
        for line in path.read_text().splitlines():
            batch, _, ids = line.partition(":")
            found.setdefault(int(batch), []).extend(map(int, ids.split()))
    return {batch: sorted(ids) for batch, ids in sorted(found.items())}


def assert_as_if_nothing_happened(folder: Path, whole: Path, close: float | None = None) -> None:
    """Final weights equal (bitwise, or within a tolerance on another number of processes); each sample once; the
    metrics without a gap or a repetition."""
    one, two = weights(folder), weights(whole)
    assert one.keys() == two.keys()
    for name in one:
        same = (
            torch.equal(one[name], two[name])
            if close is None
            else torch.allclose(one[name], two[name], rtol=close, atol=close)
        )
        assert same, name
    assert consumed(folder) == consumed(whole)
    assert list(consumed(whole)) == list(range(1, BATCHES + 1))
    assert [row["time/batch"] for row in read_rows(folder)] == list(range(1, BATCHES + 1))
    assert (folder / "FINISHED").read_text() == f"{BATCHES}\n"
    assert not (folder / "owner.json").exists()


@pytest.fixture(autouse=True)
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of ranks of each `Run` of a test: two, three in the slow set."""
    count = 3 if request.node.get_closest_marker("slow") else 2
    monkeypatch.setitem(globals(), "RANKS", count)
    return count


@pytest.fixture
def whole(data: Path, shared: Shared, ranks: int) -> Path:
    """The uninterrupted run that all others must equal."""
    return shared(f"whole-{ranks}", lambda folder: Run(data, folder / "run", nproc=ranks).run()) / "run"
