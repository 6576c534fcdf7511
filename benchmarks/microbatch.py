"""The microbatch that `auto` chooses against the largest that fits, found by trying sizes by hand, on one GPU.

    python benchmarks/microbatch.py mpt-125m mpt-1b mpt-7b > benchmarks/results/microbatch.txt
    python benchmarks/microbatch.py mpt-3b mpt-7b activation_checkpointing=true
    python benchmarks/microbatch.py --matrix                  twelve models, lengths and optimizers, about 10 minutes

Each size by hand, from the chosen one on, is a whole step: two microbatches, whose gradients add up, clipping and
optimizer, until one does not fit (if the chosen one does not, the largest is 0). `fsdp` is the same model wrapped by
FSDP2 on one process (parallel.shard=1), where only sizes that must fit are tried. The global batch is 512, so that any
power of two may be chosen; not compiled. A recipe may carry overrides of its own, as in llama-8b:max_seq_len=2048.
"""

import gc
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.errors import IngotError
from ingot.parallel.executors.base import Executor, NoMessages
from ingot.parallel.executors.build import build_distributed, build_single
from ingot.parallel.executors.oom import is_out_of_memory
from ingot.parallel.layout import Layout
from ingot.parallel.rank_env import RankEnv
from ingot.parallel.rendezvous import World, join_world
from ingot.training.loss_scale import LossScale
from ingot.training.microbatch_search import choose_microbatch
from ingot.training.optimizer import Optimizer
from ingot.training.step import train_step

DEVICE = torch.device("cuda", 0)
MATRIX = [
    "mpt-125m", "mpt-1b", "mpt-7b", "llama-8b:max_seq_len=2048", "llama-8b:max_seq_len=8192",
    "llama-8b:max_seq_len=8192,optimizer.name=lion", "llama-1b:max_seq_len=32768", "mpt-1b:max_seq_len=8192",
    "mpt-7b:optimizer.name=muon", "mpt-7b:precision=fp8", "pythia-2.8b", "gpt3-2.7b:optimizer.name=lion",
]  # fmt: skip


def measure(case: str, overrides: list[str], world: World | None) -> str:
    recipe, _, own = case.partition(":")
    config = load_config(RunConfig, [recipe, "data=x", "data.eval=null", "global_train_batch_size=512", "compile=false",
                                     "cuda_graphs=false", *filter(None, own.split(",")), *overrides])  # fmt: skip
    if world is not None:
        executor: Executor = build_distributed(config, Layout(), world, DEVICE, False, NoMessages())
    else:
        executor = build_single(config, DEVICE, False, NoMessages())
    optimizer = Optimizer(config.optimizer, {p.tensor: p.name for p in executor.parameters})
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        why = "; ".join(choose_microbatch(config, executor, Path(folder)))
    seconds = time.perf_counter() - start
    chosen, largest, peak, loss = executor.microbatch, 0, 0.0, 0.0
    optimizer.set_lr(0.0)
    run_step(config, executor, optimizer, 1)  # from here on there are moments
    size = chosen
    while size <= 256:
        torch.cuda.reset_peak_memory_stats(DEVICE)
        try:
            loss = run_step(config, executor, optimizer, size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            break
        if executor.microbatch < size:  # it did not fit, and was repeated in halves
            break
        largest, peak = size, torch.cuda.max_memory_allocated(DEVICE) / 2**30
        size *= 2
    kind = "fsdp" if world is not None else "plain"
    return (
        f"{case:10s} {kind:6s} chosen {chosen:4d} ({seconds:.1f} s)  largest by hand {largest:4d}  "
        f"peak {peak:6.1f} GiB  loss {loss:.5f}  | {why}"
    )


def run_step(config: RunConfig, executor: Executor, optimizer: Optimizer, size: int) -> float:
    """One step of two microbatches. Return its loss."""
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (2 * size, config.max_seq_len))
    executor.microbatch = size
    executor.config = config.model_copy(update={"global_train_batch_size": 2 * size})  # type: ignore[attr-defined]
    scaler = LossScale(DEVICE, enabled=False)
    result = train_step(
        executor, optimizer, scaler, Batch(tokens, tokens, np.arange(2 * size)), config.gradient_clipping
    )
    torch.cuda.synchronize(DEVICE)
    return float(result.loss_share)


def main() -> None:
    print(f"# python benchmarks/microbatch.py {' '.join(sys.argv[1:])}")
    print(f"# torch {torch.__version__}, {torch.cuda.get_device_name(0)}", flush=True)
    world = join_world(RankEnv(), DEVICE, 60)
    overrides = [argument for argument in sys.argv[1:] if "=" in argument and ":" not in argument]
    for case in MATRIX if "--matrix" in sys.argv else (a for a in sys.argv[1:] if ":" in a or "=" not in a):
        for wrapped in (None, world):
            try:
                print(measure(case, overrides, wrapped), flush=True)
            except IngotError as error:
                print(f"{case:10s} {'fsdp' if wrapped else 'plain':6s} refused: {error}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
