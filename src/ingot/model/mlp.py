"""The feed-forward half of a block."""

import torch.nn.functional as F
from torch import Tensor, nn

from ingot.config.model import ModelConfig


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
        """The input of the down projection."""
        if self.activation == "swiglu":
            return F.silu(self.gate(x)) * self.up(x)
        return F.gelu(self.up(x), approximate="tanh" if self.activation == "gelu_tanh" else "none")
