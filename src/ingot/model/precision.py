"""The data types of a run's matrix products. Weights, gradients and optimizer state are always fp32."""

from contextlib import AbstractContextManager, nullcontext

import torch

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""By `precision`; fp32 is absent. With fp8 the linear layers multiply in 8 bits, everything else runs in bf16."""


def compute_dtype(precision: str) -> torch.dtype:
    """The data type of matrix products."""
    return COMPUTE_DTYPES.get(precision, torch.float32)


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Run matrix products in the run's precision."""
    if precision not in COMPUTE_DTYPES:
        return nullcontext()
    return torch.autocast(device.type, dtype=COMPUTE_DTYPES[precision])
