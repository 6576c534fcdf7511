"""A training step of one rank of a large world, without the world: fake tensors, a fake process group, one process.

The model is built, cut and sharded by the same code as in a run, and every operation of a step is gone through; only
nothing is allocated, computed or sent. What comes out is the memory that one rank needs, by category.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from ingot.errors import ConfigError
from ingot.model.config import ModelConfig
from ingot.parallel.apply import Spread, spread_model
from ingot.parallel.config import Layout, ParallelConfig


def dry_run(
    config: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    *,
    seq_len: int,
    micro: int,
    precision: str,
    recompute: str | None,
    make_optimizer: Callable[[Spread], torch.optim.Optimizer],
) -> dict[str, float]:
    """Bytes at the peak of a step on rank 0, by torch's categories (SHARDED_PARAM, OPT, ACT, ...; Total)."""
    if layout.pipeline > 1:
        raise ConfigError("a dry run goes through one stage at a time; leave out parallel.pipeline")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.size)
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # cutting happens outside of the mode, since a mesh computes with real indices
        spread = spread_model(
            config, parallel, layout, device, seq_len=seq_len, precision=precision, kernel="sdpa", recompute=recompute,
            compiled=False, allocating=fake,
        )  # fmt: skip
        root = spread.roots[0]
        with ExitStack() as stack:
            stack.enter_context(fake)
            optimizer = make_optimizer(spread)
            tokens = torch.zeros(micro, seq_len, dtype=torch.long)
            tracker = FSDPMemTracker(root, optimizer)
            tracker.track_inputs((tokens,))
            stack.enter_context(tracker)
            for step in range(2):  # the optimizer's state comes with the first
                spread.before_backward(last=True)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                    loss = root(tokens, tokens)
                loss.backward()
                spread.clip_gradients(1.0)
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")[device]
        return {str(category).rpartition(".")[2]: float(size) for category, size in peak.items()}
    finally:
        dist.destroy_process_group()
