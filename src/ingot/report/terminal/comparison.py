"""Runs next to each other: the config keys that differ, and last and best metrics."""

from pathlib import Path
from typing import Any

from rich.table import Table

from ingot.report.page.run_data import read_run

COMPARED = {
    "loss/train/total": min, "metrics/eval/LanguageCrossEntropy": min, "metrics/eval/BitsPerByte": min,
    "throughput/tokens_per_sec": max, "throughput/device/mfu": max, "time/train": None, "time/token": None,
}  # fmt: skip
"""Metrics, and which of their values is the best."""


def compare(folders: list[Path]) -> dict[str, Any]:
    """`config`: the value of each key that differs, by run; `metrics`: last and best values, by run."""
    runs = [read_run(folder) for folder in folders]
    keys = sorted({key for run in runs for key in run["config"]})
    values = {key: [run["config"].get(key) for run in runs] for key in keys}
    names = list(COMPARED) + sorted({name for run in runs for name in run["last"] if "-shot" in name})
    metrics = {}
    for name in names:
        if any(name in run["last"] for run in runs):
            metrics[f"{name} (last)"] = [run["last"].get(name) for run in runs]
            if best := COMPARED.get(name):
                series = [run["series"].get(name, ((), ()))[1] for run in runs]
                metrics[f"{name} (best)"] = [best(points) if points else None for points in series]
    return {
        "runs": [run["folder"] for run in runs],
        "config": {key: found for key, found in values.items() if len(set(found)) > 1},
        "metrics": metrics,
    }  # fmt: skip


def comparison_table(names: list[str], rows: dict[str, list[Any]]) -> Table:
    """A row per key, a column per run; long values wrap."""
    table = Table(box=None, pad_edge=False)
    table.add_column(overflow="fold")
    for name in names:
        table.add_column(Path(name).name, overflow="fold")
    for key, found in rows.items():
        table.add_row(key, *("" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
                             for value in found))  # fmt: skip
    return table
