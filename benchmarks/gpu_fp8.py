"""fp8 wrapped by FSDP2: its gradients next to those of the plain process, and its losses next to bf16 over 300 steps.

    python benchmarks/gpu_fp8.py --rows rows.jsonl [--steps 300]      125m, about a minute on an H200
    python benchmarks/gpu_fp8.py --rows rows.jsonl --tiny             tiny, on a CPU

The text is Python's standard library, as in `ingot demo`, cut into words and other characters, the most frequent of
which are the tokens. Both runs see the same, with a short warmup. `largest_difference` is that of the means over tenths
of the run; next to it is that of bf16 from other initial weights.

Gradients are those of one step of two microbatches from the same weights, with deterministic kernels and rotary
positions: a learned position's embedding is added in fp32 by the plain process and in bf16 by the wrapped one, which
gathers it so, and fp8 makes much of such a difference.
"""

import argparse
import gc
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from gpu_table import add_row, wait_for_turn
from gpu_variants import alone

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.demo import standard_library
from ingot.launch.agent.rank_main import prepare_torch
from ingot.model import kernels
from ingot.parallel.dtensor import local
from ingot.parallel.executors import build
from ingot.parallel.executors.base import NoMessages
from ingot.parallel.executors.device import make_deterministic
from ingot.parallel.layout import Layout
from ingot.training.loss_scale import LossScale
from ingot.training.optimizer import Optimizer
from ingot.training.step import train_step

ROWS = 16  # sequences of a step
WARMUP = 20
UNKNOWN = 0
OTHER_SEED = "bf16, another seed"
RUNS = [("bf16", "bf16", ()), ("fp8", "fp8", ()), (OTHER_SEED, "bf16", ("seed=18",))]
TINY = ["model.d_model=64", "model.n_heads=4", "model.n_layers=2", "model.vocab_size=512", "max_seq_len=64"]


class Runs:
    """Executors of one model, and the batches that they all see."""

    def __init__(self, tiny: bool):
        on_card = torch.cuda.is_available() and not tiny
        self.device = torch.device("cuda", 0) if on_card else torch.device("cpu")  # joining a world needs the index
        self.tiny, self.rows = tiny, 4 if tiny else ROWS
        config = self.config("bf16")
        self.text = text_tokens(config.model.vocab_size, self.rows * config.max_seq_len * (30 if tiny else 300))

    def config(self, precision: str, *more: str) -> RunConfig:
        small = [*TINY, "device=cpu"] if self.tiny else []
        return load_config(RunConfig, [
            "mpt-125m", "model.positions=learned", "data=none", "data.eval=null", "cuda_graphs=false",
            f"global_train_batch_size={self.rows}", f"precision={precision}", "parallel.shard=1", *small, *more,
        ])  # fmt: skip

    def executor(self, config: RunConfig, wrapped: bool, compiled: bool) -> Any:
        compiled = compiled and self.device.type == "cuda"
        make_deterministic(config, self.device, compiled)
        if wrapped:
            found: Any = build.build_distributed(
                config, Layout(), alone(self.device), self.device, compiled, NoMessages()
            )
        else:
            found = build.build_single(config, self.device, compiled, NoMessages())
        found.microbatch = self.rows // 2
        found.hold_weights(max(found.hold_choices))
        found.weights_changed()
        return found

    def batch(self, number: int, config: RunConfig) -> Batch:
        """Sequences from random places of the text."""
        length = config.max_seq_len
        starts = np.random.default_rng(number).integers(0, len(self.text) - length, self.rows)
        tokens = self.text[starts[:, None] + np.arange(length + 1)[None]]
        return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(self.rows))

    def losses(self, steps: int, precision: str, *more: str) -> tuple[list[float], float]:
        """The losses of a run, and its seconds after the first step."""
        config = self.config(precision, *more)
        executor = self.executor(config, wrapped=True, compiled=True)
        optimizer = Optimizer(config.optimizer, {p.tensor: p.name for p in executor.parameters})
        scaler, found, start = LossScale(self.device, enabled=False), [], time.perf_counter()
        for number in range(steps):
            executor.begin_step(number)
            optimizer.set_lr(min(1.0, (number + 1) / WARMUP))
            batch = self.batch(number, config)
            found.append(train_step(executor, optimizer, scaler, batch, config.gradient_clipping).loss_share)
            if number == 0:
                float(found[0])  # waits for the compilers
                start = time.perf_counter()
        values = torch.stack(found).tolist()
        return values, time.perf_counter() - start

    def gradients(self, wrapped: bool) -> dict[str, torch.Tensor]:
        config = self.config("fp8", "model.positions=rotary", "deterministic=true")
        executor = self.executor(config, wrapped, compiled=False)
        executor.begin_step(0)
        executor.accumulate(self.batch(0, config))
        return {p.name: local(p.tensor.grad).float().clone() for p in executor.parameters}


