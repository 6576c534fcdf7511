"""The feed-forward half of a block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.config.model import ModelConfig
from ingot.model.gelu import Gelu
from ingot.model.kernels.bf16_weights import TRITON, fuses, leave_bias

if TRITON:
    from ingot.model.kernels.biased_gelu import biased_gelu


class MLP(nn.Module):
    """down(gelu(up(x))), or the gated down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        bias = not config.no_bias
        self.activation = config.activation
        if config.activation == "swiglu":
            self.gate = nn.Linear(config.d_model, config.ffn_width, bias=bias)
        self.up = nn.Linear(config.d_model, config.ffn_width, bias=bias)
        self.down = nn.Linear(config.ffn_width, config.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """What the down projection gets."""
        if self.activation == "swiglu":
            return F.silu(self.gate(x)) * self.up(x)
        if self.activation == "gelu" and fuses(self.up, x):
            return biased_gelu(*leave_bias(self.up, x))
        x = self.up(x)
        if self.activation == "gelu" and torch.compiler.is_compiling() and x.is_cuda and x.dtype == torch.bfloat16:
            return Gelu.apply(x)
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")
