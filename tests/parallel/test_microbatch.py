"""A microbatch size that did not fit is remembered in the run folder, for whatever starts the run again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY, Ingot
from harness import losses, train_here
from test_launch import LIMIT, WIDE

from ingot.parallel.config import Layout
from ingot.report.metrics_file import read_rows
from ingot.train.microbatch import remember_too_much


@pytest.mark.parametrize(
    ("asked", "layout", "used"),
    [("auto", Layout(), 2), ("8", Layout(), 2), ("4", Layout(), 2), ("2", Layout(), 2), ("8", Layout(shard=2), 8)],
)
def test_a_run_starts_again_below_the_size_that_did_not_fit(
    asked: str, layout: Layout, used: int, data: Path, tmp_path: Path
) -> None:
    remember_too_much(tmp_path / "run", 4, layout)
    more = ["max_duration=1ba", f"device_train_microbatch_size={asked}", "data.eval=null"]
    train_here([*TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", *more])
    assert [row["trainer/device_train_microbatch_size"] for row in read_rows(tmp_path / "run")] == [used]


def test_starting_over_forgets_what_did_not_fit(data: Path, tmp_path: Path, ingot: Ingot) -> None:
    remember_too_much(tmp_path / "run", 4, Layout())
    more = ["max_duration=1ba", "device_train_microbatch_size=8", "data.eval=null"]
    ingot("train", "--fresh", *TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", *more)
    assert read_rows(tmp_path / "run")[0]["trainer/device_train_microbatch_size"] == 8
    assert not (tmp_path / "run" / "microbatch.json").exists()


def test_a_damaged_note_is_no_note(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "microbatch.json").write_text("{")
    more = ["max_duration=1ba", "device_train_microbatch_size=8", "data.eval=null"]
    train_here([*TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", *more])
    assert read_rows(tmp_path / "run")[0]["trainer/device_train_microbatch_size"] == 8


@pytest.mark.slow
def test_torchrun_goes_on_with_half_the_microbatch_after_one_rank_ran_out_of_memory(data: Path, tmp_path: Path) -> None:
    """A real limit on one rank's memory in the middle of a run; torchrun knows nothing of microbatches."""
    folder, plain, hook = tmp_path / "run", tmp_path / "plain", tmp_path / "hook"
    hook.mkdir()
    names = {"METRICS": folder / "metrics.jsonl", "MARKER": tmp_path / "marker", "LIMITED_RANK": "1"}
    values = "".join(f"{name} = {str(value)!r}\n" for name, value in names.items())
    (hook / "sitecustomize.py").write_text(f"{values}MARGIN = {50 << 20}\n{LIMIT}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3",
               "-m", "ingot.cli.main", "train", *TINY, *WIDE, f"data={data}"]  # fmt: skip
    for save, more in ((plain, {}), (folder, {"PYTHONPATH": str(hook), "MALLOC_MMAP_THRESHOLD_": "1000000"})):
        env = os.environ | {"OMP_NUM_THREADS": "1"} | more
        done = subprocess.run(
            [*command, f"save_folder={save}"], capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((folder / "microbatch.json").read_text()) == {"too_much": 8, "layout": "shard=2"}
    rows = read_rows(folder)
    assert [row["time/batch"] for row in rows] == list(range(1, 13))
    assert rows[-1]["trainer/device_train_microbatch_size"] == 4
    assert losses(plain) == pytest.approx(losses(folder), rel=1e-5)
