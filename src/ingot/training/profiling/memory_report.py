"""What fills the memory of a GPU at the moment when an allocation fails.

torch's allocator calls back before it raises its error, while everything is still in memory. The report is JSON:
totals, bytes by category, the largest blocks, and where in the code it happened. It is written for each failed
allocation in a step, also for one that the run survives with a smaller microbatch; the newest is kept.
"""

import gc
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ingot.config.training import ProfilerConfig
from ingot.errors import IngotError
from ingot.parallel.dtensor import local
from ingot.parallel.executors.base import Executor
from ingot.storage.atomic import write_json
from ingot.training.listener import RunListener
from ingot.training.optimizer import Optimizer
from ingot.training.runtime.run_files import PROFILE

LARGEST = 50  # blocks that the report lists
HISTORY_EVENTS = 100_000
WEIGHTS, GRADIENTS, STATE = "weights", "gradients", "optimizer state"
COPIES = "copies of weights in another type"
OTHER_TENSORS = "other tensors"
UNNAMED = "activations and temporary memory"


class Known(NamedTuple):
    """A tensor whose meaning is known."""

    category: str
    name: str
    shape: tuple[int, ...]
    dtype: str


class MemoryWatch:
    """Writes the report. Does nothing on a CPU, where the kernel ends a process that needs too much."""

    def __init__(
        self, config: ProfilerConfig, folder: Path, executor: Executor, optimizer: Optimizer, listener: RunListener
    ):
        self.folder, self.executor, self.optimizer = folder / PROFILE, executor, optimizer
        self.name = f"out-of-memory-rank-{executor.rank_env.rank}"
        self.doing: Callable[[], str] | None = None
        """What the run is doing, once it trains: before that, sizes are tried that need not fit."""
        self.listener, self._news = listener, ""
        self.has_history = config.memory_history and executor.device.type == "cuda"
        if executor.device.type == "cuda":
            _attach_once()
            _watches[executor.device.index] = self
        elif config.memory_history:
            listener.warn("profiler.memory_history needs a GPU: PyTorch does not record the memory of a CPU")
        if self.has_history:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY_EVENTS, stacks="python")

    def tell(self) -> None:
        """Say where a new report is."""
        if self._news:
            self.listener.note(f"what filled the memory: {self._news}")
            self._news = ""

    def close(self) -> None:
        self.tell()
        _watches.pop(self.executor.device.index, None)
        if self.has_history:
            torch.cuda.memory._record_memory_history(enabled=None)
            self.has_history = False

    def write(self, device: int, asked: int, total: int, free: int) -> None:
        """Write the report. Whatever goes wrong here must not hide that memory ran out."""
        if self.doing is None:
            return
        try:
            self.folder.mkdir(exist_ok=True)
            blocks = [block for segment in torch.cuda.memory_snapshot() if segment["device"] == device
                      for block in segment["blocks"]]  # fmt: skip
            known = {tensor.untyped_storage().data_ptr(): about for tensor, about in self._known_tensors()}
            path = self.folder / f"{self.name}.json"
            write_json(path, {
                "doing": self.doing(), "rank": self.executor.rank_env.rank, "microbatch": self.executor.microbatch,
                "asked_bytes": asked, "device_bytes": total, "free_bytes": free,
                "reserved_bytes": torch.cuda.memory_reserved(device), **describe_blocks(blocks, known),
                "stack": call_stack()[:-2],
            })  # fmt: skip
            self._news = str(path)
            if self.has_history:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"{self.name}.pickle"))
        except (OSError, RuntimeError, KeyError, IngotError) as error:
            self._news = f"unknown ({error})"

    def _known_tensors(self) -> Iterable[tuple[Tensor, Known]]:
        shapes = set()
        everything = [t for t in gc.get_objects() if type(t) is Tensor and _is_plain_cuda(t)]
        for parameter in self.executor.parameters:
            shapes.add(tuple(local(parameter.tensor).shape))
        for tensor in everything:
            copied = tuple(tensor.shape) in shapes and tensor.dtype != torch.float32
            yield tensor, _known(COPIES if copied else OTHER_TENSORS, "", tensor)
        for name, tensor in self.optimizer.state_tensors().items():
            yield local(tensor), _known(STATE, name, local(tensor))
        for parameter in self.executor.parameters:
            if parameter.tensor.grad is not None:
                gradient = local(parameter.tensor.grad)
                yield gradient, _known(GRADIENTS, parameter.name, gradient)
            yield local(parameter.tensor), _known(WEIGHTS, parameter.name, local(parameter.tensor))


def call_stack() -> list[str]:
    """Where the code is, the innermost call last. Backward passes run in a thread of torch's: the call that waits for
    them in the main thread comes first."""
    frames = traceback.extract_stack()
    main = threading.main_thread().ident
    if main is not None and main != threading.get_ident():
        frames = [*traceback.extract_stack(sys._current_frames()[main]), *frames]  # type: ignore[assignment]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


_watches: dict[int | None, MemoryWatch] = {}  # by device
_attached: list[bool] = []


def _attach_once() -> None:
    """torch keeps an observer for ever, so there is one per process, and it holds nothing itself. Attaching one has no
    public name yet; what it may do is in the documentation of torch.cuda.memory."""
    if not _attached:
        _attached.append(True)
        torch._C._cuda_attach_out_of_memory_observer(_observe)  # type: ignore[attr-defined]


def _observe(device: int, asked: int, total: int, free: int) -> None:
    if device in _watches:
        _watches[device].write(device, asked, total, free)


def describe_blocks(blocks: list[dict[str, Any]], known: dict[int, Known]) -> dict[str, Any]:
    """What the blocks of a snapshot of torch's allocator hold, given the meaning of some addresses."""
    bytes_by_category: Counter[str] = Counter()
    live, unused = [], 0
    for block in blocks:
        if block["state"] == "inactive":
            unused += block["size"]
            continue
        about = known.get(block["address"])
        bytes_by_category[about.category if about else UNNAMED] += block["size"]
        live.append((block["size"], about))
    live.sort(key=lambda item: -item[0])
    largest = [{"bytes": size, "category": about.category if about else UNNAMED}
               | ({"name": about.name, "shape": list(about.shape), "dtype": about.dtype} if about else {})
               for size, about in live[:LARGEST]]  # fmt: skip
    return {
        "allocated_bytes": sum(size for size, _ in live), "reserved_but_unused_bytes": unused,
        "bytes_by_category": dict(bytes_by_category.most_common()), "largest_blocks": largest,
    }  # fmt: skip


def _known(category: str, name: str, tensor: Tensor) -> Known:
    return Known(category, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _is_plain_cuda(tensor: Tensor) -> bool:
    if tensor.device.type != "cuda" or tensor.layout != torch.strided:
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # what tracing for the compiler leaves behind has no memory
        return False
    return True