def text_tokens(vocabulary: int, most: int) -> np.ndarray:
    """The standard library's source as the ids of its most frequent words, at most so many."""
    words: list[str] = []
    for _, source in standard_library():
        words += re.findall(r"\w+|[^\w]", source)
        if len(words) > most:
            break
    known = {word: number for number, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), UNKNOWN + 1)}
    return np.array([known.get(word, UNKNOWN) for word in words], np.int64)


def clean() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare_gradients(runs: Runs) -> dict[str, Any]:
    plain = runs.gradients(False)
    clean()
    wrapped = runs.gradients(True)
    clean()
    apart = {name: float((wrapped[name] - g).norm() / g.norm().clamp(min=1e-30)) for name, g in plain.items()}
    worst = max(apart, key=lambda name: apart[name])
    equal = [name for name, g in plain.items() if torch.equal(wrapped[name], g)]
    matrices = [name for name, g in plain.items() if name.startswith("blocks.") and g.ndim > 1]
    same = set(equal) & set(matrices)
    return {"variant": "gradients, wrapped and plain", "execution": "fsdp", "deterministic": True,
            "tensors": len(plain), "matrices": len(matrices), "equal_to_the_bit": len(equal),
            "matrices_equal_to_the_bit": len(same), "largest_relative_difference": apart[worst],
            "of": worst}  # fmt: skip


def compare_losses(runs: Runs, steps: int, rows: Path, common: dict[str, Any]) -> dict[str, Any]:
    means: dict[str, torch.Tensor] = {}
    last = {}
    for name, precision, more in RUNS:
        losses, seconds = runs.losses(steps, precision, *more)
        clean()
        means[name] = torch.stack([part.mean() for part in torch.tensor(losses).chunk(10)])
        last[name] = losses[-1]
        add_row(rows, common | {"variant": f"{name} wrapped", "precision": precision, "execution": "fsdp",
                                "first_loss": losses[0], "last_loss": losses[-1], "seconds": round(seconds, 1),
                                "means_of_tenths": [round(float(m), 4) for m in means[name]]})  # fmt: skip
    apart, other = ((means[name] / means["bf16"] - 1).abs() for name in ("fp8", OTHER_SEED))
    whole = {name: float(part.mean()) for name, part in means.items()}
    return {"variant": "losses, fp8 and bf16", "execution": "fsdp", "steps": steps,
            "of_the_whole": round(abs(whole["fp8"] / whole["bf16"] - 1), 5),
            "largest_difference": round(float(apart.max()), 5), "of_the_last_tenth": round(float(apart[-1]), 5),
            "of_the_last_step": round(abs(last["fp8"] / last["bf16"] - 1), 5),
            "largest_difference_of_seeds": round(float(other.max()), 5),
            "of_the_last_tenth_of_seeds": round(float(other[-1]), 5)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="a file that gains lines of JSON")
    parser.add_argument("--steps", type=int, help="300, or 30 of a tiny model")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--wait", action="store_true", help="import, then wait for a line of input")
    arguments = parser.parse_args()
    prepare_torch()
    if not wait_for_turn():
        return
    if arguments.tiny:
        kernels.why_no_fp8 = lambda device: None  # emulated on a CPU
    runs = Runs(arguments.tiny)
    model = runs.config("fp8").model
    common = {"section": "fp8-300", "model": "mpt-125m", "family": model.family, "deterministic": False,
              "precision": "fp8", "sequences_per_step": runs.rows, "torch": torch.__version__,
              "device": torch.cuda.get_device_name() if runs.device.type == "cuda" else "cpu"}  # fmt: skip
    try:
        add_row(arguments.rows, common | compare_gradients(runs))
    except Exception as error:  # the losses are worth having all the same
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        add_row(arguments.rows, common | {"variant": "gradients, wrapped and plain", "error": said})
    clean()
    steps = arguments.steps or (30 if arguments.tiny else 300)
    add_row(arguments.rows, common | compare_losses(runs, steps, arguments.rows, common))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
