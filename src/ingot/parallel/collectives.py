"""The one differentiable collective that we call ourselves: an all-gather whose backward pass is a reduce-scatter.

Not torch.distributed.nn.functional.all_gather: on gloo it returns wrong gradients when they are not row-major.
"""

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

# the name since torch 2.13, and the one before
_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all processes of a group, joined along a dimension."""
    return _gather(x.contiguous(), dim, group)
