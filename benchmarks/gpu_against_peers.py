"""One model on one GPU by ingot and by its peer, one after the other in one process, next to a large matrix product.

    python benchmarks/gpu_against_peers.py 1b --rows rows.jsonl          as `gpu_check.py` runs it for each size
    python benchmarks/gpu_against_peers.py 1b --rows rows.jsonl --tiny   the same on a CPU

The peer of the mpt shapes is nanoGPT's model, that of llama and pythia is transformers' own, both in the loop that such
projects have (`gpu_peers.py`). 125m of nanoGPT is compiled whole; from 16 layers on every system is compiled block by
block, with the loss, since compiling them whole takes a minute for one percent of speed. Tokens are random and weights
initial, which speed does not depend on; the first loss must be that of guessing. Each system is measured three times
for about a second: the median counts, `spread` is their range over it. `ratio` is the peer's speed over ingot's.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from gpu import clean
from gpu_distributed import matmul_tflops
from gpu_peers import LargePeer, NanoGPT, PeerStep
from gpu_profile import event_times, profile_step
from gpu_table import add_row, wait_for_turn
from gpu_variants import Built, Section

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.launch.agent.rank_main import prepare_torch

LEARNED = ["model.positions=learned"]
SHORT = ["max_seq_len=2048"]
TINY = ["model.d_model=64", "model.n_heads=4", "model.n_layers=2", "model.vocab_size=512", "max_seq_len=32",
        "device=cpu", "precision=bf16"]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """How a model is run here: the fastest microbatch measured, which both have if both fit."""

    recipe: str
    peer: str
    micro: int
    microbatches: int
    overrides: list[str] = field(default_factory=list)
    whole: bool = False
    """Compile the peer as one program."""


SHAPES = {
    "125m": Shape("mpt-125m", "nanogpt", 32, 8, LEARNED, whole=True),
    "350m": Shape("mpt-350m", "nanogpt", 32, 4, LEARNED),
    "760m": Shape("mpt-760m", "nanogpt", 16, 4, LEARNED),
    "1b": Shape("mpt-1b", "nanogpt", 16, 2, LEARNED),
    "3b": Shape("mpt-3b", "nanogpt", 8, 4, LEARNED),
    "llama-1b": Shape("llama-1b", "hf", 8, 4, SHORT),
    "pythia-1b": Shape("pythia-1b", "hf", 16, 2),
    "pythia-2.8b": Shape("pythia-2.8b", "hf", 8, 4),
}
MEASUREMENTS, SECONDS = 3, 1.0


def measure(step: Callable[[], Any], device: torch.device) -> list[float]:
    """Seconds per step, the mean of as many steps as take about a second, several times."""
    if device.type == "cpu":
        times = []
        for _ in range(MEASUREMENTS):
            start = time.perf_counter()
            float(step())
            times.append(time.perf_counter() - start)
        return times
    count = max(1, round(SECONDS / event_times(step, 1)[0]))
    return [statistics.mean(event_times(step, count)) for _ in range(MEASUREMENTS)]


def peak_gib(device: torch.device) -> float:
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else 0.0


def run_ingot(shape: Shape, overrides: list[str]) -> dict[str, Any]:
    section = Section("peers", shape.recipe, [], shape.micro * shape.microbatches, 1, overrides)
    start = time.time()
    built = Built(section, "ingot", ["cuda_graphs=false"], shape.micro)
    built.start()
    ready = time.time() - start
    times = measure(lambda: built.steps.step(built.rows)[0], built.device)
    profile = profile_step(lambda: float(built.steps.step(built.rows)[0])) if built.device.type == "cuda" else {}
    return {"system": "ingot", "times": times, "microbatch": built.executor.microbatch, "first_loss": built.losses[0],
            "recompute": built.executor.recompute, "memory_gib": peak_gib(built.device),
            "compiled": "blocks", "seconds_to_ready": round(ready, 1), **profile}  # fmt: skip


def run_peer(shape: Shape, config: RunConfig, device: torch.device, micro: int) -> dict[str, Any]:
    start = time.time()
    torch.manual_seed(17)
    with torch.device(device):
        model: Any = NanoGPT(config) if shape.peer == "nanogpt" else LargePeer(config)
    if shape.peer == "nanogpt":
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.02)
    if device.type == "cuda":
        if shape.whole:
            model.compile(dynamic=False)
        else:
            for block in model.blocks():
                block.compile(dynamic=False)
            model.loss = torch.compile(model.loss, dynamic=False)
    step = PeerStep(config, model, device, micro)
    rows = shape.micro * shape.microbatches if device.type == "cuda" else 4
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (rows, config.max_seq_len))
    batch = Batch(tokens, np.roll(tokens, -1, axis=1), np.arange(rows))
    first = float(step.run(batch)[0])
    step.run(batch)
    ready = time.time() - start
    times = measure(lambda: step.run(batch)[0], device)
    return {"system": shape.peer, "times": times, "microbatch": micro, "first_loss": first, "recompute": None,
            "memory_gib": peak_gib(device), "compiled": "whole" if shape.whole else "blocks",
            "seconds_to_ready": round(ready, 1)}  # fmt: skip


def run_peer_that_fits(shape: Shape, config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Halve the peer's microbatch until it fits."""
    micro = shape.micro if device.type == "cuda" else 2
    while True:
        try:
            return run_peer(shape, config, device, micro)
        except torch.OutOfMemoryError:
            if micro == 1:
                raise
        micro //= 2  # outside the except block, whose traceback holds the tensors of the failed attempt
        print(f"  the peer does not fit; next, {micro} sequences at a time", flush=True)
        clean(device)


