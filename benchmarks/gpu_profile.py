"""Where the time of a training step goes, by kind of kernel, as `ingot profile` counts it."""

import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ingot.training.profiling.trace import CATEGORIES, IDLE, Trace, time_by_category

LONGEST = 15
UNUSUAL = ("communication", "autograd")  # of one GPU with nobody, of a CPU


def profile_step(step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of one step by category, its idle time and longest kernels, and the device's clock and power."""
    cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CUDA] if cuda else None  # recording operators costs host time
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        with Trace(path) as trace:
            events = list(trace.events())
    spent = time_by_category(iter(events)).milliseconds
    kernels: Counter[str] = Counter()
    for event in events:
        if event.cat == "kernel":
            kernels[event.name[:80]] += event.dur / 1e3
    found = {
        name: round(spent.get(name, 0.0), 1) for name in [*CATEGORIES, IDLE] if name in spent or name not in UNUSUAL
    }
    longest = {name: round(ms, 2) for name, ms in kernels.most_common(LONGEST)}
    return {"milliseconds": found, "longest_kernels": longest, **_clock_and_power(step)}


def _clock_and_power(step: Callable[[], Any]) -> dict[str, float]:
    """Medians over three steps by nvidia-smi, where it is."""
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return {}
    query = "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "100"]
    sampling = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        step()
    sampling.terminate()
    lines = [line.split(",") for line in sampling.communicate()[0].splitlines() if line.count(",") == 3]
    try:
        values = [[float(text) for text in line] for line in lines[len(lines) // 4 :]]
        medians = [statistics.median(column) for column in zip(*values, strict=True)]
        return dict(zip(("sm_mhz", "sm_mhz_highest", "watts", "watts_limit"), medians, strict=True))
    except ValueError:  # a field that this device does not tell
        return {}


def event_times(run: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of some calls by the device's clock, one upon the other without waiting for it."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]


def tables(found: dict[str, Any]) -> list[str]:
    """The profile and the budgets of the results as Markdown."""
    parts = _profile(found.get("profile", [])), _budgets(found.get("budget", []))
    return ["\n".join(f"| {' | '.join(row)} |" for row in rows) for rows in parts if rows]


def run_header(device: torch.device, before: str = "") -> dict[str, Any]:
    """What made a file of results: this command, after those `before` whose rows the file keeps."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return {
        "command": "; ".join([*(other for other in before.split("; ") if other not in ("", command)), command]),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def _profile(rows: list[dict[str, Any]]) -> list[list[str]]:
    if not rows:
        return []
    table = [[""], ["---"]]
    for row in rows:
        name = " ".join(row[key] for key in ("model", "positions", "precision") if row[key] not in ("learned", "bf16"))
        table[0].append(f"{name}, {row['sequences_per_step']} sequences")
        table[1].append("---:")
    for kind in rows[0]["milliseconds"]:
        table.append([kind])
        for row in rows:
            ms, whole = row["milliseconds"][kind], sum(row["milliseconds"].values())
            table[-1].append(f"{ms:,.1f} ms ({ms / whole:.1%})" if whole else "-")
    if all("sm_mhz" in row for row in rows):
        table.append(["clock"] + [f"{row['sm_mhz']:.0f} of {row['sm_mhz_highest']:.0f} MHz" for row in rows])
        table.append(["power"] + [f"{row['watts']:.0f} of {row['watts_limit']:.0f} W" for row in rows])
    return table


def _budgets(rows: list[dict[str, Any]]) -> list[list[str]]:
    if not rows:
        return []
    table = [["model", "microbatch", "budget", "GiB", "tokens/s"], ["---", *["---:"] * 4]]
    for row in sorted(rows, key=lambda row: (row["model"], -row["budget"])):
        budget, speed = f"{row['budget']:g}", f"{row['tokens_per_second']:,}"
        table.append([row["model"], str(row["microbatch"]), budget, str(row["memory_gib"]), speed])
    return table
