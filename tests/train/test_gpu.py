"""What only a GPU can show. Skipped where there is none."""

import gc
import json
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.data.loading.batch_loader import Batch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks once, at the first product of a process
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = ["model.d_model=256", "model.n_heads=4", "model.n_layers=4", "model.vocab_size=320", "max_seq_len=128",
          "global_train_batch_size=16", "max_duration=40ba", "scheduler.t_warmup=5ba", "optimizer.lr=0.003",
          "eval_interval=20ba", "save_interval=20ba"]  # fmt: skip


def run(data: Path, folder: Path, *more: str) -> list[dict[str, float]]:
    from ingot.api import train
    from ingot.config.load import load_config
    from ingot.config.run import RunConfig

    train(load_config(RunConfig, [*CONFIG, f"data={data}", f"save_folder={folder}", *more]))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    rows = run(data, tmp_path_factory.mktemp("fp32") / "run", "precision=fp32", "compile=false")
    return [row["loss/train/total"] for row in rows]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_mixed_precision_follows_fp32(
    data: Path, tmp_path: Path, reference: list[float], precision: str, compiled: str
) -> None:
    rows = run(data, tmp_path / "run", f"precision={precision}", f"compile={compiled}")
    losses = [row["loss/train/total"] for row in rows]
    assert losses[-1] == pytest.approx(reference[-1], rel=0.05) and losses[-1] < 0.6 * losses[0]
    assert "memory/peak_reserved_mem" in rows[-1] and rows[-1]["throughput/device/mfu"] > 0
    if precision == "fp16":
        assert rows[-1]["trainer/loss_scale"] > 1


