"""The device mesh of a run: one axis per kind of parallelism, the one with most traffic innermost.

Rank order is pipeline, replicate, shard, context, tensor. FSDP2 shards over `shard` and `context` together: ranks that
share a sequence hold the same weights and sum their gradients, as ranks with different sequences do.
"""

import itertools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ingot.parallel.layout import Layout

GRID = ("pipeline", "replicate", "shard", "tensor")
_NUMBERS = itertools.count()  # of the meshes in this process


class ParallelMesh:
    """The meshes of a layout, and this rank's coordinates."""

    def __init__(self, layout: Layout, device: torch.device):
        self.layout, self.device = layout, device
        a = layout
        # torch caches meshes by ranks and names, even after their process groups are destroyed
        suffix = str(next(_NUMBERS) or "")
        pipeline, replicate, shard, tensor = names = tuple(f"{n}{suffix}" for n in GRID)
        grid = init_device_mesh(
            device.type, (a.pipeline, a.replicate, a.shard * a.context, a.tensor), mesh_dim_names=names
        )
        self.fsdp: DeviceMesh = grid[replicate, shard] if a.replicate > 1 else grid[shard]
        self.tensor: DeviceMesh = grid[tensor]
        self.pipeline: DeviceMesh = grid[pipeline]
        self.context: DeviceMesh | None = None
        if a.context > 1:
            fine = (a.pipeline, a.replicate, a.shard, a.context, a.tensor)
            fine_names = (pipeline, replicate, f"data_{shard}", f"context{suffix}", tensor)
            self.context = init_device_mesh(device.type, fine, mesh_dim_names=fine_names)[f"context{suffix}"]
        rank = dist.get_rank()
        rank, self.tensor_rank = divmod(rank, a.tensor)
        rank, self.context_rank = divmod(rank, a.context)
        self.stage_rank, self.data_rank = divmod(rank, a.data)

    @property
    def is_first_of_data_rank(self) -> bool:
        """Whether this rank is the first of those that share a part of the batch."""
        return self.context_rank == 0 and self.tensor_rank == 0 and self.stage_rank == 0

    def replicas(self) -> list[list[int]]:
        """The groups of global ranks that hold the same weights."""
        a = self.layout
        grid = torch.arange(a.size).view(a.pipeline, a.replicate, -1)
        return grid.transpose(1, 2).reshape(-1, a.replicate).tolist()

    def leader_of_stage(self, stage_rank: int) -> int:
        """The global rank of the first rank of a pipeline position."""
        return stage_rank * (self.layout.size // self.layout.pipeline)

    def sum(self, value: Tensor, included: bool = True) -> Tensor:
        """The sum of a value over all ranks that pass `included`. All ranks must call it."""
        total = value.detach().clone() if included else torch.zeros_like(value)
        dist.all_reduce(total)
        return total
