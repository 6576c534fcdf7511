"""Norms over the last dimension. Weights are cast to the type of the input: FSDP2 may gather them in bf16."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.config.model import ModelConfig


class LayerNorm(nn.LayerNorm):
    """Layer norm."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.to(x.dtype) if self.bias is not None else None
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class LowPrecisionLayerNorm(LayerNorm):
    """Layer norm in the autocast type: half the memory traffic, slightly coarser statistics (as MPT trains)."""

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(x)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return super().forward(x.to(dtype))


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The configured norm."""
    if config.norm == "rmsnorm":
        return RMSNorm(width, eps=config.norm_eps)
    kind = LowPrecisionLayerNorm if config.norm == "low_precision_layernorm" else LayerNorm
    return kind(width, eps=config.norm_eps, bias=config.has_norm_bias)