def test_alibi_by_our_kernel_trains_as_by_the_additive_mask(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alibi = ["model.positions=alibi", "model.no_bias=true", "precision=bf16"]
    fast = run(data, tmp_path / "fast", *alibi)
    monkeypatch.setattr("ingot.model.kernels.choose_attention", lambda *_: ("sdpa", "for comparison"))
    mask = run(data, tmp_path / "mask", *alibi, "compile=false")
    assert fast[0]["loss/train/total"] == pytest.approx(mask[0]["loss/train/total"], rel=1e-3)
    assert fast[-1]["loss/train/total"] == pytest.approx(mask[-1]["loss/train/total"], rel=0.05)


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_wrapped_by_fsdp_a_run_trains_as_alone_and_by_the_same_kernels(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str
) -> None:
    from ingot.model.kernels import add_norm as norm_kernel

    kernel, calls = norm_kernel._norm_kernel, 0

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            nonlocal calls
            calls += 1
            return kernel[grid]

    monkeypatch.setattr(norm_kernel, "_norm_kernel", Counted())
    alone = run(data, tmp_path / "alone", "precision=bf16", f"compile={compiled}")
    before = calls
    wrapped = run(data, tmp_path / "wrapped", "precision=bf16", f"compile={compiled}", "parallel.shard=1")
    assert 0 < before < calls
    assert wrapped[0]["loss/train/total"] == pytest.approx(alone[0]["loss/train/total"], rel=1e-3)
    assert wrapped[-1]["loss/train/total"] == pytest.approx(alone[-1]["loss/train/total"], rel=0.05)


@pytest.mark.parametrize(
    "more", [["cuda_graphs=false"], ["cuda_graphs=true"], ["cuda_graphs=true", "parallel.shard=1"]]
)
def test_a_step_never_waits_for_the_device(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """With torch set to raise an error on any synchronization from the third step on, two more steps run through."""
    from ingot.training import testing

    steps = 0

    def watched(trainer: Any, batch: Batch, step: testing.Step) -> Any:
        nonlocal steps
        steps += 1
        torch.cuda.set_sync_debug_mode("error" if steps > 2 else "default")  # the second step tries a CUDA graph
        try:
            return step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(testing, "_wrapper", watched)
    run(data, tmp_path / "run", "max_duration=4ba", "device_train_microbatch_size=8", *more)
    assert steps == 4


@pytest.mark.parametrize("more", [[], ["compile=false"], ["precision=fp16"], ["model.positions=alibi"],
                                  ["optimizer.name=muon"], ["parallel.shard=1"]], ids=str)  # fmt: skip
def test_a_run_with_cuda_graphs_has_the_losses_of_one_without(data: Path, tmp_path: Path, more: list[str]) -> None:
    """Through evaluation, and in a run that is resumed."""
    size = ["device_train_microbatch_size=4", "deterministic=true", *more]
    losses = []
    for graphs in ("false", "true"):
        run(data, tmp_path / graphs, *size, f"cuda_graphs={graphs}", "max_duration=20ba")
        rows = run(data, tmp_path / graphs, *size, f"cuda_graphs={graphs}")
        losses.append([row["loss/train/total"] for row in rows])
    assert len(losses[0]) == 40 and losses[0] == losses[1]


def test_a_cuda_graph_is_chosen_where_launching_takes_longest(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(data, tmp_path / "run", "max_duration=2ba", "device_train_microbatch_size=1")
    assert "CUDA graphs: on (a microbatch takes" in capfd.readouterr().out


def test_a_pass_that_cannot_be_recorded_is_launched_one_by_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from ingot.parallel.executors.single import SingleProcess

    size = ["device_train_microbatch_size=4", "deterministic=true"]
    plain = run(data, tmp_path / "plain", *size, "cuda_graphs=false")
    whole = SingleProcess.forward_backward

    def waiting(self: SingleProcess, *arguments: torch.Tensor) -> torch.Tensor:
        loss = whole(self, *arguments)
        float(loss)  # a recording cannot wait for the device
        return loss

    monkeypatch.setattr(SingleProcess, "forward_backward", waiting)
    rows = run(data, tmp_path / "run", *size)
    assert "CUDA graphs: off (the pass could not be captured" in capfd.readouterr().out
    assert [row["loss/train/total"] for row in rows] == [row["loss/train/total"] for row in plain]


def test_the_automatic_microbatch_fits_and_divides_the_batch(data: Path, tmp_path: Path) -> None:
    rows = run(data, tmp_path / "run", "max_duration=2ba")
    assert 16 % rows[-1]["trainer/device_train_microbatch_size"] == 0


def test_the_less_memory_there_is_the_more_is_recomputed(tmp_path: Path) -> None:
    from ingot.config.load import load_config
    from ingot.config.run import RunConfig
    from ingot.parallel.executors.base import RECOMPUTE_KINDS, NoMessages
    from ingot.parallel.executors.build import build_single
    from ingot.training.microbatch_search import choose_microbatch

    config = load_config(RunConfig, ["mpt-125m", "model.d_model=1024", "model.n_heads=8", "model.n_layers=8",
                                     "model.vocab_size=512", "global_train_batch_size=2", "data.train.path=x"])  # fmt: skip
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    gc.collect()  # models of the tests before are in cycles: freed later, their memory would make up for the limits below
    torch.cuda.empty_cache()
    executor = build_single(config, device, False, NoMessages())
    del executor.hold_choices[False]  # kinds of recomputation alone are compared
    executor.probe_memory(2)  # what is allocated once is not a kind's
    peaks = []
    for kind in RECOMPUTE_KINDS:
        executor.set_recompute(kind)
        use = executor.probe_memory(2)
        assert use is not None
        peaks.append(use.peak)
    assert peaks == sorted(peaks, reverse=True)
    try:
        # a little less than the kind before needs: fragments of memory take their part of the rest
        limits = (1.5 * peaks[0], *(0.95 * more + 0.05 * less for more, less in pairwise(peaks)))
        for kind, limit in zip(RECOMPUTE_KINDS, limits, strict=True):
            torch.cuda.set_per_process_memory_fraction(limit / total, device)
            for asked in (2, "auto"):
                executor.config = config.model_copy(update={"device_train_microbatch_size": asked})
                why = choose_microbatch(executor.config, executor, tmp_path)
                assert (executor.microbatch, executor.recompute) == (2, kind), why
                assert why[1].startswith(f"activation checkpointing: {kind or 'none'}")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_a_resumed_run_continues_with_the_same_losses(data: Path, tmp_path: Path) -> None:
    whole = run(data, tmp_path / "run", "precision=bf16")  # saves at 20 and at 40
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "40")
    rows = run(data, tmp_path / "run", "precision=bf16")
    assert [r["time/batch"] for r in rows] == list(range(1, 41))
    assert rows[20]["loss/train/total"] == pytest.approx(whole[20]["loss/train/total"], rel=1e-4)
    assert rows[-1]["loss/train/total"] == pytest.approx(whole[-1]["loss/train/total"], rel=0.02)


def test_generation_on_the_gpu_equals_the_cpu(data: Path, tmp_path: Path) -> None:
    from ingot import load
    from ingot.model.generate import generate

    run(data, tmp_path / "run", "precision=fp32", "max_duration=20ba")
    texts = [list(generate(load(tmp_path / "run", device), [1, 2, 3], 20, temperature=0)) for device in ("cpu", "cuda")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("wrapped", [[], ["parallel.shard=1"]], ids=["plain", "wrapped"])
def test_a_step_does_not_wait_for_the_device(data: Path, tmp_path: Path, wrapped: list[str]) -> None:
    from ingot.training import testing

    waited: list[int] = []

    def counted(trainer: Any, batch: Batch, step: testing.Step) -> Any:
        if trainer.progress.batch < 5:  # the first ones compile and choose
            return step(batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waited.append(trainer.progress.batch)

    plain = testing._wrapper
    testing.wrap_step(counted)
    try:
        run(data, tmp_path / "run", "max_duration=8ba", "precision=bf16", *wrapped)
    finally:
        testing.wrap_step(plain)
    assert waited == [5, 6, 7, 8]


def test_a_profile_shows_kernels_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    from ingot.training.profiling.tables import read_profiles

    fixed = ["precision=bf16", "deterministic=true", "max_duration=8ba", "compile=false"]
    plain = run(data, tmp_path / "plain", *fixed)
    profiled = run(data, tmp_path / "profiled", *fixed, "profiler.steps=4-6")
    assert [row["loss/train/total"] for row in plain] == [row["loss/train/total"] for row in profiled]
    (table,) = read_profiles(tmp_path / "profiled")
    assert table.on_gpu and table.milliseconds_per_step["matrix products"] > 0
    assert table.milliseconds_per_step["attention"] > 0 and (tmp_path / "profiled" / "profile" / table.trace).exists()


def test_a_failed_allocation_leaves_a_report_of_what_filled_the_memory(data: Path, tmp_path: Path) -> None:
    """The run goes on with a smaller microbatch; the report says what was in memory when the large one failed."""
    gc.collect()  # models of earlier tests
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (900 << 20)) / total)
    big = ["model.vocab_size=50368", "max_seq_len=512", "global_train_batch_size=64", "device_train_microbatch_size=64",
           "max_duration=2ba", "compile=false", "precision=fp32", "eval_interval=0ba", "data.eval=null",
           "profiler.memory_history=true", "model.d_model=256"]  # fmt: skip
    try:
        run(data, tmp_path / "run", *big)
    except Exception as error:  # if even one sequence is too much for the limit
        assert "out of memory" in str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    folder = tmp_path / "run" / "profile"
    report = json.loads((folder / "out-of-memory-rank-0.json").read_text())
    assert report["doing"].startswith("step ") and report["asked_bytes"] > 0 and report["allocated_bytes"] > 0
    assert {"weights", "activations and temporary memory"} <= set(report["bytes_by_category"])
    assert any(block.get("name") == "wte.weight" for block in report["largest_blocks"])
    assert any("single.py" in line for line in report["stack"])
    assert (folder / "out-of-memory-rank-0.pickle").stat().st_size > 0
