"""The microbatch and what is recomputed follow from the memory; what did not fit is remembered in the run folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY, Ingot
from harness import losses, train_here
from test_launch import LIMIT, WIDE

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.parallel.layout import Layout
from ingot.report.metrics_file import read_rows
from ingot.training import microbatch_search as microbatch
from ingot.training.microbatch_search import choose_recompute, remember_too_much


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


@pytest.mark.parametrize(
    ("arguments", "layout", "gibibytes", "recomputed"),
    [
        ("mpt-7b", Layout(shard=8), 80, None),
        ("mpt-13b", Layout(shard=8), 80, "selective"),
        ("mpt-13b", Layout(shard=8), 140, None),
        ("mpt-30b", Layout(shard=8), 80, "full"),
        ("mpt-13b device_train_microbatch_size=1", Layout(shard=8), 80, None),
        ("mpt-7b device_train_microbatch_size=8", Layout(shard=8), 80, "selective"),
        ("mpt-30b", Layout(shard=2), 80, "full"),  # which does not fit either
        ("mpt-13b parallel.pipeline_schedule=zero_bubble", Layout(shard=4, pipeline=2), 80, "full"),
        ("mpt-7b activation_checkpointing=full", Layout(shard=8), 80, "full"),
        ("mpt-30b activation_checkpointing=none", Layout(shard=8), 80, None),
        ("mpt-30b", Layout(shard=8), None, None),
    ],
)
def test_a_spread_model_recomputes_as_little_as_leaves_room_for_some_sequences(
    arguments: str, layout: Layout, gibibytes: int | None, recomputed: str | None
) -> None:
    config = load_config(RunConfig, [*arguments.split(), "data=x"])
    assert choose_recompute(config, layout, gibibytes and gibibytes << 30)[0] == recomputed


@pytest.mark.parametrize(
    ("fits", "asked", "size", "recomputed", "said"),
    [
        ((99, 99, 99), "auto", 32, None, "within 65536 tokens, enough to keep a GPU busy, which fits, tried before"),
        ((2, 5, 99), "auto", 2, None, "the largest that fits, tried before the first step (1.0 GiB with optimizer"),
        ((1, 5, 99), "auto", 4, "selective", "; recomputed: selective, since the largest would be 1 with nothing"),
        (
            (0, 1, 99),
            "auto",
            32,
            "full",
            "; recomputed: full, since the largest would be 0 with nothing, 1 with selective",
        ),
        ((1, 1, 1), "auto", 1, None, "; recomputed: nothing, since the largest would be 1 with selective, 1 with full"),
        ((0, 0, 1), "auto", 1, "full", "the largest that fits"),
        ((8, 8, 8), 8, 8, None, "as configured; recomputed: nothing"),
        ((4, 7, 8), 8, 8, "full", "as configured; recomputed: full"),
        ((4, 4, 4), 8, 8, "full", "as configured; recomputed: full"),  # the first step will halve it
    ],
)
def test_on_one_gpu_as_little_is_recomputed_as_leaves_room_for_4096_tokens(
    fits: tuple[int, int, int], asked: int | str, size: int, recomputed: str | None, said: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """By what would fit; tests/train/test_gpu.py has a real one."""

    def largest(config: RunConfig, model: Any, device: torch.device, sizes: list[int]) -> tuple[int, int]:
        room = fits[microbatch.KINDS.index(model.gpt.activation_checkpointing)]
        return max([n for n in sizes if n <= room], default=0), 1 << 30

    monkeypatch.setattr(microbatch, "_largest_that_fits", largest)
    config = load_config(RunConfig, ["mpt-7b", f"device_train_microbatch_size={asked}", "data=x"])
    model = SimpleNamespace(gpt=SimpleNamespace(activation_checkpointing=None))
    found, why = microbatch.choose_microbatch(config, model, torch.device("cuda"), None, tmp_path)  # type: ignore[arg-type]
    assert (found, model.gpt.activation_checkpointing) == (size, recomputed)
    assert said in why


def test_a_model_that_does_not_fit_at_all_is_refused_with_what_is_left_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbatch, "_largest_that_fits", lambda *_: (0, 0))
    for asked, advice in (("auto", "use a shorter"), ("none", "use activation_checkpointing=true, a shorter")):
        config = load_config(RunConfig, ["mpt-30b", f"activation_checkpointing={asked}", "data=x"])
        with pytest.raises(ConfigError, match=advice):
            microbatch.choose_microbatch(
                config, SimpleNamespace(gpt=SimpleNamespace()), torch.device("cuda"), None, tmp_path
            )  # type: ignore[arg-type]


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
