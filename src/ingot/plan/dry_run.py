"""A training step of one rank of a large world, without the world: fake tensors, a fake process group, one process.

The model is built, cut and sharded by the same code as in a run, and every operation of a step is gone through; only
nothing is allocated, computed or sent. What comes out is the memory that one rank needs.

Not torch's own FSDPMemTracker: it counts the shards of a DTensor's optimizer state as temporary and once for each
tensor made of them, and does not see what DTensor makes on the way. Here every storage is counted while it lives.
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
from ingot.errors import ConfigError
from ingot.parallel.build import BuildOptions
from ingot.parallel.dtensor import local
from ingot.parallel.executors.base import scale_gradients, squared_norm
from ingot.parallel.fsdp import reduce_gradients
from ingot.parallel.layout import Layout
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
    """Bytes on rank 0: `weights`, `gradients` and `optimizer` between steps, and `peak`, the most during a step."""
    if layout.pipeline > 1:
        raise ConfigError("a dry run goes through one stage at a time; leave out parallel.pipeline")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # as a GPU's kernels do it: no attention weights are kept for dropout, and no bias is laid out for ALiBi
    positions = "none" if config.positions == "alibi" else config.positions
    config = config.model_copy(update={"attn_pdrop": 0.0, "positions": positions})
    device = torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.size)
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # cutting happens outside of the mode, since a mesh computes with real indices
        options = BuildOptions(device, precision, seq_len, recompute, allocating=fake)
        model = parallelize(config, parallel, layout, options)
        root = model.roots[0]
        parameters = list(root.parameters())
        memory = _LiveBytes()
        memory.count(map(local, parameters))
        sizes = {"weights": memory.live}
        with fake, memory:
            optimizer = make_optimizer(model)
            tokens = torch.zeros(micro, seq_len, dtype=torch.long)
            for _ in range(2):  # the optimizer's state comes with the first; its gradients stay, as when accumulating
                memory.peak = 0
                reduce_gradients(model.roots, last=True)
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


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}  # by the address of a storage's Python object

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor takes it apart, and its parts come by here
        out = func(*args, **kwargs or {})
        self.count(t for t in tree_iter(out) if isinstance(t, torch.Tensor))
        return out

    def __enter__(self) -> Any:
        self.resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> None:  # FSDP2 frees gathered weights so
            resize(storage, size)
            if id(storage) in self.sizes:
                self._set(id(storage), size)

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) not in self.sizes:
                weakref.finalize(storage, self._forget, id(storage)).atexit = False
            self._set(id(storage), storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.live += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key)
