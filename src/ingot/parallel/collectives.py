"""Differentiable collectives.

    forward            backward
    all_gather         reduce_scatter
    reduce_scatter     all_gather
    sum_over           all_reduce
    shared             all_reduce        (forward: the identity)

torch.distributed.nn.functional.all_gather is not used: on gloo it returns wrong gradients unless they are contiguous.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

# the names since torch 2.13, and those before
_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
_scatter = getattr(functional, "reduce_scatter_single_autograd", None) or functional.reduce_scatter_tensor_autograd


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks of a group, concatenated along a dimension."""
    return _gather(x.contiguous(), dim, group)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along a dimension, of the sum of a tensor over a group."""
    return _scatter(x.contiguous(), "sum", dim, group)


def all_reduce(x: Tensor, group: dist.ProcessGroup, kind: str = "sum") -> Tensor:
    """The sum or maximum of a tensor over a group, without a backward pass; unlike torch.distributed's it compiles."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), kind, group))


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a tensor over a group, each of whose ranks then computes a different part of the loss from it."""
    return _Sum.apply(x, group)


def shared(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A tensor that is equal on all ranks of a group, each of which computes a different part of the loss from it."""
    return _Shared.apply(x, group)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.group), None
