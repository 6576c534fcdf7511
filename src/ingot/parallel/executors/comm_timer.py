"""How long this process stood still waiting for messages of others.

The steps of all processes take equally long, since each waits for the slowest; what tells them apart is the time that
they do not wait. Communication that runs while the device computes costs nothing and is not counted, nor is what a
compiled block sends by itself. On a GPU the waits are those of the stream that computes, timed by events on it: nothing
is synchronised, so a profiler, which would cost more than it shows, is not needed.
"""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

# every wait of ours and of torch's own parallelism goes through one of these
_PLACES: list[tuple[Any, str]] = [(dist.Work, "wait"), (functional, "wait_tensor"), (torch.cuda.Stream, "wait_event")]


class CommTimer:
    """Runs between `start` and `stop`; `seconds` is what it has counted since it was started last."""

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"
        self._waits: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._plain: list[Callable] = []

    def start(self) -> None:
        self._waits.clear()
        self._events.clear()
        if not self._plain:
            self._plain = [getattr(owner, name) for owner, name in _PLACES]
            for (owner, name), plain in zip(_PLACES, self._plain, strict=True):
                setattr(owner, name, self._timed(plain))

    def stop(self) -> None:
        for (owner, name), plain in zip(_PLACES, self._plain, strict=False):
            setattr(owner, name, plain)
        self._plain = []

    @property
    def seconds(self) -> float:
        """Waits for the device if it has not come to the end of the last wait; ask where the loop waits anyway."""
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
                return plain(*args, **kwargs)  # a stream of messages waits for another: nobody stands still
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            result = plain(*args, **kwargs)
            after.record()
            self._events.append((before, after))
            return result

        return on_gpu if self.gpu else on_cpu
