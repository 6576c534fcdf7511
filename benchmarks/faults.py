"""How much of its time a run loses to faults: ranks are killed at random, and the run must come back each time.

    python benchmarks/faults.py [--seconds 240] [--mean 20] [--ranks 3] [--seed 0]

Three processes train a small model over gloo. SIGKILL strikes a random rank after exponentially distributed times
(Poisson kills). Measured: seconds from the kill to its record by the supervisor (detection) and to the next finished
step (back), steps done twice, the wait of the training loop per checkpoint, and the effective training time: finished
steps times the step time of an undisturbed run that saves nothing, over the wall time from the first step on. It is
compared with what the goodput formula, 1 - stall/T - (lost + detection + restart)/MTTF, makes of the same figures. The
stall in it is all that a save costs the loop, also by taking cores from it: how much longer an undisturbed run with
saves takes, per save. T is the save interval and a step; T/2 + detection + restart would be the formula's guess where
the lost steps are not known, and is given too. The table is also written to benchmarks/results/faults.json.
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ingot.data.prepare.prepare import prepare
from ingot.data.tokenizer_training import train_tokenizer
from ingot.launch.supervisor.failure_log import read_failures
from ingot.version import __version__

MODEL = ["model.d_model=128", "model.n_heads=4", "model.n_layers=4", "model.vocab_size=512", "max_seq_len=128",
         "global_train_batch_size=12", "precision=fp32", "data.eval=null",
         "save_num_checkpoints_to_keep=2"]  # fmt: skip
SAVE_SECONDS = 2.0
CALM_STEPS = 200


def make_data(folder: Path) -> Path:
    """The standard library's own source as a small dataset."""
    texts = [p.read_text(encoding="utf-8", errors="ignore") for p in sorted(Path(os.__file__).parent.glob("*.py"))[:40]]
    (folder / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    train_tokenizer(texts, 512, folder / "tokenizer")
    prepare(folder / "text.txt", folder, split="train", tokenizer=folder / "tokenizer", concat_tokens=512)
    return folder


def start(data: Path, run: Path, ranks: int, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ingot.cli.main", "train", *MODEL, f"data={data}", f"save_folder={run}",
               "--nproc", str(ranks), *more]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def size(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def wait_for_step(run: Path, process: subprocess.Popen) -> float:
    """The time of the next finished step."""
    before = size(run)
    while process.poll() is None:
        now = size(run)
        if now > before:
            return time.time()
        before = now
        time.sleep(0.005)
    raise SystemExit(f"the run ended with exit code {process.returncode}")


def ranks_of(process: subprocess.Popen) -> list[int]:
    return [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def calm_step(data: Path, run: Path, ranks: int, save: str) -> float:
    """Mean seconds of a step where nothing is killed."""
    if start(data, run, ranks, f"save_interval={save}", f"max_duration={CALM_STEPS}ba").wait():
        raise SystemExit("the undisturbed run failed")
    return statistics.mean(1 / row["throughput/batches_per_sec"] for row in rows(run)[5:])


def disturbed(data: Path, run: Path, options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(options.seed)
    process = start(data, run, options.ranks, f"save_interval={SAVE_SECONDS}sec", "max_duration=1000000ba")
    events: list[dict[str, float]] = []
    try:
        began = wait_for_step(run, process)
        while (left := options.seconds - (time.time() - began)) > 0:
            time.sleep(min(left, chance.expovariate(1 / options.mean)))
            if time.time() - began >= options.seconds:
                break
            done = rows(run)[-1]["time/batch"]
            os.kill(chance.choice(ranks_of(process)), signal.SIGKILL)
            killed = time.time()
            while len(failures := read_failures(run)) <= len(events):
                time.sleep(0.002)
            found = datetime.fromisoformat(failures[-1]["time"]).timestamp()
            back = wait_for_step(run, process)
            events.append(
                {"detection": found - killed, "back": back - killed, "lost": done - rows(run)[-1]["time/batch"] + 1}
            )
            print(f"  {time.time() - began:4.0f} s: {events[-1]}", flush=True)
        batches, wall = rows(run)[-1]["time/batch"], time.time() - began
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
    if code != 75:
        raise SystemExit(f"asked to stop, the run ended with exit code {code}")
    return {"events": events, "wall": wall, "batches": batches,
            "stalls": [row["checkpoint/stall_seconds"] for row in rows(run) if row.get("time/checkpoint")]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--mean", type=float, default=20, help="mean seconds between kills")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "faults.json")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(folder)
        step = calm_step(data, folder / "unsaved", options.ranks, f"{CALM_STEPS}ba")
        saving = calm_step(data, folder / "calm", options.ranks, f"{SAVE_SECONDS}sec")
        print(f"undisturbed: {step * 1e3:.1f} ms a step, {saving * 1e3:.1f} with saves", flush=True)
        found = disturbed(data, folder / "run", options)
    events, stalls = found["events"], sorted(found["stalls"])
    detection, back = ([e[key] for e in events] for key in ("detection", "back"))
    mttf = (found["wall"] - sum(back)) / len(events)
    interval = SAVE_SECONDS + step  # a save waits for the end of the step at hand
    lost, away = step * statistics.mean(e["lost"] for e in events), statistics.mean(back)

    def formula(lost: float) -> float:
        return 1 - (saving - step) / saving - (lost + away) / (mttf + away)

    result = {
        "command": " ".join(["python", "benchmarks/faults.py", *sys.argv[1:]]),
        "versions": {"ingot": __version__, "torch": version("torch"), "python": platform.python_version()},
        "cores": os.cpu_count(),
        "kills": len(events),
        "detection_seconds": {"median": statistics.median(detection), "max": max(detection)},
        "back_seconds": {"median": statistics.median(back), "max": max(back)},
        "lost_steps": {"median": statistics.median(e["lost"] for e in events), "max": max(e["lost"] for e in events)},
        "stall_seconds": {
            "p50": stalls[len(stalls) // 2],
            "p95": stalls[int(len(stalls) * 0.95)],
            "saves": len(stalls),
        },
        "step_seconds": step,
        "save_costs_seconds": (saving - step) / saving * interval,
        "effective_time": found["batches"] * step / found["wall"],
        "predicted_by_formula": formula(lost),
        "predicted_with_half_an_interval_lost": formula(interval / 2),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result.items():
        print(f"{key:22} {value}")


if __name__ == "__main__":
    main()
