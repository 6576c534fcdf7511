"""The differentiable collectives that we call ourselves: an all-gather whose backward pass is a reduce-scatter, the
reverse, a sum whose backward pass is a sum, and nothing whose backward pass is a sum.

Not torch.distributed.nn.functional.all_gather: on gloo it returns wrong gradients when they are not row-major.
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
    """The tensors of all processes of a group, joined along a dimension."""
    return _gather(x.contiguous(), dim, group)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This process's part, along a dimension, of the sum of a tensor over a group."""
    return _scatter(x.contiguous(), "sum", dim, group)


def all_reduce(x: Tensor, group: dist.ProcessGroup, kind: str = "sum") -> Tensor:
    """The sum or maximum of a tensor over a group, without a backward pass; unlike torch.distributed's it compiles."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), kind, group))


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a tensor over a group, where every process goes on to use it for a part of the loss of its own."""
    return _Sum.apply(x, group)


def shared(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A tensor that all processes of a group have, each of which uses it for a part of the loss of its own."""
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
