"""Draw schedules of faults, let them strike runs on a local Slurm, and write down how they end:

    make chaos [FAULTS=6] [SEED=1]

Schedules of SEED, SEED + 1, ... run until that many faults were planned. Rows go to benchmarks/results/chaos.json, by
seed, into what is there: a large number may be run in parts. The exit code is 1 if one ended as it may not.
"""

import argparse
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster import Cluster, missing
from conftest import make_data

from chaos.oracle import check
from chaos.run import ARGUMENTS, ChaosRun
from chaos.schedule import NODES, Schedule, draw
from ingot.version import __version__

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "chaos.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="print the schedules only")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    schedules = schedules_of(options.seed, options.faults)
    if options.dry_run:
        print("\n".join(map(str, schedules)))
        return 0
    if why := missing():
        print(why)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # the cluster ends, too
    failed = 0
    with tempfile.TemporaryDirectory(prefix="ingot-chaos-") as name:
        folder = Path(name)
        cluster = Cluster(folder / "cluster", NODES)
        for own in ("cluster", "data"):
            (folder / own).mkdir()
        try:
            cluster.start()
            make_data(folder / "data")
            whole = undisturbed(folder / "data", folder / "whole")
            for schedule in schedules:
                row = run_schedule(schedule, cluster, folder / "data", whole, folder)
                add_row(options.out, row)
                failed += bool(row["wrong"])
        finally:
            cluster.stop()
    return 1 if failed else 0


def schedules_of(seed: int, faults: int) -> list[Schedule]:
    """Schedules of consecutive seeds, with at least that many faults."""
    schedules: list[Schedule] = []
    while sum(len(schedule.faults) for schedule in schedules) < faults:
        schedules.append(draw(seed + len(schedules)))
    return schedules


def undisturbed(data: Path, folder: Path) -> Path:
    """The same run on two local processes."""
    command = [sys.executable, "-m", "ingot.cli.main", "train", *ARGUMENTS, f"data={data}", f"save_folder={folder}"]
    subprocess.run([*command, "--nproc", "2"], check=True, capture_output=True)
    return folder


def run_schedule(schedule: Schedule, cluster: Cluster, data: Path, whole: Path, folder: Path) -> dict[str, Any]:
    """A row of the results."""
    print(schedule, flush=True)
    begin = time.monotonic()
    marks = folder / f"marks-{schedule.seed}"
    marks.mkdir(parents=True, exist_ok=True)
    root = cluster.small if any(fault.kind == "disk" for fault in schedule.faults) else folder
    run = ChaosRun(schedule, cluster, data, root / f"run-{schedule.seed}", marks)
    cluster.restore()
    try:
        run.submit()
        run.watch()
        outcome, wrong = check(run, whole)
    except Exception as error:
        outcome, wrong = "broken", [f"{type(error).__name__}: {error}"[:600]]
    outcome, *wrong = (text.replace(str(folder), "...") for text in (outcome, *wrong))
    causes = [f"{closed.cause.kind} {closed.cause.node}".strip() for closed in run.closed()]
    row = {
        "seed": schedule.seed,
        "schedule": str(schedule),
        "struck": [str(fault) for fault in run.fired],
        "causes": causes,
        "outcome": outcome,
        "wrong": wrong,
        "seconds": round(time.monotonic() - begin, 1),
        "versions": versions(cluster),
    }
    print(f"  struck: {'; '.join(map(str, run.fired)) or 'nothing'}\n  causes: {', '.join(causes)}\n"
          f"  {outcome} ({row['seconds']} s)", flush=True)  # fmt: skip
    for text in wrong:
        print(f"  WRONG: {text}", flush=True)
    if wrong:
        print(f"  again: make chaos FAULTS={len(schedule.faults)} SEED={schedule.seed}\n{run.log()}", flush=True)
    run.clear()
    return row


def versions(cluster: Cluster) -> dict[str, str]:
    return {
        "ingot": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "slurm": cluster.ask("sinfo", "--version").removeprefix("slurm-wlm ").strip(),  # it wants a configuration
    }


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Add it, in place of an earlier one of that seed; what was wrong then is kept in it."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for old in (other for other in rows if other["seed"] == row["seed"]):
        earlier = [*old.get("wrong_before", []), *old["wrong"]]
        row = row | ({"wrong_before": list(dict.fromkeys(earlier))} if earlier else {})
    rows = sorted([other for other in rows if other["seed"] != row["seed"]] + [row], key=lambda other: other["seed"])
    struck = sum(len(other["struck"]) for other in rows)
    content = {"command": "make chaos FAULTS=... SEED=...", "schedules": len(rows), "faults_struck": struck,
               "wrong": sum(bool(other["wrong"]) for other in rows), "rows": rows}  # fmt: skip
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
