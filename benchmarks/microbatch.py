"""The microbatch that `auto` chooses against the largest that fits, found by trying sizes by hand, on one GPU.

    python benchmarks/microbatch.py mpt-125m mpt-1b mpt-7b > benchmarks/results/microbatch.txt
    python benchmarks/microbatch.py mpt-3b mpt-7b activation_checkpointing=true

Each size by hand, from the chosen one on, is a whole step: two microbatches, whose gradients add up, clipping and
optimizer, until one does not fit (if the chosen one does not, the largest is 0). `fsdp` is the same model wrapped by
FSDP2 on one process (parallel.shard=1), where only sizes that must fit are tried. The global batch is 512, so that any
power of two may be chosen; not compiled.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.parallel.build import BuildOptions, build_single
from ingot.parallel.executors.distributed import Spread
from ingot.parallel.layout import Layout
from ingot.parallel.parallelize import parallelize
from ingot.parallel.rank_env import RankEnv
from ingot.parallel.rendezvous import join_world
from ingot.training.device import device_memory
from ingot.training.microbatch_search import choose_microbatch, choose_recompute
from ingot.training.oom import is_out_of_memory
from ingot.training.optimizer import Optimizer
from ingot.training.step import TrainStep

DEVICE = torch.device("cuda", 0)


def measure(recipe: str, overrides: list[str], wrapped: bool) -> str:
    config = load_config(RunConfig, [recipe, "data=x", "global_train_batch_size=512", "compile=false", *overrides])
    spread = None
    if wrapped:
        recompute = choose_recompute(config, Layout(), device_memory(DEVICE))[0]
        options = BuildOptions(DEVICE, config.precision, config.max_seq_len, recompute)
        spread = Spread(parallelize(config.model, config.parallel, Layout(), options))
        spread.init_weights(1)
        model, names = spread.roots[0], spread.names
    else:
        model, _ = build_single(config.model, 1, BuildOptions(DEVICE, config.precision, config.max_seq_len))
        names = {p: name for name, p in model.gpt.named_parameters()}
    optimizer = Optimizer(config.optimizer, names)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        chosen, why = choose_microbatch(config, model, DEVICE, spread, Path(folder))
    seconds = time.perf_counter() - start
    largest, peak, loss = 0, 0.0, 0.0
    optimizer.set_lr(0.0)
    run_step(config, model, optimizer, spread, 1)  # from here on there are moments
    size = chosen
    while size <= 256:
        torch.cuda.reset_peak_memory_stats(DEVICE)
        try:
            loss = run_step(config, model, optimizer, spread, size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            break
        largest, peak = size, torch.cuda.max_memory_allocated(DEVICE) / 2**30
        size *= 2
    kind = "fsdp" if wrapped else "plain"
    return (
        f"{recipe:10s} {kind:6s} chosen {chosen:4d} ({seconds:.1f} s)  largest by hand {largest:4d}  "
        f"peak {peak:6.1f} GiB  loss {loss:.5f}  | {why}"
    )


def run_step(config: RunConfig, model: nn.Module, optimizer: Optimizer, spread: Spread | None, size: int) -> float:
    """One step of two microbatches; gives its loss."""
    config = config.model_copy(update={"global_train_batch_size": 2 * size})
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (2 * size, config.max_seq_len))
    step = TrainStep(config, model, optimizer, DEVICE, size, spread)
    loss = step.run(Batch(tokens, tokens, np.arange(2 * size)))[0]
    torch.cuda.synchronize(DEVICE)
    return float(loss)


def main() -> None:
    print(f"# python benchmarks/microbatch.py {' '.join(sys.argv[1:])}")
    print(f"# torch {torch.__version__}, {torch.cuda.get_device_name(0)}", flush=True)
    join_world(RankEnv(), DEVICE, 60)
    overrides = [argument for argument in sys.argv[1:] if "=" in argument]
    for recipe in (argument for argument in sys.argv[1:] if "=" not in argument):
        for wrapped in (False, True):
            print(measure(recipe, overrides, wrapped), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
