"""When a fast path applies. What a run decides once is decided by `attach`; this is what may change between passes."""

from importlib.util import find_spec

import torch
from torch import Tensor

TRITON = find_spec("triton") is not None  # the CPU builds of torch come without it


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type of matrix products under autocast; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def kernels_apply(x: Tensor) -> bool:
    """Whether the Triton kernels apply to an activation: they train in bf16. Evaluation takes the reference path."""
    return torch.is_grad_enabled() and x.dtype == torch.bfloat16 == autocast_dtype(x.device)
