"""A block whose element-wise work is in Triton kernels, next to the matrix products that torch does.

    reference                              fused
    x = x + attn(norm_1(x))       n = norm(x)                      one kernel
    x = x + mlp(norm_2(x))        a = out(values(n))               values: fused_attention.py
                                  x, n = x + a, norm(x + a)        one kernel; makes the gradient of out's bias
                                  x = x + down(gelu(up(n)))        the GELU's kernel makes the gradient of up's bias

The modules share the layers of those they replace. Where the kernels do not apply, as in evaluation, they run the
reference.
"""

from torch import Tensor, nn

from ingot.model.attention import Attend, KVCache
from ingot.model.dropout import BlockKeys
from ingot.model.gpt import Block
from ingot.model.kernels.add_norm import add_norm
from ingot.model.kernels.bf16_weights import linear_without_bias_grad
from ingot.model.kernels.biased_gelu import biased_gelu
from ingot.model.kernels.conditions import kernels_apply
from ingot.model.mlp import MLP
from ingot.model.norm import LayerNorm, LowPrecisionLayerNorm, RMSNorm


class FusedBlock(Block):
    """A block without dropout on its residual stream."""

    def __init__(self, block: Block):
        nn.Module.__init__(self)
        self.parallel_residual, self.training = block.parallel_residual, block.training
        self.norm_1, self.attn, self.norm_2, self.mlp = block.norm_1, block.attn, block.norm_2, block.mlp
        self.pdrop, self.recompute = block.pdrop, block.recompute

    def compute(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: Attend,
        cache: KVCache | None = None,
        keys: BlockKeys | None = None,
    ) -> Tensor:
        if not kernels_apply(x):
            return super().compute(x, rotary, attend, cache, keys)
        attention_keys = keys.attention if keys is not None else None
        x, normed = add_norm(self.norm_1, x)
        if self.parallel_residual:
            x, other = add_norm(self.norm_2, x)
            return x + self.attn(normed, rotary, attend, cache, attention_keys) + self.mlp(other)
        values = self.attn.values(normed, rotary, attend, cache, attention_keys)
        x, normed = add_norm(self.norm_2, x, *linear_without_bias_grad(self.attn.out, values))
        return x + self.mlp(normed)


class FusedMLP(MLP):
    """An MLP with the exact GELU, whose kernel makes the gradient of the bias before it."""

    def __init__(self, mlp: MLP):
        nn.Module.__init__(self)
        self.activation, self.training = mlp.activation, mlp.training
        self.up, self.down = mlp.up, mlp.down

    def inner(self, x: Tensor) -> Tensor:
        if not kernels_apply(x):
            return super().inner(x)
        return biased_gelu(*linear_without_bias_grad(self.up, x))


class _FusedNorm(nn.Module):
    """Goes before the class of a norm: the same parameters, by the kernel."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm):
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.training = norm.normalized_shape, norm.eps, norm.training
        self.weight = norm.weight
        if isinstance(norm, nn.LayerNorm):
            self.register_parameter("bias", norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return add_norm(self, x)[1] if kernels_apply(x) else super().forward(x)


class FusedLayerNorm(_FusedNorm, LayerNorm):  # type: ignore[misc]
    pass


class FusedLowPrecisionLayerNorm(_FusedNorm, LowPrecisionLayerNorm):  # type: ignore[misc]
    pass


class FusedRMSNorm(_FusedNorm, RMSNorm):
    pass


FUSED_NORMS = {
    LayerNorm: FusedLayerNorm, LowPrecisionLayerNorm: FusedLowPrecisionLayerNorm, RMSNorm: FusedRMSNorm
}  # fmt: skip
