"""How long the report of a long run takes, and how large it is.

    python benchmarks/report.py [--steps 100000] [--metrics 30] [--repeats 3]

Writes metrics of random walks, builds the page with `ingot.report.page`, and puts medians and spreads into
benchmarks/results/report.json.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ingot.report.page.page import write_report
from ingot.version import __version__

RESULTS = Path(__file__).parent / "results" / "report.json"
NAMES = ["loss/train/total", "l2_norm/grad/global", "throughput/tokens_per_sec", "throughput/device/mfu", "time/train"]


def write_metrics(run: Path, steps: int, metrics: int) -> None:
    generator = random.Random(17)
    names = [*NAMES, *(f"throughput/device/{number}" for number in range(metrics - len(NAMES)))]
    values = dict.fromkeys(names, 10.0)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            for name in names:
                values[name] += generator.gauss(0, 0.01)
            file.write(json.dumps({"time/batch": step, **values}) + "\n")
    (run / "config.yaml").write_text("name: long\nmax_seq_len: 2048\nglobal_train_batch_size: 256\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--metrics", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        write_metrics(run, options.steps, options.metrics)
        seconds = []
        for _ in range(options.repeats):
            start = time.perf_counter()
            write_report([run], run / "report.html")
            seconds.append(time.perf_counter() - start)
        result = {
            "command": "python benchmarks/report.py " + " ".join(sys.argv[1:]),
            "versions": {"ingot": __version__, "python": platform.python_version()},
            "steps": options.steps, "metrics": options.metrics,
            "metrics_jsonl_mb": round((run / "metrics.jsonl").stat().st_size / 1e6, 1),
            "page_mb": round((run / "report.html").stat().st_size / 1e6, 2),
            "seconds": round(statistics.median(seconds), 2),
            "spread": round(max(seconds) - min(seconds), 2),
        }  # fmt: skip
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
