"""Where the time of a training step goes, by kind of kernel."""

import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

# by name, the first match counts; our Triton kernels by their whole name
KINDS = {
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitk",
    "attention": r"cudnn|flash|fmha|^_(forward|backward_kv|backward_q|delta|reach)$",
    "norms, GELU, heads": r"^_(norm|gelu|join)\w*kernel$",
    "to 8 bits": r"^_(largest|quantize)_kernel$",
    "loss kernel": r"^_softmax$",
    "optimizer": r"multi_tensor_apply|adam|lpnorm",
    "element-wise": r"",
}


def profile_step(step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of one step by kind, its idle time, and the clock and power of the device over some steps."""
    with torch.profiler.profile() as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spent = dict.fromkeys([*KINDS, "copies"], 0.0)
    spans = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = event["name"].lower()
            kernel = event["cat"] == "kernel"
            kind = next(k for k, names in KINDS.items() if re.search(names, name)) if kernel else "copies"
            spent[kind] += event["dur"] / 1e3
            spans.append((event["ts"], event["ts"] + event["dur"]))
    busy, end = 0.0, 0.0
    for first, last in sorted(spans):
        busy, end = busy + max(0.0, last - max(first, end)), max(end, last)
    whole = (end - min(first for first, _ in spans)) if spans else 0.0
    found = {kind: round(ms, 1) for kind, ms in spent.items()} | {"idle": round((whole - busy) / 1e3, 1)}
    return {"milliseconds": found, **_clock_and_power(step)}


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
