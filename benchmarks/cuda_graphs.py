"""Where a GPU waits for the host: a step whose kernels are launched one by one, and the same as a CUDA graph.

    python benchmarks/cuda_graphs.py DATA pythia-14m:4 mpt-125m:4 --out benchmarks/results/cuda_graphs.json
    python benchmarks/cuda_graphs.py benchmarks/results/cuda_graphs.json     print the results

Each argument is a recipe and a microbatch; a step has 8 of them; `key=value` overrides may follow. The last column is
what `cuda_graphs: auto` does.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from gpu import IngotStep, clean, cut, read_batches, step_times, write
from gpu_profile import run_header

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.parallel.executors.base import NoMessages
from ingot.parallel.executors.build import build_single

COUNT = 8  # microbatches of a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a prepared folder; or results of before, to print as a table")
    parser.add_argument("models", nargs="*", metavar="RECIPE:MICROBATCH or key=value")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    if arguments.data.suffix == ".json":
        print(table(json.loads(arguments.data.read_text())["rows"]))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {**run_header(device), "rows": []}
    overrides = [text for text in arguments.models if "=" in text]
    for text in arguments.models:
        if text in overrides:
            continue
        recipe, _, micro = text.partition(":")
        config = load_config(RunConfig, [recipe, f"data={arguments.data}", *overrides])
        row = {"model": recipe, "microbatch": int(micro)} | measure(config, int(micro), arguments.steps, device)
        print(json.dumps(row), flush=True)
        found["rows"].append(row)
        write(found, arguments.out)
    print(table(found["rows"]))


def measure(config: RunConfig, micro: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Tokens per second one by one, as a graph where there are GPUs, and what would be chosen."""
    batches = read_batches(config, 2 * micro * COUNT)
    large = [cut(batches, part * micro * COUNT, micro * COUNT) for part in range(2)]
    found: dict[str, Any] = {"chosen": None}
    for kind, asked in (("chosen", "auto"), ("launched", False), ("graph", True))[: 3 if device.type == "cuda" else 2]:
        notes = Notes()
        asked_config = config.model_copy(update={"cuda_graphs": asked})
        step = IngotStep(asked_config, build_single(asked_config, device, device.type == "cuda", notes), micro)
        for _ in range(2):  # the second step decides
            step.run(large[0])
        if kind == "chosen":
            found["chosen"] = next((text for text in notes.texts if text.startswith("CUDA graphs")), None)
        else:
            times = step_times(step, large, steps, device)
            median = statistics.median(times)
            found[kind] = round(large[0].tokens.size / median)
            found[f"{kind}_spread"] = round((max(times) - min(times)) / median, 4)
        del step
        clean(device)
    return found


class Notes(NoMessages):
    """Keeps what an executor reports."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | microbatch | tokens/s one by one | as a CUDA graph | | chosen |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        graph = f"{row['graph']:,} | {row['graph'] / row['launched']:.2f} x" if "graph" in row else "|"
        uses_graph = (row["chosen"] or "").startswith(("CUDA graphs: on", "CUDA graph:"))
        chosen = "" if row["chosen"] is None else "CUDA graph" if uses_graph else "kernels launched one by one"
        lines.append(f"| {row['model']} | {row['microbatch']} | {row['launched']:,} | {graph} | {chosen} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
