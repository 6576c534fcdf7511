"""Whole tensors into shards and back, one at a time, so that no process ever holds a whole model.

torch's distribute_tensor would send each whole tensor from rank 0; here every process cuts its own part out of what it
drew or read itself, without a message.
"""

from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:  # importing it takes a second, which a run on one process has no use for
    from torch.distributed.tensor import DTensor


def is_spread(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor: this process holds a shard of it."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; changing it changes the tensor."""
    return tensor.to_local() if is_spread(tensor) else tensor


def fill(target: Tensor, whole: Tensor) -> None:
    """Copy into a parameter, or into its local shard, what belongs there of the whole tensor."""
    with torch.no_grad():
        if is_spread(target):
            target.to_local().copy_(local_part(whole, target))
        else:
            target.copy_(whole)


def local_part(whole: Tensor, like: "DTensor") -> Tensor:
    """This process's shard of a tensor that is spread like another one."""
    part = whole
    for dim, size, position, _ in _cuts(like):
        chunks = part.chunk(size, dim)
        part = chunks[position] if position < len(chunks) else part.narrow(dim, 0, 0)
    return part


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process that holds a shard of it; all of them must call this."""
    if not is_spread(tensor):
        return tensor.detach()
    cuts = _cuts(tensor)
    lengths, length = [], list(tensor.shape)
    for dim, size, position, _ in cuts:  # what each cut was made of
        lengths.append(length[dim])
        chunk = -(-length[dim] // size)
        length[dim] = max(0, min(chunk, length[dim] - chunk * position))
    part = local(tensor.detach())
    for (dim, size, _, group), full in zip(reversed(cuts), reversed(lengths), strict=True):
        chunk = -(-full // size)
        padded = part.new_zeros((*part.shape[:dim], chunk, *part.shape[dim + 1 :]))
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        part = torch.cat(parts, dim).narrow(dim, 0, full)
    return part


def _cuts(tensor: "DTensor") -> list[tuple[int, int, int, dist.ProcessGroup]]:
    """How a tensor was cut, in order: dimension, number of parts, this process's part, its group.

    Tensor parallelism cuts first and FSDP2 cuts what is left, so the axes are walked from the innermost out. (DTensor
    writes FSDP2's cut as a strided one where both are of the same dimension; the parts are the same.)
    """
    mesh = tensor.device_mesh
    cuts = []
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(tensor.placements[axis], "dim", None)
        if dim is not None and mesh.size(axis) > 1:
            cuts.append((dim, mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis)))
    return cuts
