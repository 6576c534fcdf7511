"""This process's part of a model, and what needs all processes: sums, norms, weights in and out."""

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ingot.model.init import init_weight
from ingot.parallel.dtensor import fill, gather, local, scale_to_limit
from ingot.parallel.parallelize import ParallelModel
from ingot.parallel.pipeline import stage_of_parameter


class Spread:
    """This process's part of a model, and what needs all processes: sums, norms, weights in and out."""

    def __init__(self, built: ParallelModel):
        self.config, self.mesh, self.roots, self.pipeline = built.config, built.mesh, built.roots, built.pipeline
        self.stages, roots, pipeline, mesh = built.stages, built.roots, built.pipeline, built.mesh
        self.names: dict[Tensor, str] = {
            parameter: name.removeprefix("gpt.") for root in roots for name, parameter in root.named_parameters()
        }
        # a tied embedding exists twice in a pipeline; the first stage's counts
        twins = pipeline.tied_copies if pipeline is not None else []
        self.twin = twins[-1] if twins and pipeline is not None and pipeline.has_last else None
        # how much of a gradient's square is this process's to count, where several hold the same shard
        shares = [0.0 if parameter is self.twin else 1 / _holders(parameter) for parameter in self.names]
        self.shares = torch.tensor(shares, dtype=torch.float64, device=mesh.device)
        self.counts_loss = mesh.tensor_rank == 0 and (pipeline is None or pipeline.has_last)

    # --- a step

    def train(self, mode: bool = True) -> None:
        for root in self.roots:
            root.train(mode)

    def loss_sum(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of a batch without gradients, as far as this process computes it."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(tokens, labels)
        return self.roots[0](tokens, labels)

    def before_backward(self, last: bool) -> None:
        """Sum gradients over replicas only after the last microbatch of a batch."""
        for root in self.roots:
            assert isinstance(root, FSDPModule)
            root.set_requires_all_reduce(last)
            root.set_is_last_backward(last)

    def batch_tokens(self, own: int) -> Tensor:
        """The loss-bearing tokens of the global batch, of which this process's part has `own`; at least 1."""
        count = torch.tensor(float(own), device=self.mesh.device)
        return self.mesh.sum(count, self.mesh.speaks_for_data).clamp(min=1.0)

    def lowest(self, value: float) -> float:
        """The lowest of all processes' values, on every process."""
        return min(row[0] for row in self.per_rank([value]))

    def first_says(self, value: bool) -> bool:
        """What the first process says, on every process."""
        return bool(self.mesh.sum(torch.tensor(float(value), device=self.mesh.device), dist.get_rank() == 0))

    def per_rank(self, values: list[float]) -> list[list[float]]:
        """The values of every process, in rank order."""
        own = torch.tensor(values, dtype=torch.float64, device=self.mesh.device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        return [row.tolist() for row in found]

    def differing_replicas(self) -> tuple[list[int], str] | None:
        """Ranks whose weights differ from those of most processes that should hold the same, and a parameter."""
        own = [local(parameter.detach()).contiguous().view(torch.int32) for parameter in self.names]
        bits = torch.stack([x.sum(dtype=torch.int64) for x in own])  # [parameters]
        found = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
        dist.all_gather(found, bits)
        for ranks in self.mesh.replicas():
            counts = Counter(tuple(found[r].tolist()) for r in ranks)
            if len(counts) > 1:
                (usual, most), (other, second) = counts.most_common(2)
                name = next(n for n, a, b in zip(self.names.values(), usual, other, strict=True) if a != b)
                return [r for r in ranks if most == second or tuple(found[r].tolist()) != usual], name
        return None

    def total_loss(self, own: Tensor) -> Tensor:
        return self.mesh.sum(own, self.counts_loss)

    def clip_gradients(self, limit: float | None, scale: Tensor | None = None) -> Tensor:
        """Divide gradients by `scale` and bring them to a global norm of at most `limit`; gives the norm between the
        two, the same on every process."""
        gradients = [local(parameter.grad) for parameter in self.names if parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients, 2.0))
        squares = (norms.double() ** 2 * self.shares).sum()
        return scale_to_limit(gradients, self.mesh.sum(squares).sqrt().float(), limit, scale)

    # --- weights

    def init_weights(self, seed: int) -> None:
        """The same initial weights as on one process."""
        with torch.no_grad():
            for parameter, name in self.names.items():
                whole = torch.empty(parameter.shape, device=self.mesh.device)
                init_weight(whole, name, self.config, seed)
                fill(parameter, whole)

    def collect(self, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, one at a time, on rank 0; the others take part and get nothing.

        `tensors` holds this process's shards by `KEY/PARAMETER` or `PARAMETER`; `shapes` all names with their shapes.
        """
        rank = dist.get_rank()
        for name, shape in shapes.items():
            stage = stage_of_parameter(name.rpartition("/")[2], self.config, self.stages)
            owner = self.pipeline.stage_rank_of(stage) if self.pipeline is not None else 0
            leader = self.mesh.leader_of_stage(owner)
            if owner == self.mesh.stage_rank:
                whole = gather(tensors[name]).cpu()
                if rank == leader != 0:
                    dist.send(whole.contiguous(), 0)
            elif rank == 0:
                whole = torch.empty(shape)
                dist.recv(whole, leader)
            if rank == 0:
                yield name, whole


def _holders(parameter: Tensor) -> int:
    """How many processes hold the same values of a parameter's shard."""
    assert isinstance(parameter, DTensor)
    copies = 1
    for axis, placement in enumerate(parameter.placements):
        if not hasattr(placement, "dim"):
            copies *= parameter.device_mesh.size(axis)
    return copies
