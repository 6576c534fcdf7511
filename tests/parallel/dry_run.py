"""The memory of one rank of a large run, measured without the run: fake tensors, a fake process group, one process.

The model is built and sharded by the same code as in a run, and every operation of a training step is dispatched, but
nothing is allocated, computed or sent.

torch's own FSDPMemTracker counts the shards of a DTensor's optimizer state as temporary, counts them once per tensor
made of them, and misses DTensor's intermediate results. Here every storage is counted while it is alive.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ingot.config.model import ModelConfig
from ingot.config.parallel import ParallelConfig
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.model.gpt import GPT
from ingot.model.kernels import attach
from ingot.parallel.dtensor import local
from ingot.parallel.executors.base import scale_gradients, squared_norm
from ingot.parallel.executors.single import SingleProcess
from ingot.parallel.fsdp import GradientAccumulation
from ingot.parallel.layout import Layout
from ingot.parallel.loss_model import BuildOptions, LossModel
from ingot.parallel.parallelize import ParallelModel, parallelize


def dry_run(
    config: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    *,
    seq_len: int,
    micro: int,
    precision: str,
    recompute: str | None,
    make_optimizer: Callable[[ParallelModel], torch.optim.Optimizer],
) -> dict[str, int]:
    """Bytes on rank 0: `weights`, `gradients` and `optimizer` between steps, and `peak`, the maximum during a step."""
    if layout.pipeline > 1:
        raise ConfigError("a dry run does not support parallel.pipeline; remove it")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # as with GPU kernels: no attention weights stored for dropout, no bias matrix for ALiBi
    positions = "none" if config.positions == "alibi" else config.positions
    config = config.model_copy(update={"attn_pdrop": 0.0, "positions": positions})
    device = torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.size)
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # sharding happens outside of the mode, since a mesh computes with real indices
        options = BuildOptions(device, precision, seq_len, recompute, allocating=fake)
        model = parallelize(config, parallel, layout, options)
        root = model.roots[0]
        parameters = list(root.parameters())
        memory = _LiveBytes()
        memory.track(map(local, parameters))
        sizes = {"weights": memory.live()}
        with fake, memory:
            optimizer = make_optimizer(model)
            tokens = torch.zeros(micro, seq_len, dtype=torch.long)
            for _ in range(2):  # the first creates the optimizer state; gradients stay, as when accumulating
                memory.peak = 0
                GradientAccumulation(model.roots).before_microbatch(last=True)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                    loss = root(tokens, tokens)
                loss.backward()
                del loss
                sizes["gradients"] = sum(local(p.grad).nbytes for p in parameters if p.grad is not None)
                gradients = [local(p.grad) for p in parameters if p.grad is not None]
                scale_gradients(gradients, squared_norm(gradients).sqrt().float(), 1.0, None)
                optimizer.step()
        state = (t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor))
        return sizes | {"optimizer": sum(local(t).nbytes for t in state), "peak": memory.peak}
    finally:
        dist.destroy_process_group()


def peak_of_one_process(config: RunConfig, recompute: str | None, hold_copies: bool) -> int:
    """The most bytes during a step of `SingleProcess` whose microbatch is one sequence.

    It has the loss of the reference, whose logits are held whole, so a GPU needs a little less.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _LiveBytes() as memory:
        model = GPT(config.model)
        attach(model, device=torch.device("cpu"), precision=config.precision)
        executor = SingleProcess(LossModel(model), config, torch.device("cpu"))
        executor.set_recompute(recompute)
        executor.hold_weights(hold_copies)
        executor.weights_changed()
        optimizer = torch.optim.AdamW([p.tensor for p in executor.parameters], foreach=False)
        tokens = torch.zeros(1, config.max_seq_len, dtype=torch.long)
        for _ in range(2):  # the first creates the optimizer state
            memory.peak = 0
            executor.forward_backward(tokens, tokens, torch.ones(()))
            optimizer.step()
    return memory.peak


class _LiveBytes(TorchDispatchMode):
    """Tracks all storages that operations make, and the most bytes that were alive when one was made.

    Sizes are read each time instead of being counted once, since FSDP2 frees and refills the storages of gathered
    weights in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor dispatches its local tensors, which return here
        out = func(*args, **kwargs or {})
        before = len(self.storages)
        self.track(t for t in tree_iter(out) if isinstance(t, torch.Tensor))
        if len(self.storages) > before:
            self.peak = max(self.peak, self.live())
        return out

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.storages[id(storage)] = storage

    def live(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())
