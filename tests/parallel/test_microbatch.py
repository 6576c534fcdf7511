"""The microbatch and what is recomputed follow from the memory; what did not fit is remembered in the run folder."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY, Ingot
from harness import losses, train_here
from test_launch import LIMIT, WIDE

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.parallel.executors.base import RECOMPUTE_KINDS, MemoryUse, recompute_kinds
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import StepShape, estimate_memory
from ingot.report.metrics_file import read_rows
from ingot.training.microbatch_search import TRIED, MemoryPlan, MemorySearch, choose_microbatch, record_oom_size


@pytest.mark.parametrize(
    ("asked", "layout", "used"),
    [("auto", Layout(), 2), ("8", Layout(), 2), ("4", Layout(), 2), ("2", Layout(), 2), ("8", Layout(shard=2), 8)],
)
def test_a_run_starts_again_below_the_size_that_did_not_fit(
    asked: str, layout: Layout, used: int, data: Path, tmp_path: Path
) -> None:
    record_oom_size(tmp_path / "run", 4, layout)
    more = ["max_duration=1ba", f"device_train_microbatch_size={asked}", "data.eval=null"]
    train_here([*TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", *more])
    assert [row["trainer/device_train_microbatch_size"] for row in read_rows(tmp_path / "run")] == [used]


def test_starting_over_forgets_what_did_not_fit(data: Path, tmp_path: Path, ingot: Ingot) -> None:
    record_oom_size(tmp_path / "run", 4, Layout())
    more = ["max_duration=1ba", "device_train_microbatch_size=8", "data.eval=null"]
    ingot("train", "--fresh", *TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", *more)
    assert read_rows(tmp_path / "run")[0]["trainer/device_train_microbatch_size"] == 8
    assert not (tmp_path / "run" / "microbatch.json").exists()


def test_a_damaged_note_is_ignored(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "microbatch.json").write_text("{")
    more = ["max_duration=1ba", "device_train_microbatch_size=8", "data.eval=null"]
    train_here([*TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", *more])
    assert read_rows(tmp_path / "run")[0]["trainer/device_train_microbatch_size"] == 8


class FakeExecutor:
    """A device of a given size, on which passes need what a function says. One that cannot recover must not fail."""

    def __init__(self, limit: float | None, use: Callable[[str | None, int], MemoryUse], layout: Layout = Layout(),
                 recovers: bool = True):  # fmt: skip
        self.limit, self.use, self.layout, self.can_recover_from_oom = limit, use, layout, recovers
        self.enough_tokens = 4096 if recovers else 8192
        self.min_microbatches, self.recompute_kinds = 1, RECOMPUTE_KINDS
        self.microbatch, self.recompute, self.tried = 0, None, []
        self.hold_choices, self.holds_weights = {False: "weights gathered for each pass"}, False

    def set_recompute(self, kind: str | None) -> None:
        self.recompute = kind

    def hold_weights(self, hold: bool) -> None:
        self.holds_weights = hold

    def memory_limit(self) -> float | None:
        return self.limit

    def all_gather(self, values: list[float]) -> list[list[float]]:
        return [values]

    def probe_memory(self, size: int) -> MemoryUse | None:
        use = self.use(self.recompute, size)
        self.tried.append((self.recompute, size))
        if use.peak > self.limit * (1 if self.can_recover_from_oom else TRIED):
            assert self.can_recover_from_oom, f"{size} sequences with {self.recompute} failed inside a collective"
            return None
        return use


def estimated(config: RunConfig, layout: Layout) -> Callable[[str | None, int], MemoryUse]:
    """Memory exactly as estimated."""

    def use(kind: str | None, size: int) -> MemoryUse:
        shape = replace(StepShape.of(config), micro=size, recompute=kind)
        needs = estimate_memory(config.model, layout, config.parallel, shape)
        return MemoryUse(int(needs.weights + needs.gradients + needs.optimizer), int(needs.total))

    return use


@pytest.mark.parametrize(
    ("arguments", "layout", "gibibytes", "recomputed"),
    [
        ("mpt-7b", Layout(shard=8), 80, None),
        ("mpt-13b", Layout(shard=8), 80, "selective"),
        ("mpt-13b", Layout(shard=8), 140, None),
        ("mpt-30b", Layout(shard=8), 80, "full"),
        ("mpt-13b device_train_microbatch_size=1", Layout(shard=8), 80, None),
        ("mpt-7b device_train_microbatch_size=8", Layout(shard=8), 80, "selective"),
        ("mpt-13b parallel.pipeline_schedule=zero_bubble", Layout(shard=4, pipeline=2), 80, "full"),
        ("mpt-7b activation_checkpointing=full", Layout(shard=8), 80, "full"),
        ("mpt-7b activation_checkpointing=none", Layout(shard=8), 80, None),
        ("mpt-30b", Layout(shard=8), None, None),
    ],
)
def test_ranks_recompute_as_little_as_leaves_room_for_some_sequences_and_never_fail(
    arguments: str, layout: Layout, gibibytes: int | None, recomputed: str | None, tmp_path: Path
) -> None:
    config = load_config(RunConfig, [*arguments.split(), "data=x"])
    executor = FakeExecutor(gibibytes and gibibytes << 30, estimated(config, layout), layout, recovers=False)
    executor.recompute_kinds = recompute_kinds(config, layout)
    choose_microbatch(config, executor, tmp_path)  # type: ignore[arg-type]
    assert executor.recompute == recomputed
    if config.activation_checkpointing == "auto" and gibibytes:
        assert executor.tried[0][1] == 1  # of the kind that needs the least


def test_a_model_too_large_for_several_ranks_is_an_error_that_is_found_at_once(tmp_path: Path) -> None:
    config = load_config(RunConfig, ["mpt-30b", "data=x"])
    executor = FakeExecutor(80 << 30, estimated(config, Layout(shard=2)), Layout(shard=2), recovers=False)
    with pytest.raises(AssertionError, match="1 sequences with full failed"):  # of the fake; a real one says what to do
        choose_microbatch(config, executor, tmp_path)  # type: ignore[arg-type]
    assert executor.tried == [("full", 1)]


@pytest.mark.parametrize(
    ("fits", "asked", "size", "recomputed", "said"),
    [
        (
            (99, 99, 99),
            "auto",
            32,
            None,
            [
                "32 sequences (largest divisor of 1024 within 65,536 tokens; tested before step 1)",
                "none (1.0 of 1.0 GiB with optimizer state)",
            ],
        ),
        ((2, 5, 99), "auto", 2, None, ["2 sequences (largest divisor of 1024 that fits; tested before step 1)"]),
        ((1, 5, 99), "auto", 4, "selective", ["selective (", "; the largest microbatch otherwise: none: 1 sequence"]),
        ((0, 1, 99), "auto", 32, "full", ["full (", "otherwise: none: 0 sequences, selective: 1 sequence"]),
        ((1, 1, 1), "auto", 1, None, ["none (", "otherwise: selective: 1 sequence, full: 1 sequence"]),
        ((0, 0, 1), "auto", 1, "full", ["that fits"]),
        ((8, 8, 8), 8, 8, None, ["8 sequences (as configured)", "none ("]),
        ((4, 7, 8), 8, 8, "full", ["as configured", "full ("]),
        ((4, 4, 4), 8, 8, "full", ["as configured", "full; the largest"]),  # the first step will halve it
    ],
)
def test_on_one_gpu_as_little_is_recomputed_as_leaves_room_for_4096_tokens(
    fits: tuple[int, int, int], asked: int | str, size: int, recomputed: str | None, said: list[str], tmp_path: Path
) -> None:
    """By what would fit; tests/train/test_gpu.py has a real one."""
    rooms = dict(zip((None, "selective", "full"), fits, strict=True))
    executor = FakeExecutor(1 << 30, lambda kind, n: MemoryUse(0, (1 << 30) + (n > rooms[kind])))
    config = load_config(RunConfig, ["mpt-7b", f"device_train_microbatch_size={asked}", "data=x"])
    decisions = " ".join(choose_microbatch(config, executor, tmp_path))  # type: ignore[arg-type]
    assert (executor.microbatch, executor.recompute) == (size, recomputed)
    assert all(text in decisions for text in said), decisions


@pytest.mark.parametrize(
    ("arguments", "gibibytes", "said"),
    [
        ("llama-8b", 80, "not even one sequence of 8,192 tokens fits: about 140.3 GiB (weights 29.9, gradients 29.9, "),
        ("llama-8b", 80, "of 80.0 GiB; use 4 such GPUs (parallel.shard=4), or a smaller model"),
        ("llama-8b", 134, "use max_seq_len=4096, or 2 such GPUs (parallel.shard=2), or a smaller model"),
        (
            "mpt-7b max_seq_len=16384 activation_checkpointing=none",
            134,
            "use activation_checkpointing=full, or max_seq",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_its_numbers_and_what_would_fit(
    arguments: str, gibibytes: int, said: str, tmp_path: Path
) -> None:
    config = load_config(RunConfig, [*arguments.split(), "data=x"])
    executor = FakeExecutor(gibibytes << 30, lambda kind, n: MemoryUse(0, 200 << 30))
    with pytest.raises(ConfigError, match=re.escape(said)):
        choose_microbatch(config, executor, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "recomputed", "holds"), [(1000, None, True), (160, None, False), (105, "full", False)]
)
def test_weights_are_held_before_more_is_kept_for_the_backward_pass_only_if_they_fit(
    limit: int, recomputed: str | None, holds: bool, tmp_path: Path
) -> None:
    """100 are always needed, 60 by held weights, 20 for each sequence that recomputes nothing."""

    def use(kind: str | None, n: int) -> MemoryUse:
        kept = 100 + 60 * executor.holds_weights
        return MemoryUse(kept, kept + n * {None: 20, "selective": 10, "full": 1}[kind])

    executor = FakeExecutor(limit, use)
    executor.hold_choices = {True: "weights gathered once per step", False: "weights gathered for each pass"}
    config = load_config(RunConfig, ["mpt-7b", "data=x"])
    decisions = choose_microbatch(config, executor, tmp_path)  # type: ignore[arg-type]
    assert (executor.recompute, executor.holds_weights) == (recomputed, holds)
    assert f"activation checkpointing: {recomputed or 'none'}, {executor.hold_choices[holds]} (" in decisions[1]


MATRIX = [  # as in benchmarks/microbatch.py --matrix, which measures them on a GPU
    "mpt-125m", "mpt-1b", "mpt-7b", "llama-8b max_seq_len=2048", "llama-8b", "llama-8b optimizer.name=lion",
    "llama-1b max_seq_len=32768", "mpt-1b max_seq_len=8192", "mpt-7b optimizer.name=muon", "mpt-7b precision=fp8",
    "pythia-2.8b", "gpt3-2.7b optimizer.name=lion",
]  # fmt: skip


@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize("arguments", MATRIX)
def test_the_choice_is_the_one_that_trying_every_plan_and_size_would_find(
    arguments: str, recovers: bool, tmp_path: Path
) -> None:
    """On 134 GiB whose use is as estimated. Ranks that must not fail may stop one doubling short of the largest."""
    config = load_config(RunConfig, [*arguments.split(), "data=x", "global_train_batch_size=512"])
    limit, holding = 134 << 30, (True, False)

    def use(kind: str | None, size: int, hold: bool | None = None) -> MemoryUse:
        hold = executor.holds_weights if hold is None else hold
        shape = replace(StepShape.of(config), micro=size, recompute=kind, holds_weights=hold)
        needs = estimate_memory(config.model, Layout(), config.parallel, shape)
        return MemoryUse(int(needs.total - needs.activations - needs.working), int(needs.total))

    executor = FakeExecutor(limit, use, recovers=recovers)
    executor.hold_choices = {True: "weights gathered once per step", False: "weights gathered for each pass"}
    sizes = [1 << n for n in range(10) if config.max_seq_len << n <= 65536]
    plans = [(kind, hold) for kind in (None, "selective", "full") for hold in holding]
    largest = {plan: max((n for n in sizes if use(plan[0], n, plan[1]).peak <= limit), default=0) for plan in plans}
    enough = {hold: -(-(4096 if hold else executor.enough_tokens) // config.max_seq_len) for hold in holding}
    good = [plan for plan in plans if largest[plan] >= min(sizes[-1], enough[plan[1]])]
    best = good[0] if good else max(plans, key=lambda plan: largest[plan])
    if largest[best] == 0:
        with pytest.raises(AssertionError if not recovers else ConfigError):
            choose_microbatch(config, executor, tmp_path)  # type: ignore[arg-type]
        return
    choose_microbatch(config, executor, tmp_path)  # type: ignore[arg-type]
    assert (executor.recompute, executor.holds_weights) == best
    assert executor.microbatch == largest[best] or (not recovers and 2 * executor.microbatch == largest[best])


def search(peaks: Callable[[int], int], kept: int, limit: int, sizes: list[int]) -> tuple[int, list[int]]:
    """The size that ranks choose, and the sizes that they try."""
    executor = FakeExecutor(limit, lambda kind, n: MemoryUse(kept, peaks(n)), recovers=False)
    plans = [MemoryPlan(None, holds_weights=False)]
    found = MemorySearch(executor, sizes, limit, lambda plan, n: 0.0).run(plans, seq_len=1)  # type: ignore[arg-type]
    return found[1], [size for _, size in executor.tried]


@pytest.mark.parametrize(("limit", "size"), [(99, 1), (119, 2), (139, 4), (159, 6), (160, 8), (10_000, 64)])
def test_ranks_choose_the_largest_size_on_the_line_through_the_last_two_tries(limit: int, size: int) -> None:
    def peak(n: int) -> int:  # the first is mostly something else; then 10 for each sequence
        return 95 if n == 1 else 80 + 10 * n

    assert search(peak, 80, limit, [1, 2, 4, 6, 8, 16, 32, 64])[0] == size


def test_the_line_is_trusted_up_to_the_next_doubling_only() -> None:
    """Peaks bend upwards where another part of the step takes over."""
    assert search({1: 85, 2: 84, 4: 90}.__getitem__, 60, 115, [1, 2, 4, 8, 16, 32]) == (8, [1, 2, 4])


@pytest.mark.parametrize(("limit", "tried"), [(153, [1, 2, 4]), (154, [1, 2, 4, 8])])
def test_ranks_try_a_size_only_where_it_cannot_fail(limit: int, tried: list[int]) -> None:
    """80 are kept and 40 come with 4 sequences: at most 80 with 8. 160 is within 4% of 154, but not of 153."""
    assert search({1: 95, 2: 100, 4: 120, 8: 130}.__getitem__, 80, limit, [1, 2, 4, 8])[1] == tried


@pytest.mark.slow
def test_torchrun_continues_with_half_the_microbatch_after_one_rank_ran_out_of_memory(
    data: Path, tmp_path: Path
) -> None:
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
