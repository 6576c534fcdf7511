"""The processes as a grid, one axis per kind of parallelism, the busiest links innermost.

Rank order is pipeline, replicate, shard, context, tensor. FSDP2 shards over `shard` and `context` together: the
processes that share a sequence hold the same weights and sum their gradients, as those that share a batch do.
"""

import itertools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ingot.parallel.layout import Layout

GRID = ("pipeline", "replicate", "shard", "tensor")
_LIVES = itertools.count()  # of meshes in this process


class ParallelMesh:
    """A layout laid over the processes of a run, seen from one of them."""

    def __init__(self, layout: Layout, device: torch.device):
        self.layout, self.device = layout, device
        a = layout
        # torch takes meshes of the same ranks and names for one, even if the groups of the first are gone
        life = str(next(_LIVES) or "")
        pipeline, replicate, shard, tensor = names = tuple(f"{n}{life}" for n in GRID)
        grid = init_device_mesh(
            device.type, (a.pipeline, a.replicate, a.shard * a.context, a.tensor), mesh_dim_names=names
        )
        self.fsdp: DeviceMesh = grid[replicate, shard] if a.replicate > 1 else grid[shard]
        self.tensor: DeviceMesh = grid[tensor]
        self.pipeline: DeviceMesh = grid[pipeline]
        self.context: DeviceMesh | None = None
        if a.context > 1:
            fine = (a.pipeline, a.replicate, a.shard, a.context, a.tensor)
            fine_names = (pipeline, replicate, f"data_{shard}", f"context{life}", tensor)
            self.context = init_device_mesh(device.type, fine, mesh_dim_names=fine_names)[f"context{life}"]
        rank = dist.get_rank()
        rank, self.tensor_rank = divmod(rank, a.tensor)
        rank, self.context_rank = divmod(rank, a.context)
        self.stage_rank, self.data_rank = divmod(rank, a.data)

    @property
    def speaks_for_data(self) -> bool:
        """Whether this process is the one that counts among those with the same part of the batch."""
        return self.context_rank == 0 and self.tensor_rank == 0 and self.stage_rank == 0

    def replicas(self) -> list[list[int]]:
        """The groups of global ranks that hold the same weights."""
        a = self.layout
        grid = torch.arange(a.size).view(a.pipeline, a.replicate, -1)
        return grid.transpose(1, 2).reshape(-1, a.replicate).tolist()

    def leader_of_stage(self, stage_rank: int) -> int:
        """The global rank of the first process of a pipeline position."""
        return stage_rank * (self.layout.size // self.layout.pipeline)

    def sum(self, value: Tensor, mine: bool = True) -> Tensor:
        """The sum of a value over all processes for which `mine` holds, on every process."""
        total = value.detach().clone() if mine else torch.zeros_like(value)
        dist.all_reduce(total)
        return total
