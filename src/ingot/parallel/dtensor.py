"""Whole tensors into shards and back, one at a time, so that no process ever holds a whole model.

torch's distribute_tensor would send each whole tensor from rank 0; here every process cuts its own part out of what it
drew or read itself, without a message.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
            target.to_local().copy_(_take(whole, _cuts(target)))
        else:
            target.copy_(whole)


def local_offsets(tensor: Tensor) -> list[int]:
    """Where in the whole tensor this process's part begins."""
    offsets = [0] * tensor.ndim
    for cut in _cuts(tensor) if is_spread(tensor) else []:
        offsets[cut.dim] += min(cut.chunk * cut.position, cut.length)
    return offsets


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process that holds a shard of it; all of them must call this."""
    if not is_spread(tensor):
        return tensor.detach()
    return _join(local(tensor.detach()), _cuts(tensor))


def on_whole(function: Callable[[Tensor], Tensor], parts: Iterable[Tensor], like: Tensor) -> Iterator[Tensor]:
    """Apply a function to whole tensors that are all spread like one, given this process's parts of them; gives its
    parts of the results. Its arguments and results have the same shape and type.

    The processes take turns: of every so many tensors each puts one together, computes, and hands the parts back.
    """
    cuts = _cuts(like) if is_spread(like) else []
    if not cuts:
        yield from map(function, parts)
        return
    *others, cut = cuts
    queue = iter(parts)
    while mine := list(islice(queue, cut.parts)):
        pieces = torch.stack([cut.pad(part) for part in mine])  # one for each process; there may be too few
        pieces = F.pad(pieces, (0, 0) * mine[0].ndim + (0, cut.parts - len(mine)))
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=cut.group)
        if cut.position < len(mine):
            whole = function(_join(cut.unpad(received.unbind()), others))
            own = _take(whole, others)
            received = torch.stack([cut.pad(cut.take(own, position)) for position in range(cut.parts)])
        dist.all_to_all_single(pieces, received.contiguous(), group=cut.group)
        for part, piece in zip(mine, pieces, strict=False):
            yield piece.narrow(cut.dim, 0, part.shape[cut.dim])


def scale_to_limit(gradients: list[Tensor], norm: Tensor, limit: float | None, scale: Tensor | None) -> Tensor:
    """Divide gradients of a given norm by `scale` and bring them to a norm of at most `limit`, in one pass; gives the
    norm between the two."""
    factor = None
    if scale is not None:
        norm, factor = norm / scale, 1 / scale
    if limit is not None:
        clip = (limit / (norm + 1e-6)).clamp(max=1.0)
        factor = clip if factor is None else clip * factor
    if factor is not None:
        torch._foreach_mul_(gradients, factor)
    return norm


@dataclass(frozen=True)
class _Cut:
    """A dimension cut into equal chunks, the last ones shorter or empty."""

    dim: int
    length: int
    """Of the dimension before the cut."""
    parts: int
    position: int
    """This process's part."""
    group: dist.ProcessGroup

    @property
    def chunk(self) -> int:
        return -(-self.length // self.parts)

    def take(self, whole: Tensor, position: int) -> Tensor:
        start = min(self.chunk * position, self.length)
        return whole.narrow(self.dim, start, min(self.chunk, self.length - start))

    def pad(self, part: Tensor) -> Tensor:
        """A part as large as the first, which messages of one size need."""
        missing = [0, 0] * (part.ndim - self.dim - 1) + [0, self.chunk - part.shape[self.dim]]
        return F.pad(part, missing) if missing[-1] else part

    def unpad(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), self.dim).narrow(self.dim, 0, self.length)


def _take(whole: Tensor, cuts: list[_Cut]) -> Tensor:
    for cut in cuts:
        whole = cut.take(whole, cut.position)
    return whole


def _join(part: Tensor, cuts: list[_Cut]) -> Tensor:
    for cut in reversed(cuts):
        padded = cut.pad(part).contiguous()
        parts = [torch.empty_like(padded) for _ in range(cut.parts)]
        dist.all_gather(parts, padded, group=cut.group)
        part = cut.unpad(parts)
    return part


def _cuts(tensor: "DTensor") -> list[_Cut]:
    """How a tensor was cut, in order.

    Tensor parallelism cuts first and FSDP2 cuts what is left, so the axes are walked from the innermost out. (DTensor
    writes FSDP2's cut as a strided one where both are of the same dimension; the parts are the same.)
    """
    mesh, lengths = tensor.device_mesh, list(tensor.shape)
    cuts = []
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(tensor.placements[axis], "dim", None)
        if dim is not None and mesh.size(axis) > 1:
            cut = _Cut(dim, lengths[dim], mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis))
            lengths[dim] = max(0, min(cut.chunk, cut.length - cut.chunk * cut.position))
            cuts.append(cut)
    return cuts
