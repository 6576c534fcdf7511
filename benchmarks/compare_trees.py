"""Training speed of two source trees of ingot on one card: `ingot train` of each, turn and turn about.

    python benchmarks/compare_trees.py OLD/src src DATA --cases 125m 1b 7b --repeats 3 --out results.json

DATA is a prepared split. Cards of one kind differ by several percent, and one card drifts as it warms up, so only the
ratio of runs that alternate in one call means anything. A run's speed is the median of its steps after the first
three; the table shows the median of the repeats, their spread, and new against old.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_profile import run_header

ALIBI = ["model.positions=alibi"]
FSDP = ["parallel.shard=1"]
CASES: dict[str, list[str]] = {
    "125m": ["mpt-125m", "global_train_batch_size=256", "device_train_microbatch_size=32"],
    "125m-alibi": ["mpt-125m", "global_train_batch_size=256", "device_train_microbatch_size=32", *ALIBI],
    "125m-fsdp": ["mpt-125m", "global_train_batch_size=256", "device_train_microbatch_size=32", *FSDP],
    "1b": ["mpt-1b", "global_train_batch_size=64", "device_train_microbatch_size=16"],
    "1b-fsdp": ["mpt-1b", "global_train_batch_size=64", "device_train_microbatch_size=16", *FSDP],
    "llama-1b-fsdp": ["llama-1b", "max_seq_len=2048", "global_train_batch_size=64", "device_train_microbatch_size=8",
                      *FSDP],
    "7b": ["mpt-7b", "global_train_batch_size=32", "device_train_microbatch_size=2"],
    "7b-fp8": ["mpt-7b", "global_train_batch_size=32", "device_train_microbatch_size=2", "precision=fp8"],
    "tiny": ["mpt-125m", "global_train_batch_size=4", "device_train_microbatch_size=2", "max_seq_len=64",
             "model.d_model=64", "model.n_heads=2", "model.n_layers=2"],
}  # fmt: skip
TREES = ("old", "new")
QUIET = ["eval_interval=0ba", "save_interval=0ba", "save_weights_only=true", "log_interval=1ba", "data.eval=null"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a folder with the package ingot")
    parser.add_argument("new", type=Path)
    parser.add_argument("data", type=Path, help="a prepared split")
    parser.add_argument("--cases", nargs="+", default=["125m", "1b"], choices=CASES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=570, help="start no run after this long")
    parser.add_argument("--out", type=Path, help="a JSON file that gains this call's rows")
    arguments = parser.parse_args()
    begun = time.monotonic()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {case: {"old": [], "new": []} for case in arguments.cases}
    for case, name in ((case, name) for _ in range(arguments.repeats) for case in arguments.cases for name in TREES):
        if time.monotonic() - begun < arguments.seconds:
            run = train(getattr(arguments, name), arguments.data, CASES[case], arguments.steps)
            found[case][name].append(run)
            print(case, name, json.dumps(run), flush=True)
    rows = [summary(case, runs) for case, runs in found.items() if all(runs.values())]
    import torch

    header = run_header(torch.device("cuda" if torch.cuda.is_available() else "cpu"), " ".join(sys.argv))
    print("\n".join(table(rows)))
    if arguments.out is not None:
        kept = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
        kept = [row for row in kept if row["case"] not in {row["case"] for row in rows}]
        arguments.out.write_text(json.dumps(header | {"rows": kept + rows}, indent=1) + "\n")


def train(tree: Path, data: Path, case: list[str], steps: int) -> dict[str, Any]:
    """One run of `ingot train` with the package of a tree."""
    environment = os.environ | {"PYTHONPATH": f"{tree.resolve()}:{os.environ.get('PYTHONPATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ingot.cli.main", "train", *case, *QUIET, f"max_duration={steps}ba",
                   f"data.train.path={data.resolve()}", f"save_folder={folder}/run"]  # fmt: skip
        start = time.monotonic()
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            return {"error": done.stdout[-2000:]}
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        rates = [line["throughput/tokens_per_sec"] for line in lines][3:]
        return {
            "tokens_per_second": round(statistics.median(rates)),
            "peak_gib": round(max(line.get("memory/peak_allocated_mem", 0) for line in lines) * 1e9 / 2**30, 2),
            "loss": lines[-1]["loss/train/total"],
            "seconds": round(time.monotonic() - start, 1),
        }


def summary(case: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The repeats of a case as one row; a run that failed shows its error."""
    if errors := [run["error"] for runs in found.values() for run in runs if "error" in run]:
        return {"case": case, "error": errors[0]}
    row: dict[str, Any] = {"case": case}
    for name, runs in found.items():
        rates = [run["tokens_per_second"] for run in runs]
        middle = statistics.median(rates)
        spread = round((max(rates) - min(rates)) / middle, 4) if len(rates) > 1 else None
        row |= {name: middle, f"{name}_spread": spread,
                f"{name}_peak_gib": max(run["peak_gib"] for run in runs), f"{name}_loss": runs[0]["loss"],
                f"{name}_runs": len(runs)}  # fmt: skip
    return row | {"ratio": round(row["new"] / row["old"], 4)}


def spread_of(row: dict[str, Any], name: str) -> str:
    value = row[f"{name}_spread"]
    return "one run" if value is None else f"{value:.1%}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| case | old tok/s | spread | new tok/s | spread | new / old | GiB old, new | loss old, new |",
             "|---|---:|---:|---:|---:|---:|---|---|"]  # fmt: skip
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['case']} | failed: {row['error'][-300:]!r} |")
            continue
        lines.append(
            f"| {row['case']} | {row['old']:,.0f} | {spread_of(row, 'old')} | {row['new']:,.0f} | "
            f"{spread_of(row, 'new')} | {row['ratio']:.3f} | {row['old_peak_gib']}, {row['new_peak_gib']} | "
            f"{row['old_loss']:.4f}, {row['new_loss']:.4f} |"
        )
    return lines


if __name__ == "__main__":
    main()