def report(name: str, shape: Shape, tiny: bool, rows: Path) -> None:
    small = [*TINY, *(["model.n_kv_heads=2"] if "llama" in shape.recipe else [])] if tiny else []
    overrides = [*shape.overrides, *small]
    if tiny:
        shape = Shape(shape.recipe, shape.peer, 2, 2, shape.overrides, shape.whole)
    device = torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu")
    config = load_config(RunConfig, [shape.recipe, "data=none", "data.eval=null", "global_train_batch_size=8",
                                     *overrides])  # fmt: skip
    matmul = matmul_tflops(device)
    ours = None
    for run in (lambda: run_ingot(shape, overrides), lambda: run_peer_that_fits(shape, config, device)):
        try:
            found = run()
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
            add_row(rows, {"section": f"peers-{name}", "variant": shape.peer if ours else "ingot", "error": said})
            clean(device)
            continue
        times = found.pop("times")
        median = statistics.median(times)
        rate = shape.micro * shape.microbatches * config.max_seq_len / median
        model = config.model
        guess = math.log(model.vocab_size)
        row = {
            "section": f"peers-{name}", "variant": found["system"], "model": shape.recipe,
            "family": model.family, "execution": "plain", "precision": config.precision,
            "deterministic": False, "seq_len": config.max_seq_len, "tokens_per_second": round(rate),
            "step_ms": round(median * 1e3, 1), "spread": round((max(times) - min(times)) / median, 4),
            "causal_rate": round(rate * model.flops_per_token(config.max_seq_len, True) / matmul / 1e12, 4),
            "full_rate": round(rate * model.flops_per_token(config.max_seq_len) / matmul / 1e12, 4),
            "matmul_tflops": matmul, **found,
            "sequences_per_step": shape.micro * shape.microbatches, "loss_of_guessing": round(guess, 3),
            "matmul_tflops_after": matmul_tflops(device), "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        }  # fmt: skip
        if ours:
            row |= {"base": "ingot", "ratio": round(rate / ours, 4), "ingot_over_peer": round(ours / rate, 4)}
        elif abs(found["first_loss"] - guess) > 2:
            row["error"] = "the first loss is not that of guessing"
        ours = ours or rate
        add_row(rows, row)
        clean(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--rows", type=Path, required=True, help="a file that gains a line of JSON for each system")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--wait", action="store_true", help="import, then wait for a line of input")
    arguments = parser.parse_args()
    prepare_torch()
    if torch.cuda.is_available():
        torch._dynamo.config.recompile_limit = 64
    if wait_for_turn():
        report(arguments.size, SHAPES[arguments.size], arguments.tiny, arguments.rows)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
