"""The speed of `ingot train` itself, next to that of its step alone in benchmarks/gpu.py, and how soon it begins.

Run as a user runs it: loader, logging of every step and the supervisor are in the figure. The first step comes after
imports, building the model and compiling; what an earlier run has compiled on this machine is found in torch's cache.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def run_train(arguments: list[str], steps: int) -> dict[str, Any]:
    """The median speed over the last half of the steps, and the seconds until the first was done."""
    first = None
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "ingot.cli.main", "train", *arguments, f"max_duration={steps}ba",
                   "log_interval=1ba", "save_interval=0ba", "save_weights_only=true", "eval_interval=0ba",
                   f"save_folder={run}"]  # fmt: skip
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if first is None and line.startswith("[batch=1/"):
                    first = time.perf_counter() - start
        if process.returncode or first is None:
            raise RuntimeError(f"{' '.join(command)}\n{''.join(said)}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [row["throughput/tokens_per_sec"] for row in rows][steps // 2 :]
    decided = next(line for line in said if line.startswith("microbatch: ")).strip()
    return {"tokens_per_second": round(statistics.median(rates)), "seconds_to_first_step": round(first, 1),
            "decided": decided}  # fmt: skip
