"""The sharded path next to the plain process on one GPU: speed, memory, decisions, start-up, and where the time goes.

    python benchmarks/gpu_distributed.py --out results.json                      everything, in under 7 minutes
    python benchmarks/gpu_distributed.py --sections 7b fp8 --seconds 200         some of it
    python benchmarks/gpu_distributed.py --tiny                                  the same on a CPU, in a minute

Each configuration runs in a process of its own, plain and wrapped by FSDP2 (`parallel.shard=1`) in turn, through the
trainer's own functions: the same decisions before step 1, the same step, the same optimizer. Tokens are random, since
speed does not depend on them; both see the same, so their losses must agree. A second round repeats the sizes while
there is time. The first round compiles into an empty cache, so `first_step_seconds` is that of a fresh machine.

`ratio` is wrapped over plain, of the medians. `matmul_tflops` is what a large bf16 product alone reaches in the same
process: cards differ by some percent in what their power limit lets them do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

START = float(os.environ.get("BENCHMARK_START", time.time()))
TOP_KERNELS = 25


@dataclass(frozen=True)
class Case:
    """One process."""

    name: str
    size: str
    wrapped: bool
    batch: int
    steps: int
    overrides: list[str] = field(default_factory=list)
    profile: bool = False
    timeout: int = 150


# recipe, sequences per step, timed steps
RECIPES = {
    "125m": ("mpt-125m", 256, 5),
    "1b": ("mpt-1b", 64, 4),
    "7b": ("mpt-7b", 32, 2),
    "llama-1b": ("llama-1b", 16, 3),
    "llama-8b": ("llama-8b", 8, 2),
}
TINY = ["model.d_model=64", "model.n_heads=2", "model.n_layers=2", "model.vocab_size=512", "max_seq_len=32",
        "device=cpu", "parallel.reshard_after_forward=false"]  # fmt: skip


def cases_of(section: str, tiny: bool) -> list[Case]:
    """The processes of a section, in the order in which they run."""
    size = {"fp8": "7b", "startup": "125m"}.get(section, section)
    _, batch, steps = ("", 8, 2) if tiny else RECIPES[size]
    more = list(TINY) if tiny else []
    if tiny and size.startswith("llama"):
        more.append("model.n_kv_heads=2")
    if section == "llama-8b":
        more += [] if tiny else ["max_seq_len=2048"]
        return [Case(f"llama-8b {kind}", size, kind == "wrapped", batch, steps, more) for kind in ("plain", "wrapped")]
    if section == "fp8":
        more.append("precision=fp8")
    return [
        Case(f"{section} {'wrapped' if wrapped else 'plain'}", size, wrapped, batch, steps, more, profile=True)
        for wrapped in (False, True)
    ]


SECTIONS = ["1b", "7b", "125m", "llama-1b", "fp8", "llama-8b"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS)
    parser.add_argument("--seconds", type=float, default=400, help="no process starts that may end after this")
    parser.add_argument("--rounds", type=int, default=2, help="how often each size is measured, if there is time")
    parser.add_argument("--set", nargs="+", default=[], help="keys of the config, such as compile=false")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path, help="a JSON file, or $OUT/gpu_distributed.json")
    parser.add_argument("--case", help="for the processes that this script starts")
    arguments = parser.parse_args()
    if arguments.case:
        run_case(Case(**json.loads(arguments.case)))
        return
    out = arguments.out or Path(os.environ.get("OUT", "."), "gpu_distributed.json")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for section in arguments.sections:
                if number and section == "llama-8b":
                    continue
                for case in cases_of(section, arguments.tiny):
                    case.overrides.extend(arguments.set)
                    row = measure(case, number, arguments.seconds, Path(folder))
                    if row is None:
                        continue
                    rows.append(row)
                    out.write_text(json.dumps(rows, indent=1) + "\n")
                if number == 0:
                    print(kernel_difference(section, rows), flush=True)
    print(table(rows))


def measure(case: Case, number: int, seconds: float, folder: Path) -> dict[str, Any] | None:
    """The row of a case, printed as soon as it is known. None if there is no time for it."""
    name = case.name.replace(" ", "-")
    took = folder / f"{name}.seconds"
    expected = float(took.read_text()) if took.exists() else 25.0
    if time.time() - START + expected > seconds:
        print(f"=== {case.name}, round {number + 1}: skipped, no time", flush=True)
        return None
    print(f"=== {case.name}, round {number + 1}, at {time.time() - START:.0f} s", flush=True)
    start = time.time()
    result = folder / f"{name}.json"
    result.unlink(missing_ok=True)
    environment = os.environ | {
        "BENCHMARK_START": str(start), "BENCHMARK_RESULT": str(result), "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / name / "inductor"), "TRITON_CACHE_DIR": str(folder / name / "triton"),
    }  # fmt: skip
    case = Case(**asdict(case) | {"profile": case.profile and number == 0})
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    limit = min(case.timeout, max(20.0, seconds + 30 - (start - START)))
    try:
        done = subprocess.run(command, env=environment, timeout=limit)
        problem = "" if done.returncode == 0 else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"not done after {limit:.0f} s"
    row = json.loads(result.read_text()) if result.exists() else {}
    row = {"name": case.name, "round": number + 1, "problem": problem} | row
    took.write_text(str(time.time() - start))
    print(json.dumps({key: value for key, value in row.items() if key not in ("kernels", "notes")}), flush=True)
    return row


def run_case(case: Case) -> None:
    """Train as `ingot train` does, on random tokens, and leave what was measured in BENCHMARK_RESULT."""
    import torch

    from ingot.config.load import load_config
    from ingot.config.run import RunConfig
    from ingot.parallel.rank_env import find_rank_env
    from ingot.training.listener import RunListener
    from ingot.training.loss_scale import LossScale
    from ingot.training.microbatch_search import choose_microbatch
    from ingot.training.optimizer import Optimizer
    from ingot.training.setup import build_executor, plan_execution

    found: dict[str, Any] = {"notes": []}

    def save(**values: Any) -> None:
        found.update(values)
        Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(found))

    class Printer(RunListener):
        def note(self, text: str) -> None:
            found["notes"].append(text)
            print(f"  [{time.time() - START:5.1f} s] {text}", flush=True)

        warn = note

    listener = Printer()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        wrapped = ["parallel.shard=1"] if case.wrapped else []
        recipe = RECIPES[case.size][0]
        config = load_config(RunConfig, [
            recipe, f"global_train_batch_size={case.batch}", "data=none", "data.eval=null", f"save_folder={folder}",
            *wrapped, *case.overrides,
        ])  # fmt: skip
        plan = plan_execution(config, find_rank_env(), listener)
        device = plan.device
        save(imported_seconds=time.time() - START, device=str(device), matmul_tflops=matmul_tflops(device))
        inputs: Any = SimpleNamespace(train=SimpleNamespace(fingerprint=dict))
        executor = build_executor(config, plan, inputs, listener)
        cleanup.callback(executor.close)
        optimizer = Optimizer(config.optimizer, {p.tensor: p.name for p in executor.parameters})
        executor.weights_changed()
        for decision in choose_microbatch(config, executor, Path(folder)):
            listener.note(decision)
        save(microbatch=executor.microbatch, recompute=executor.recompute, chosen_seconds=time.time() - START)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # of sizes that were tried
        run = Steps(config, executor, optimizer, LossScale(device, enabled=False))
        losses = [float(run.step(case.batch)[0])]
        save(first_step_seconds=round(time.time() - START, 1), losses=losses)
        losses += [float(run.step(case.batch)[0])]
        times = run.times_of(case.steps, case.batch)
        save(
            losses=losses + run.losses, seconds=times,
            tokens_per_second=round(case.batch * config.max_seq_len / statistics.median(times)),
        )  # fmt: skip
        if device.type == "cuda":
            stats = torch.cuda.memory_stats(device)
            save(
                host_syncs=run.host_syncs(case.batch),
                allocated_gib=round(stats["allocated_bytes.all.peak"] / 2**30, 2),
                reserved_gib=round(stats["reserved_bytes.all.peak"] / 2**30, 2),
                allocation_retries=stats["num_alloc_retries"],
            )
        if case.profile:
            save(kernels=run.kernels(2 * executor.microbatch))
        listener.note("done")


class Steps:
    """The trainer's steps on random tokens, the same in every process."""

    def __init__(self, config: Any, executor: Any, optimizer: Any, scaler: Any):
        self.config, self.executor, self.optimizer, self.scaler = config, executor, optimizer, scaler
        self.count, self.losses = 0, []

    def step(self, rows: int) -> Any:
        import numpy as np

        from ingot.data.loading.batch_loader import Batch
        from ingot.training.step import train_step

        random = np.random.default_rng(self.count % 2)
        tokens = random.integers(0, self.config.model.vocab_size, (rows, self.config.max_seq_len), dtype=np.int64)
        self.executor.begin_step(self.count)
        self.count += 1
        self.optimizer.set_lr(0.1)
        batch = Batch(tokens, np.roll(tokens, -1, axis=1), np.arange(rows))
        result = train_step(self.executor, self.optimizer, self.scaler, batch, self.config.gradient_clipping)
        return result.loss_share, result.grad_norm

    def times_of(self, count: int, rows: int) -> list[float]:
        """Seconds of each of some steps, by the device's clock where it has one, none waiting for the device."""
        import torch

        results, marks = [], []
        cuda = self.executor.device.type == "cuda"
        for number in range(count + 1):
            if cuda:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            else:
                marks.append(time.perf_counter())
            if number < count:
                results.append(self.step(rows)[0])
        if cuda:
            torch.cuda.synchronize()
        self.losses = [float(loss) for loss in results]
        return [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in pairwise(marks)]

    def host_syncs(self, rows: int) -> list[str]:
        """Where a step waits for the device."""
        import torch

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self.step(rows)
            torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in caught if "called a synchronizing" in str(w.message)]  # not: this mode is a prototype
        return [f"{Path(w.filename).name}:{w.lineno}" for w in waits]

    def kernels(self, rows: int) -> dict[str, Any]:
        """Milliseconds of each kernel in a step of two microbatches, and how long the device is idle within it."""
        import torch

        if self.executor.device.type != "cuda":
            return {}
        rows = min(rows, self.config.global_train_batch_size)
        # ranks agree on the number of microbatches by the configured batch
        self.executor.config = self.config.model_copy(update={"global_train_batch_size": rows})
        self.step(rows)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        start = time.perf_counter()
        with torch.profiler.profile(activities=activities) as profiler:
            self.step(rows)
            launched = time.perf_counter() - start
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        spent: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        spans = []
        for event in events:
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                spent[event["name"][:100]] += event["dur"] / 1e3
                calls[event["name"][:100]] += 1
                spans.append((event["ts"], event["ts"] + event["dur"]))
        busy, end = 0.0, 0.0
        for first, last in sorted(spans):
            busy, end = busy + max(0.0, last - max(first, end)), max(end, last)
        whole = end - min(first for first, _ in spans)
        return {
            "sequences": rows, "step_ms": round(whole / 1e3, 1), "idle_ms": round((whole - busy) / 1e3, 1),
            "launched_ms": round(launched * 1e3, 1), "launches": sum(calls.values()),
            "kernels": {name: [round(ms, 2), calls[name]] for name, ms in spent.most_common(120)},
        }  # fmt: skip


