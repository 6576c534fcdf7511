"""Full tensors into shards and back, one at a time, so that no rank ever holds a whole model.

torch's distribute_tensor would send each full tensor from rank 0. Here every rank cuts its own shard out of what it
initialized or read itself, without communication.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:  # importing it takes a second, which a run on one process does not need
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    Placements = list[Placement]

# DTensor warns on every rank that two sharded axes take two all-gathers, and that gloo has no all-to-all
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor: this rank holds a shard of it."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor. Writing to it changes the tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def fill(target: Tensor, full: Tensor) -> None:
    """Copy into a parameter, or into this rank's shard of it, its part of the full tensor."""
    with torch.no_grad():
        part = local(target)
        for dim, (offset, length) in enumerate(zip(local_offsets(target), part.shape, strict=True)):
            full = full.narrow(dim, min(offset, full.shape[dim]), length)
        part.copy_(full)


def local_offsets(tensor: Tensor) -> list[int]:
    """Where in the full tensor this rank's shard begins."""
    if not is_sharded(tensor):
        return [0] * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return list(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def mesh_cuts(tensor: Tensor) -> list[tuple[int, int, int]]:
    """The axes of the mesh that cut a tensor, in the order of the cuts: their size, the distance of the ranks along
    them, and the dimension that they cut. A tensor that every rank has whole is cut by none."""
    if not is_sharded(tensor):
        return []
    mesh, cuts = tensor.device_mesh, list[tuple[int, int, int]]()
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if mesh.size(axis) == 1 or not hasattr(placement, "dim"):
            continue
        along = mesh.mesh.movedim(axis, 0).reshape(mesh.size(axis), -1)[:, 0].tolist()
        # a strided shard is a part of a part: the axes that follow it, as many as its factor says, cut before it
        place, before = 0, getattr(placement, "split_factor", 1)
        while before > 1 and place < len(cuts):
            before //= cuts[place][0] if cuts[place][2] == placement.dim else 1
            place += 1
        cuts.insert(place, (mesh.size(axis), along[1] - along[0], placement.dim))
    return cuts


def gather(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank that holds a shard of it; all of them must call this."""
    with torch.no_grad():
        return tensor.full_tensor() if is_sharded(tensor) else tensor.detach()


def apply_to_full_tensors(
    function: Callable[[Tensor], Tensor], parts: Iterable[Tensor], like: "DTensor"
) -> Iterator[Tensor]:
    """Apply a function to full tensors that are sharded like `like`, given this rank's shards of them.

    Yields this rank's shards of the results, which have the same shape and type. The ranks share the work: of every n
    tensors, each of the n ranks along the outermost sharded axis of the mesh assembles one and computes.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = like.device_mesh
    axes = [axis for axis, p in enumerate(like.placements) if hasattr(p, "dim") and mesh.size(axis) > 1]
    if not axes:
        yield from map(function, parts)
        return
    sharded = [_shifted(placement) for placement in like.placements]
    in_turns: Placements = [Shard(0) if axis == axes[0] else Replicate() for axis in range(mesh.ndim)]

    def redistribute(stack: Tensor, count: int, before: "Placements", after: "Placements") -> Tensor:
        shape = torch.Size([count, *like.shape])
        strides = torch.empty(shape, device="meta").stride()
        tensor = DTensor.from_local(stack, mesh, before, run_check=False, shape=shape, stride=strides)
        return tensor.redistribute(placements=after).to_local()

    queue = iter(parts)
    while mine := list(islice(queue, mesh.size(axes[0]))):
        full = redistribute(torch.stack(mine), len(mine), sharded, in_turns)
        results = torch.stack([function(tensor) for tensor in full]) if len(full) else full
        yield from redistribute(results, len(mine), in_turns, sharded)


def _shifted(placement: "Placement") -> "Placement":
    """The placement of a stack of tensors, given that of each."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement
