"""A microbatch's forward and backward pass as one CUDA graph, for models whose kernels run faster than the host can
launch them.

This is the case for small models and few tokens: pythia-14m with 4 sequences spends three quarters of its time waiting
for the host. torch's `mode="reduce-overhead"` captures compiled regions one by one and copies tensors between them;
here the whole pass is captured, including our kernels and gradient accumulation. The kernels and results are the same.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.parallel.layout import Layout

TIMED_PASSES = 4
LONG_SECONDS = 0.1  # of compute in a microbatch: next to it, launch overhead is negligible
BUSY = 0.5  # of peak FLOP/s: beyond it, the GPU does not wait for launches
ROOM = 0.45  # of the memory: a graph has its own memory for one more microbatch, which may not fit beyond this
GAIN = 0.97  # of the time: a smaller gain is not worth the memory

Pass = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens, labels and divisor to a loss, with the gradients added."""


class MicrobatchGraph:
    """A pass that was captured once and is replayed on other tokens."""

    def __init__(self, forward_backward: Pass, parameters: Sequence[Tensor], arguments: tuple[Tensor, Tensor, Tensor]):
        self.arguments = tuple(tensor.clone() for tensor in arguments)
        stream = torch.cuda.Stream()  # torch wants warm-up passes on a side stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # so that the captured pass has gradients to add to
                forward_backward(*self.arguments)
        torch.cuda.current_stream().wait_stream(stream)
        self.gradients = {p: p.grad for p in parameters if p.grad is not None}
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # a save may run in another thread
            self.loss = forward_backward(*self.arguments)

    def begin(self) -> None:
        """Put zero gradients where the captured pass adds to them, unless there are some already."""
        missing = [p for p in self.gradients if p.grad is None]
        for parameter in missing:
            parameter.grad = self.gradients[parameter]
        if missing:
            torch._foreach_zero_([self.gradients[p] for p in missing])

    def run(self, tokens: Tensor, labels: Tensor, divisor: Tensor) -> Tensor:
        """Add the gradients of a microbatch. Return its loss, which is valid until the next call."""
        for own, given in zip(self.arguments, (tokens, labels, divisor), strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.loss


def why_no_graph(config: RunConfig, device: torch.device, recompute: str | None, layout: Layout) -> str | None:
    """Why a run's passes cannot be captured; None if they can."""
    if device.type != "cuda":
        return "a CPU has none"
    for axis in ("tensor", "context", "pipeline"):
        if getattr(layout, axis) > 1:
            return f"parallel.{axis} communicates inside a pass"
    if config.precision == "fp8":
        return "8-bit products pay where launches do not limit"
    if recompute is not None:
        return "activation checkpointing cannot be captured"
    m = config.model
    if max(m.emb_pdrop, m.resid_pdrop, m.attn_pdrop) > 0:
        return "each pass draws new dropout masks"
    return None


def check_cuda_graphs(config: RunConfig, device: torch.device, layout: Layout) -> None:
    """Refuse `cuda_graphs=true` where it is not possible."""
    why = why_no_graph(config, device, config.recompute, layout)
    if config.cuda_graphs is True and why is not None:
        raise ConfigError(f"cuda_graphs=true is not possible: {why}; use auto")


@dataclass(frozen=True)
class GraphChoice:
    """Decides, by measuring, whether the steps of a run replay a CUDA graph."""

    config: RunConfig
    device: torch.device
    recompute: str | None
    layout: Layout
    least_seconds: float
    """What the FLOPs of a microbatch take at the device's peak."""

    def measure(
        self, forward_backward: Pass, parameters: Sequence[Tensor], arguments: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[MicrobatchGraph | None, str]:
        """A graph if it is faster, and why. Gradients are left as the timed passes made them."""
        if why := why_no_graph(self.config, self.device, self.recompute, self.layout):
            return None, f"CUDA graphs: off ({why})"
        always = self.config.cuda_graphs is True
        if not always and self.least_seconds > LONG_SECONDS:
            return None, (
                f"CUDA graphs: off (launch overhead is negligible next to {self.least_seconds:.1f} s of compute per "
                "microbatch)"
            )
        try:
            launched = _seconds(lambda: forward_backward(*arguments), self.device)
            if not always and (why := self._why_not_worth_it(launched)):
                return None, f"CUDA graphs: off ({why})"
            graph = MicrobatchGraph(forward_backward, parameters, arguments)
            replayed = _seconds(lambda: graph.run(*arguments), self.device)
        except torch.OutOfMemoryError:
            if always:
                raise ConfigError(
                    "cuda_graphs=true needs memory for one more microbatch, which does not fit; use a smaller "
                    "device_train_microbatch_size, or auto"
                ) from None
            return None, "CUDA graphs: off (not enough memory to try)"
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)
            why = str(error).partition("\n")[0]
            if always:
                raise ConfigError(f"cuda_graphs=true is not possible: torch reports {why}; use auto") from None
            return None, f"CUDA graphs: off (the pass could not be captured: {why})"
        times = f"a microbatch takes {replayed * 1e3:.1f} ms with a graph, {launched * 1e3:.1f} ms without"
        if not always and replayed > GAIN * launched:
            return None, f"CUDA graphs: off ({times})"
        return graph, f"CUDA graphs: on ({times})"

    def _why_not_worth_it(self, launched: float) -> str | None:
        used = self.least_seconds / launched
        if used > BUSY:
            return f"at {used:.0%} of the peak the GPU does not wait for launches"
        if torch.cuda.memory_reserved(self.device) > ROOM * torch.cuda.mem_get_info(self.device)[1]:
            return f"the graph's memory may not fit; a microbatch takes {launched * 1e3:.1f} ms, {used:.0%} of the peak"
        return None


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    work()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(TIMED_PASSES):
        work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / TIMED_PASSES
