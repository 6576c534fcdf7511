"""A microbatch's forward and backward pass as one CUDA graph, where the host launches kernels slower than they run.

So it is with small models and few tokens at a time: pythia-14m with 4 sequences waits three quarters of its time for
the host. torch's own way, `mode="reduce-overhead"`, records compiled parts one by one and copies what passes between
them; here the whole pass is recorded, our kernels and the adding up of gradients with it. The kernels are the same, so
are the results.
"""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.training.step import TrainStep

PASSES = 4  # timed
LONG = 0.1  # seconds of arithmetic in a microbatch, beside which launches are little
BUSY = 0.5  # of the peak: who reaches it does not wait for launches
ROOM = 0.45  # of the memory: above it a graph, which has memory of its own for one more microbatch, may not fit
GAIN = 0.97  # of the time: less of a gain than this is not worth the memory


class MicrobatchGraph:
    """A pass that was recorded once and is replayed on other tokens."""

    def __init__(
        self,
        work: Callable[[Tensor, Tensor, Tensor], Tensor],
        parameters: Iterable[Tensor],
        inputs: Tensor,
        labels: Tensor,
        divisor: Tensor,
    ):
        self.inputs, self.labels, self.divisor = inputs.clone(), labels.clone(), divisor.clone()
        ahead = torch.cuda.Stream()  # torch wants the passes before a recording on a stream of their own
        ahead.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(ahead):
            for _ in range(2):  # so that there are gradients for the recorded pass to add to
                work(self.inputs, self.labels, self.divisor)
        torch.cuda.current_stream().wait_stream(ahead)
        self.gradients = {p: p.grad for p in parameters if p.grad is not None}
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # a save may run on another thread
            self.loss = work(self.inputs, self.labels, self.divisor)

    def begin(self) -> None:
        """Put gradients where the recorded pass adds to them, at zero where there are none yet."""
        missing = [p for p in self.gradients if p.grad is None]
        for parameter in missing:
            parameter.grad = self.gradients[parameter]
        if missing:
            torch._foreach_zero_([self.gradients[p] for p in missing])

    def run(self, inputs: Tensor, labels: Tensor, divisor: Tensor) -> Tensor:
        """Add the gradients of a microbatch; its loss, until the next call."""
        self.inputs.copy_(inputs, non_blocking=True)
        self.labels.copy_(labels, non_blocking=True)
        self.divisor.copy_(divisor, non_blocking=True)
        self.graph.replay()
        return self.loss


def why_no_graph(config: RunConfig, device: torch.device, spread: bool, recompute: str | None) -> str | None:
    """Why a run's passes cannot be recorded, if they cannot."""
    if device.type != "cuda":
        return "there are none on a CPU"
    if spread:
        return "the collectives of a spread model are not recorded"
    if config.precision == "fp8":
        return "8-bit weights move in memory from step to step"
    if recompute is not None:
        return "what is recomputed is not recorded"
    m = config.model
    if max(m.emb_pdrop, m.resid_pdrop, m.attn_pdrop) > 0:
        return "dropout draws anew in each pass"
    return None


def check_graph(config: RunConfig, device: torch.device, spread: bool) -> None:
    """Refuse `cuda_graphs=true` where it cannot be."""
    why = why_no_graph(config, device, spread, config.recompute)
    if config.cuda_graphs is True and why is not None:
        raise ConfigError(f"cuda_graphs=true cannot be: {why}; leave it at auto")


def choose_graph(step: "TrainStep", batch: Batch, recompute: str | None, least_seconds: float) -> str | None:
    """After the first step, which compiles: decide by measuring whether a step replays a graph; gives what the user
    should know. `least_seconds` is what the arithmetic of a microbatch takes at the device's peak."""
    asked = step.config.cuda_graphs
    if asked is False or step.device.type != "cuda":
        return None
    if why := why_no_graph(step.config, step.device, step.spread is not None, recompute):
        return f"kernels launched one by one: no CUDA graph, since {why}"
    if asked == "auto" and least_seconds > LONG:
        return f"kernels launched one by one: beside {least_seconds:.1f} s of arithmetic in a microbatch that is little"
    try:
        return _measure(step, batch, least_seconds, always=asked is True)
    except torch.OutOfMemoryError:  # of the pass that was to be timed; the next step deals with it
        return "kernels launched one by one: no memory to try a CUDA graph"
    finally:
        step.optimizer.zero_grad()
        if step.graph is None:
            torch.cuda.empty_cache()


def _measure(step: "TrainStep", batch: Batch, least_seconds: float, always: bool) -> str:
    arguments = step.first_microbatch(batch)
    launched = _seconds(lambda: step.forward_backward(*arguments), step.device)
    used = least_seconds / launched
    one_by_one = f"kernels launched one by one: a microbatch takes {launched * 1e3:.1f} ms, {used:.0%} of the peak"
    if not always:
        if used > BUSY:
            return f"{one_by_one}, so launching is not what it waits for"
        if torch.cuda.memory_reserved(step.device) > ROOM * torch.cuda.mem_get_info(step.device)[1]:
            return f"{one_by_one}; a CUDA graph would need more memory than is left"
    try:
        graph = MicrobatchGraph(step.forward_backward, step.model.parameters(), *arguments)
    except RuntimeError as error:
        torch.cuda.synchronize(step.device)
        why = str(error).partition("\n")[0]
        if always:
            raise ConfigError(f"cuda_graphs=true cannot be: torch says {why}; leave it at auto") from None
        return f"{one_by_one}; it could not be recorded as a CUDA graph ({why})"
    replayed = _seconds(lambda: graph.run(*arguments), step.device)
    if not always and replayed > GAIN * launched:
        return f"{one_by_one}, and as a CUDA graph {replayed * 1e3:.1f}"
    step.graph = graph
    return f"CUDA graph: a microbatch takes {replayed * 1e3:.1f} ms, launched one by one {launched * 1e3:.1f}"


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    work()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(PASSES):
        work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / PASSES
