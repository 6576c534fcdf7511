"""When a fast path applies. What a run decides once is decided by `attach`; this is what may change between passes."""

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

TRITON = find_spec("triton") is not None  # the CPU builds of torch come without it
LEAST_CAPABILITY = (8, 0)  # of Triton's kernels and of matrix products in bf16: Ampere


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type of matrix products under autocast; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def kernels_apply(x: Tensor) -> bool:
    """Whether the Triton kernels apply to an activation: they train in bf16. Evaluation takes the reference path."""
    return torch.is_grad_enabled() and x.dtype == torch.bfloat16 == autocast_dtype(x.device)


@cache
def why_no_triton(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on a device; None if they can. Our smallest kernel is compiled and compared
    with its reference, since a driver that is too old fails only then."""
    if device.type != "cuda":
        return "there is no GPU"
    if not TRITON:
        return "Triton is not installed"
    if (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"Triton's kernels need compute capability 8.0 (Ampere) or later, {name} has {found[0]}.{found[1]}"
    try:
        from ingot.model.kernels.biased_gelu import biased_gelu

        x = torch.linspace(-4, 4, 64, device=device)
        apart = float((biased_gelu(x, None) - F.gelu(x)).abs().max())
    except Exception as error:
        return f"Triton reports {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None if apart < 1e-3 else f"a trial of Triton differs from the reference by {apart:.2g}"
