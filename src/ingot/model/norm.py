"""Layer norms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.config import ModelConfig


class LowPrecisionLayerNorm(nn.LayerNorm):
    """Layer norm in the autocast type: half the memory traffic, slightly coarser statistics (as MPT trains)."""

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(x)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            bias = self.bias.to(dtype) if self.bias is not None else None
            return F.layer_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), bias, self.eps)


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The configured norm over the last dimension."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.norm_eps)
    kind = LowPrecisionLayerNorm if config.norm == "low_precision_layernorm" else nn.LayerNorm
    return kind(width, eps=config.norm_eps, bias=not config.no_bias)
