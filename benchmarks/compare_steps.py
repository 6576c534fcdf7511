"""The training step of two source trees on one card, in processes that stay and take turns.

    git archive --format tar.gz -o .carry/old.tar.gz 6a238e8 src benchmarks
    python benchmarks/compare_steps.py --old .carry/old.tar.gz --rows rows.jsonl
    python benchmarks/compare_steps.py --old .carry/old.tar.gz --rows rows.jsonl --tiny      on a CPU

`compare_trees.py` compares whole runs of `ingot train`, a new process for each repeat. Here both processes build and
compile at the same time, then take turns, three each, so a case takes half a minute; at 7b, where only one fits on the
card, one follows the other. Each tree builds the step by `build` of its own `benchmarks/gpu.py`, which is the trainer's
own step in both. Tokens are random, and the same for both: their losses must agree. `ratio` is new over old.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_table import add_row, wait_for_turn

HERE = Path(__file__).parent
TINY = ["model.d_model=64", "model.n_heads=4", "model.n_layers=2", "model.vocab_size=512", "max_seq_len=32"]


@dataclass(frozen=True)
class Comparison:
    name: str
    recipe: str
    micro: int
    microbatches: int
    overrides: list[str] = field(default_factory=list)
    steps: int = 2
    """Of a turn, after one that is not timed."""
    alone: bool = False
    """Only one of the two fits on the card."""


LEARNED, ALIBI = ["model.positions=learned"], ["model.positions=alibi"]
COMPARISONS = [  # ALiBi and fp8 first: the others are timed next to peers as well
    Comparison("125m-alibi", "mpt-125m", 32, 4, ALIBI),
    Comparison("1b-fp8", "mpt-1b", 8, 4, [*LEARNED, "precision=fp8"]),
    Comparison("7b", "mpt-7b", 2, 4, LEARNED, alone=True),
    Comparison("125m", "mpt-125m", 32, 4, LEARNED),
    Comparison("1b", "mpt-1b", 8, 4, LEARNED),
]
TURNS = 3


class Tree:
    """A process with the package of a tree, which times steps on demand."""

    def __init__(self, folder: Path, given: Comparison, tiny: bool, caches: Path):
        given_paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        own = {"PYTHONPATH": ":".join([str(folder / "src"), str(folder / "benchmarks"), *given_paths]),
               "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton"),
               "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # fmt: skip
        code = "import sys; sys.path.remove(sys.path[0]) if sys.path[0] == '' else None; " + WORKER
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(asdict(given)), *(["--tiny"] if tiny else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | own, text=True, cwd=caches,
        )  # fmt: skip

    def ask(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            print(f"    {line.rstrip()}", flush=True)
        raise RuntimeError(f"the process ended with exit code {self.process.wait()}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


# What both trees must have: gpu.py's build, Size, clean and load_config, with the step's run(batch)
WORKER = r"""
import json, sys, time
import numpy as np
import torch
import gpu
given, tiny = json.loads(sys.argv[1]), "--tiny" in sys.argv
device = torch.device("cpu" if tiny else "cuda")
assert sys.stdin.readline()
started = time.time()
config = gpu.load_config(gpu.RunConfig, [given["recipe"], "data=none", "precision=bf16", *given["overrides"]])
rows = given["micro"] * given["microbatches"]
tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (rows, config.max_seq_len))
batch = gpu.Batch(tokens, np.roll(tokens, -1, axis=1), np.arange(rows))
step = gpu.build("ingot", config, gpu.Size(given["micro"], given["microbatches"]), device)
losses = [float(step.run(batch)[0]) for _ in range(2)]
memory = torch.cuda.max_memory_allocated() / 2**30 if not tiny else 0.0
print(json.dumps({"losses": losses, "memory_gib": round(memory, 2), "seconds": round(time.time() - started, 1),
                  "tokens": tokens.size}), flush=True)
for _ in sys.stdin:
    times = gpu.step_times(step, [batch], given["steps"], device)
    print(json.dumps({"seconds": sum(times) / len(times)}), flush=True)
"""


def compare(given: Comparison, trees: dict[str, Tree]) -> dict[str, Any]:
    """Both processes ready at once, or one after the other, then in turn."""
    ready: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    for group in [[name] for name in trees] if given.alone else [list(trees)]:
        for name in group:
            trees[name].ask("start")
        for name in group:
            ready[name] = trees[name].answer()
        for _ in range(TURNS):
            for name in group:
                trees[name].ask("time")
                seconds[name].append(trees[name].answer()["seconds"])
        for name in group:
            trees[name].end()
    row: dict[str, Any] = {}
    for name, times in seconds.items():
        median = statistics.median(times)
        own = ready[name]
        row |= {name: round(own["tokens"] / median), f"{name}_memory_gib": own["memory_gib"],
                f"{name}_spread": round((max(times) - min(times)) / median, 4),
                f"{name}_losses": own["losses"], f"{name}_seconds_to_ready": own["seconds"]}  # fmt: skip
    ratios = [old / new for old, new in zip(seconds["old"], seconds["new"], strict=True)]
    return row | {"ratio": round(statistics.median(ratios), 4), "ratios": [round(r, 4) for r in ratios]}


def small(given: Comparison) -> Comparison:
    overrides = [*given.overrides, *TINY]
    return Comparison(given.name, given.recipe, 2, 2, overrides, 1, given.alone)


def run_all(cases: list[Comparison], folders: dict[str, Path], rows: Path, tiny: bool, seconds: float) -> None:
    """The next case's processes import while this one's are timed, the first case's while this script waits."""
    with tempfile.TemporaryDirectory() as name:
        caches = {tree: Path(name, tree) for tree in folders}
        for folder in caches.values():
            folder.mkdir()

        def start(given: Comparison) -> dict[str, Tree]:
            return {tree: Tree(folder, given, tiny, caches[tree]) for tree, folder in folders.items()}

        following = start(cases[0])
        if not wait_for_turn():
            for tree in following.values():
                tree.end()
            return
        begun = time.monotonic()
        for number, given in enumerate(cases):
            now = following
            following = start(cases[number + 1]) if number + 1 < len(cases) else {}
            common = {"section": "trees", "variant": given.name, "model": given.recipe, "execution": "plain",
                      "precision": "fp8" if "precision=fp8" in given.overrides else "bf16", "deterministic": False,
                      "family": "mpt", "microbatch": given.micro}  # fmt: skip
            if time.monotonic() - begun > seconds:
                row: dict[str, Any] = {"error": "no time"}
            else:
                try:
                    row = compare(given, now)
                except (RuntimeError, OSError) as error:
                    row = {"error": str(error)}
            add_row(rows, common | row)
            for tree in now.values():
                tree.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a tree with src and benchmarks, or its tar file")
    parser.add_argument("--rows", type=Path, required=True, help="a file that gains lines of JSON")
    parser.add_argument("--cases", nargs="+", choices=[c.name for c in COMPARISONS])
    parser.add_argument("--seconds", type=float, default=170, help="start no case after this long")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--wait", action="store_true", help="wait for a line of input")
    arguments = parser.parse_args()
    cases = [c for c in COMPARISONS if c.name in (arguments.cases or [c.name])]
    cases = [small(c) for c in cases] if arguments.tiny else cases
    with tempfile.TemporaryDirectory() as name:
        old = arguments.old
        if old.is_file():
            with tarfile.open(old) as archive:
                archive.extractall(name, filter="data")
            old = Path(name)
        folders = {"old": old.resolve(), "new": HERE.parent.resolve()}
        run_all(cases, folders, arguments.rows, arguments.tiny, arguments.seconds)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
