"""Profiles of steps: what they hold, and that neither they nor their failures change a run."""

import gzip
import json
import resource
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import Run, assert_as_if_nothing_happened, ranks, weights, whole

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.config.training import ProfilerConfig
from ingot.errors import ConfigError
from ingot.parallel.rank_env import RankEnv
from ingot.training.listener import RunListener
from ingot.training.profiling import memory_report
from ingot.training.profiling.memory_report import UNNAMED, Known, describe_blocks
from ingot.training.profiling.step_profiler import StepProfiler
from ingot.training.profiling.tables import read_profiles
from ingot.training.profiling.trace import Trace, TraceEvent, category_of, time_by_category, write_bounded
from ingot.training.trainer import train

__all__ = ["ranks", "whole"]


class Said(RunListener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(f"warning: {text}")


def run(arguments: list[str], folder: Path, *more: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    listener = Said()
    train(load_config(RunConfig, [*arguments, f"save_folder={folder}", *more]), listener)
    return listener.lines, weights(folder)


def events_in(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def test_a_profiled_run_has_table_and_trace_and_the_same_weights(tiny: list[str], tmp_path: Path) -> None:
    lines, profiled = run(tiny, tmp_path / "profiled", "profiler.steps=4-6", "eval_interval=5ba")
    _, plain = run(tiny, tmp_path / "plain", "eval_interval=5ba")
    assert all(torch.equal(profiled[name], plain[name]) for name in plain)
    (table,) = read_profiles(tmp_path / "profiled")
    times = table.milliseconds_per_step
    assert table.steps == (4, 6) and times["matrix products"] > 0 and {"optimizer", "loss kernel", "idle"} <= set(times)
    assert sum(times.values()) == pytest.approx(table.total_milliseconds_per_step, rel=0.01)  # of one thread
    events = events_in(tmp_path / "profiled" / "profile" / table.trace)
    assert [e["name"] for e in events if e["name"].startswith("step ")] == ["step 4", "step 5", "step 6"]
    assert any("matrix products" in line and "%" in line for line in lines) and "perfetto" in "".join(lines)
    assert len(list((tmp_path / "profiled" / "profile").iterdir())) == 2  # no draft
    assert not (tmp_path / "plain" / "profile").exists()


def test_each_rank_leaves_a_trace_once_though_a_crash_repeats_the_steps(
    data: Path, tmp_path: Path, whole: Path, ranks: int
) -> None:
    # rank 0 takes part in batch 15 only when its profile is complete
    broken = Run(data, tmp_path / "run", "profiler.steps=13-14", kind="kill", rank=1, batch=16)
    broken.run()
    assert_as_if_nothing_happened(broken.folder, whole)
    traces = sorted(path.name for path in (broken.folder / "profile").glob("*.gz"))
    assert traces == [f"steps-13-14-rank-{rank}.trace.json.gz" for rank in range(ranks)]
    log = (broken.folder / "logs" / "train.log").read_text()
    assert log.count("where the time of steps 13 to 14 went") == 1 and "profiled already" in log


def profiler(folder: Path, steps: str | None, **more: Any) -> tuple[StepProfiler, Said]:
    listener = Said()
    config = ProfilerConfig(steps=steps, **more)  # type: ignore[arg-type]
    return StepProfiler(config, folder, RankEnv(), listener, lambda what: nullcontext()), listener


def run_steps(found: StepProfiler, *numbers: int) -> None:
    for number in numbers:
        with found.step(number):
            torch.randn(8, 8) @ torch.randn(8, 8)


def test_a_run_that_stops_halfway_profiles_the_rest_when_it_continues(tmp_path: Path) -> None:
    first, _ = profiler(tmp_path, "2-5")
    first.begin(0, 10)
    run_steps(first, 1, 2, 3)
    first.finish()
    second, _ = profiler(tmp_path, "2-5")
    second.begin(2, 10)
    run_steps(second, 3, 4, 5, 6)
    assert [table.steps for table in read_profiles(tmp_path)] == [(2, 3), (4, 5)]


def test_a_rollback_in_the_middle_ends_the_profile(tmp_path: Path) -> None:
    found, _ = profiler(tmp_path, "4-6")
    found.begin(0, 10)
    run_steps(found, 3, 4, 5, 3, 4, 5, 6, 7)
    assert [table.steps for table in read_profiles(tmp_path)] == [(4, 5), (6, 6)]


def test_a_step_that_fails_leaves_no_profile_and_no_recording(tmp_path: Path) -> None:
    found, _ = profiler(tmp_path, "1-2")
    found.begin(0, 10)
    with pytest.raises(RuntimeError), found.step(1):
        raise RuntimeError("a failing step")
    found.close()
    assert not read_profiles(tmp_path)
    with torch.profiler.profile():  # a second one would be refused while the first records
        pass


def test_a_profile_that_cannot_be_written_is_a_warning(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "profile").write_text("in the way")
    lines, _ = run(tiny, folder, "profiler.steps=2-3")
    assert sum(line.startswith("warning: no profile of steps 2 to 3") for line in lines) == 1
    assert (folder / "FINISHED").exists()


def test_a_full_disk_is_named_although_torch_does_not_say_so(tmp_path: Path) -> None:
    found, said = profiler(tmp_path, "1")
    found.begin(0, 10)
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    with found.step(1):
        torch.randn(8, 8) @ torch.randn(8, 8)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, allowed[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert len(said.lines) == 1 and "is the disk full?" in said.lines[0]
    assert list((tmp_path / "profile").iterdir()) == []


@pytest.mark.slow
def test_a_signal_in_the_middle_writes_what_is_profiled_and_the_rest_follows(data: Path, tmp_path: Path) -> None:
    slow = {"kind": "slow", "rank": 0, "batch": 1, "seconds": 0.2, "attempts": "all"}
    stopped = Run(data, tmp_path / "run", "profiler.steps=3-18", nproc=1, **slow).start()
    stopped.wait_for_batch(6)
    stopped.process.send_signal(signal.SIGTERM)
    stopped.process.communicate(timeout=100)
    (first,) = read_profiles(stopped.folder)
    assert first.steps[0] == 3 and 5 <= first.steps[1] < 18
    Run(data, stopped.folder, "profiler.steps=3-18", nproc=1).run()
    assert [table.steps for table in read_profiles(stopped.folder)] == [first.steps, (first.steps[1] + 1, 18)]


def test_a_run_that_is_only_profiled_is_not_saved_when_it_is_stopped(data: Path, tmp_path: Path) -> None:
    slow = {"kind": "slow", "rank": 0, "batch": 1, "seconds": 0.2, "attempts": "all"}
    only = ["profiler.steps=22", "profiler.end_run=true", "save_interval=0ba"]
    stopped = Run(data, tmp_path / "run", *only, nproc=1, **slow).start()
    stopped.wait_for_batch(3)
    stopped.process.send_signal(signal.SIGINT)
    stopped.process.communicate(timeout=100)
    assert (stopped.folder / "stopped.json").exists() and not (stopped.folder / "checkpoints").exists()


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    for name in (".steps-1-2-rank-0.tmp", ".steps-1-2-rank-0.trace.json.gz.77.tmp", ".steps-1-2-rank-1.tmp"):
        (folder / name).touch()
    found, _ = profiler(tmp_path, "1")
    found.begin(0, 10)
    assert [path.name for path in folder.iterdir()] == [".steps-1-2-rank-1.tmp"]


def test_end_run_ends_after_the_steps_and_saves_nothing(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    listener = Said()
    arguments = [*tiny, "profiler.steps=3-4", "profiler.end_run=true", "save_interval=4ba", f"save_folder={folder}"]
    train(load_config(RunConfig, arguments), listener)
    assert json.loads((folder / "stopped.json").read_text())["batch"] == 0  # from where the run would continue
    assert not (folder / "checkpoints").exists() and not (folder / "FINISHED").exists()
    with pytest.raises(ConfigError, match=r"profiler\.steps=3-4: profiled already"):
        train(load_config(RunConfig, arguments), RunListener())


def test_steps_that_never_come_are_said(tmp_path: Path) -> None:
    found, said = profiler(tmp_path, "90-95")
    found.begin(10, 50)
    assert said.lines == ["profiler.steps=90-95: not among the steps to come, 11 to 50"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("ten", "write for example 10-13"), ("0-3", "the first step is 1"), ("5-4", "must not be empty"),
     ("1-21", "at most 20"), ("-3", "write for example"), ("1-" + "9" * 30, "write for example")],
)  # fmt: skip
def test_a_range_that_is_none_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(RunConfig, [f"profiler.steps={text}"])


def test_a_long_trace_keeps_its_longest_events(tmp_path: Path) -> None:
    with torch.profiler.profile() as recorded, torch.profiler.record_function("step 1"):
        for _ in range(100):
            torch.randn(4) + 1
        torch.randn(700, 700) @ torch.randn(700, 700)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    with Trace(tmp_path / "trace.json") as trace:
        count = len(trace.raw)
        left_out = write_bounded(trace, tmp_path / "cut.json.gz", 20)
        assert write_bounded(trace, tmp_path / "whole.json.gz", count) == 0
    kept = events_in(tmp_path / "cut.json.gz")
    assert len(kept) + left_out == count == len(events_in(tmp_path / "whole.json.gz"))
    shown = [event["name"] for event in kept if event["ph"] == "X"]
    assert len(shown) <= 20 and {"step 1", "aten::mm"} <= set(shown)


def test_time_on_a_gpu_is_that_of_its_kernels_and_overlap_is_not_idle() -> None:
    def event(name: str, start: float, length: float, cat: str = "kernel") -> TraceEvent:
        return TraceEvent("X", name, cat, 7, start, length)

    table = time_by_category(iter([
        event("nvjet_tst_128x256", 0, 4000), event("ncclDevKernel_ReduceScatter", 3000, 3000),
        event("Memcpy HtoD (Pinned -> Device)", 9000, 1000, "gpu_memcpy"), event("aten::mm", 0, 9e9, "cpu_op"),
    ]))  # fmt: skip
    assert table.on_gpu and table.total == 10
    assert table.milliseconds == {"matrix products": 4, "communication": 3, "copies": 1, "idle": 3}


@pytest.mark.parametrize(
    ("name", "category"),
    [("aten::addmm", "matrix products"), ("aten::mul", "element-wise"), ("aten::_log_softmax", "loss kernel"),
     ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"), ("gloo:all_reduce", "communication"),
     ("aten::_fused_adamw_", "optimizer"), ("sm90_xmma_gemm_bf16", "matrix products"), ("_quantize_kernel", "to 8 bits"),
     ("triton_poi_fused_add_0", "element-wise")],
)  # fmt: skip
def test_operations_and_kernels_have_a_category(name: str, category: str) -> None:
    assert category_of(name) == category


def test_memory_is_told_by_category_and_by_the_largest_blocks() -> None:
    blocks = [{"address": 1, "size": 512, "state": "active_allocated"}, {"address": 2, "size": 1024, "state": "inactive"},
              {"address": 3, "size": 2048, "state": "active_allocated"}]  # fmt: skip
    found = describe_blocks(blocks, {1: Known("weights", "wte.weight", (8, 16), "float32")})
    assert found["allocated_bytes"] == 2560 and found["reserved_but_unused_bytes"] == 1024
    assert found["bytes_by_category"] == {UNNAMED: 2048, "weights": 512}
    assert found["largest_blocks"][0] == {"bytes": 2048, "category": UNNAMED}
    assert found["largest_blocks"][1]["name"] == "wte.weight"


def test_memory_history_on_a_cpu_says_that_it_does_nothing(tiny: list[str], tmp_path: Path) -> None:
    lines, _ = run(tiny, tmp_path / "run", "profiler.memory_history=true", "max_duration=1ba")
    assert sum("profiler.memory_history needs a GPU" in line for line in lines) == 1


def test_the_stack_of_a_backward_pass_begins_with_the_call_that_waits_for_it() -> None:
    """torch computes gradients of a GPU in a thread of its own, which knows nothing of the step that asked for them."""
    found: list[list[str]] = []

    def backward_pass() -> None:
        found.append(memory_report.call_stack())

    def step() -> None:
        thread = threading.Thread(target=backward_pass)
        thread.start()
        thread.join()

    step()
    (stack,) = found
    names = [line.rpartition(" ")[2] for line in stack]
    assert names.index("step") < names.index("backward_pass")
    assert names[-2:] == ["backward_pass", "call_stack"]
    assert len(memory_report.call_stack()) < len(stack)  # once in the main thread


def test_an_allocation_that_fails_is_written_down_by_the_watch_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's four numbers, in its order; the reports themselves need a GPU."""
    seen: list[tuple[int, ...]] = []
    monkeypatch.setitem(memory_report._watches, 3, SimpleNamespace(write=lambda *numbers: seen.append(numbers)))  # type: ignore[misc]
    memory_report._observe(3, 10, 20, 5)
    memory_report._observe(4, 10, 20, 5)  # nobody watches it
    assert seen == [(3, 10, 20, 5)]
