"""How long this rank waited for communication.

All ranks take the same time per step, since each waits for the slowest. Step time minus waiting time identifies the
slow rank. Communication that overlaps with compute is not counted, nor are collectives inside compiled code. On a GPU,
CUDA events around the waits of the compute stream measure them, without synchronization.
"""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

# every wait, ours and that of torch's parallelism, goes through one of these functions
_FUNCTIONS: list[tuple[Any, str]] = [
    (dist.Work, "wait"),
    (functional, "wait_tensor"),
    (torch.cuda.Stream, "wait_event"),
]


class CommTimer:
    """Measures between `start` and `stop`; `seconds` is the waiting time since the last `start`."""

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"
        self._waits: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._plain: list[Callable] = []

    def start(self) -> None:
        self._waits.clear()
        self._events.clear()
        if not self._plain:
            self._plain = [getattr(owner, name) for owner, name in _FUNCTIONS]
            for (owner, name), plain in zip(_FUNCTIONS, self._plain, strict=True):
                setattr(owner, name, self._timed(plain))

    def stop(self) -> None:
        for (owner, name), plain in zip(_FUNCTIONS, self._plain, strict=False):
            setattr(owner, name, plain)
        self._plain = []

    @property
    def seconds(self) -> float:
        """Synchronizes with the last wait, so read it where the loop synchronizes anyway."""
        if self._events:
            self._events[-1][1].synchronize()
        return sum(self._waits) + sum(a.elapsed_time(b) for a, b in self._events) / 1000

    def _timed(self, plain: Callable) -> Callable:
        @wraps(plain)
        def on_cpu(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self._waits.append(time.perf_counter() - start)

        @wraps(plain)
        def on_gpu(*args: Any, **kwargs: Any) -> Any:
            stream = torch.cuda.current_stream()
            if stream != torch.cuda.default_stream() or (isinstance(args[0], torch.cuda.Stream) and args[0] != stream):
                return plain(*args, **kwargs)  # a communication stream waits for another: compute continues
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            result = plain(*args, **kwargs)
            after.record()
            self._events.append((before, after))
            return result

        return on_gpu if self.gpu else on_cpu
