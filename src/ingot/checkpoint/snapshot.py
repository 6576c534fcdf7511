"""A copy in host memory of what a rank saves, laid out like its files."""

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ingot.checkpoint.manifest import MODEL, OPTIMIZER
from ingot.checkpoint.safetensors_file import PADDING, bytes_of, header_of
from ingot.checkpoint.save_plan import Key, SavePlan, Tensors
from ingot.parallel.dtensor import local


@dataclass(frozen=True)
class FileCopy:
    """What will be a file."""

    whole: memoryview
    header: memoryview
    content: memoryview
    weights_bytes: int | None
    """Size of the beginning of the file that holds all weights, where training state follows."""


class Snapshot:
    """The copy. Its memory is touched before it is needed, pinned for a GPU's copy engine, and reused by every save.

    Copying overlaps with the next forward and backward pass: on a stream of the GPU, or in the writing thread. Only an
    update of the weights waits for it.
    """

    def __init__(self, tensors: Tensors, plan: SavePlan, allocate: Callable[[int], mmap.mmap] = partial(mmap.mmap, -1)):
        self.files: dict[str, FileCopy] = {}
        self._copies: list[tuple[str, str, Tensor]] = []
        chosen = [tensors[kind][name] for keys in plan.files.values() for kind, name in keys]
        self.on_gpu = any(local(tensor).is_cuda for tensor in chosen)
        for file, keys in plan.files.items():
            self._allocate(file, keys, tensors, allocate)
        self._stream: Any = torch.cuda.Stream() if self.on_gpu else None
        self._todo: list[tuple[Tensor, Tensor]] = []
        self._done = threading.Event()
        self._done.set()

    @property
    def bytes(self) -> int:
        return sum(len(file.header) + len(file.content) for file in self.files.values())

    def _allocate(self, file: str, keys: list[Key], tensors: Tensors, allocate: Callable[[int], mmap.mmap]) -> None:
        content = {key: local(tensors[key[0]][key[1]].detach()) for key in keys}
        weights = sum(tensor.nbytes for (kind, _), tensor in content.items() if kind == MODEL)
        gap = -weights % 8 if any(kind == OPTIMIZER for kind, _ in keys) else 0
        named = [(name, tensor) for (kind, name), tensor in content.items() if kind == MODEL]
        named += [(PADDING, torch.empty(gap, dtype=torch.uint8))] if gap else []
        named += [(name, tensor) for (kind, name), tensor in content.items() if kind != MODEL]
        header, total = header_of(dict(named)), sum(tensor.nbytes for _, tensor in named)
        memory = allocate(len(header) + max(total, 1))
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory[: len(header)] = header
        buffer = torch.frombuffer(memory, dtype=torch.uint8)[len(header) :].zero_()
        if self.on_gpu:
            _pin(self, memory)
        view, begin = memoryview(memory), 0
        both = 0 < weights < total
        self.files[file] = FileCopy(
            view, view[: len(header)], view[len(header) : len(header) + total], len(header) + weights if both else None
        )
        for (kind, name), tensor in content.items():
            if kind != MODEL and begin == weights:
                begin += gap
            copy = buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._copies.append((kind, name, copy))
            begin += tensor.nbytes

    def begin(self, tensors: Tensors) -> None:
        """Start to copy."""
        self._done.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        for kind, name, copy in self._copies:
            source = local(tensors[kind][name].detach())
            if source.is_cuda:
                with torch.cuda.stream(self._stream):
                    copy.copy_(source, non_blocking=True)
            else:
                self._todo.append((copy, source))

    def finish(self) -> None:
        """In the writing thread: copy what is left, and return when the copy is complete."""
        try:
            for copy, source in self._todo:
                if source.is_contiguous():  # numpy copies in this thread alone and lets the others run
                    np.copyto(np.asarray(bytes_of(copy)), np.asarray(bytes_of(source)))
                else:
                    copy.copy_(source)
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._todo.clear()
            self._done.set()

    def hold(self) -> None:
        """Make the next change of the state wait for the copy: on a GPU its queue waits, otherwise the caller."""
        if self._done.is_set():
            return
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if self._todo:
            self._done.wait()


def _pin(owner: Snapshot, memory: mmap.mmap) -> None:
    """Lock memory for a GPU's copy engine while its owner lives.

    It must be unlocked before it is freed: the next mapping may get the same address, and the driver refuses copies
    into memory that it has registered for another.
    """
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    driver: Any = torch.cuda.cudart()
    torch.cuda.check_error(driver.cudaHostRegister(address, len(memory), 0))
    weakref.finalize(owner, driver.cudaHostUnregister, address).atexit = False