def matmul_tflops(device: Any) -> float:
    """The rate of a large bf16 product over about a second."""
    import torch

    size, times = (8192, 500) if device.type == "cuda" else (128, 2)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    float((a @ b)[0, 0])
    start = time.perf_counter()
    for _ in range(times):
        product = a @ b
    float(product[0, 0])  # waits for the device
    return round(times * 2 * size**3 / (time.perf_counter() - start) / 1e12, 1 if device.type == "cuda" else 5)


def kernel_difference(section: str, rows: list[dict[str, Any]]) -> str:
    """The kernels whose time differs most between plain and wrapped."""
    found = {row["name"].split()[-1]: row["kernels"] for row in rows
             if row["name"].rpartition(" ")[0] == section and row.get("kernels")}  # fmt: skip
    if len(found) < 2:
        return f"--- {section}: no profile of both"
    plain, wrapped = found["plain"], found["wrapped"]
    lines = [
        f"--- {section}: a step of {plain['sequences']} and {wrapped['sequences']} sequences, ms plain and wrapped"
    ]
    for key in ("step_ms", "idle_ms", "launched_ms", "launches"):
        lines.append(f"{plain[key]:9.1f} {wrapped[key]:9.1f}  {key}")
    names = plain["kernels"].keys() | wrapped["kernels"].keys()
    rows_ = [(plain["kernels"].get(n, [0, 0]), wrapped["kernels"].get(n, [0, 0]), n) for n in names]
    for a, b, name in sorted(rows_, key=lambda row: -abs(row[0][0] - row[1][0]))[:TOP_KERNELS]:
        lines.append(f"{a[0]:9.2f} {b[0]:9.2f}  x{a[1]:<5} x{b[1]:<5} {name[:80]}")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """A line per case: the median over its rounds."""
    lines = [
        f"{'case':18} {'tok/s':>9} {'ratio':>6} {'alloc':>7} {'reserv':>7} {'first':>6} {'matmul':>6} micro recompute"
    ]
    speed: dict[str, float] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        good = [row for row in own if "tokens_per_second" in row]
        if not good:
            lines.append(f"{name:18} failed: {own[-1]['problem']}")
            continue
        speed[name] = statistics.median(row["tokens_per_second"] for row in good)
        plain = speed.get(name.replace("wrapped", "plain"))
        first = good[0]
        memory = f"{first.get('allocated_gib', 0):7.2f} {first.get('reserved_gib', 0):7.2f}"
        losses = ", ".join(f"{x:.4f}" for x in first["losses"][:5])
        lines.append(
            f"{name:18} {speed[name]:9,.0f} {speed[name] / plain if plain else 0:6.3f} {memory} "
            f"{first['first_step_seconds']:6.1f} {first['matmul_tflops']:6.1f} {first['microbatch']:5} "
            f"{first['recompute'] or 'nothing'}  losses {losses}"
        )
    if "fp8 wrapped" in speed and "7b wrapped" in speed:
        lines.append(f"fp8 over bf16, wrapped, 7b: {speed['fp8 wrapped'] / speed['7b wrapped']:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
