"""Linear layers whose matrix products run in 8-bit floats: twice the rate of bf16 on Hopper, half the bytes.

One scale per tensor, from its own largest value at each use (dynamic scaling): activations and weights in e4m3, which
has more digits, gradients in e5m2, which has more range. Products accumulate in fp32 and come out in bf16; the weight's
gradient comes out in fp32. What the backward pass keeps of the input is the 8-bit copy. Libraries do this with tensor
subclasses; a function and its gradient are enough, and the compiler fuses the scaling into what stands before it.

`torch._scaled_mm` wants its left side by rows and its right side by columns, hence the transposes. Where the hardware
lacks it the same numbers are made by quantising and multiplying in fp32, which is how the CPU tests check it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ingot.model.narrow import NarrowLinear, autocast_dtype

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every dimension, for the tensor cores


def why_no_fp8(device: torch.device) -> str | None:
    """Why a device cannot multiply 8-bit floats, if it cannot."""
    if device.type != "cuda":
        return "a CPU has no 8-bit matrix products"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no 8-bit matrix products (Ada, Hopper and later have)"
    return None


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in 8 bits, and the scale that brings it back."""
    largest = x.abs().amax(-1).amax().float()  # by rows first: the compiler does that where x is made
    scale = largest.clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: torch.dtype) -> Tensor:
    """a [n, k] times b [k, m], both in 8 bits; b lies by columns."""
    if a.is_cuda:
        return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=out, use_fast_accum=True)
    return ((a.float() @ b.float()) * (a_scale * b_scale)).to(out)


class _Multiply(torch.autograd.Function):
    """x [n, k] times a weight [m, k] transposed, given in 8 bits by rows and by columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
        x8, x_scale = quantize(x, FORWARD)
        ctx.save_for_backward(x8, x_scale, columns, scale)
        ctx.dtypes = x.dtype, weight.dtype
        return multiply(x8, x_scale, rows.t(), scale, torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x8, x_scale, columns, scale = ctx.saved_tensors
        d8, d_scale = quantize(d_y, BACKWARD)
        d_x = multiply(d8, d_scale, columns.t(), scale, torch.bfloat16)
        d_w = multiply(d8.t().contiguous(), d_scale, x8.t().contiguous().t(), x_scale, torch.float32)
        return d_x.to(ctx.dtypes[0]), d_w.to(ctx.dtypes[1]), None, None, None


class Fp8Linear(NarrowLinear):
    """A linear layer that multiplies in 8 bits under autocast; its weight stays fp32."""

    columns: Tensor  # the narrow weight transposed, [k, m]
    scale: Tensor

    @torch.no_grad()
    def renew(self) -> None:
        self.narrow, self.scale = quantize(self.weight, FORWARD)
        self.columns = self.narrow.t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # [n, k]
        if autocast_dtype(x.device) is None or flat.shape[0] % MULTIPLE:
            return nn.Linear.forward(self, x)
        with torch.autocast(x.device.type, enabled=False):
            y = _Multiply.apply(flat, self.weight, self.narrow, self.columns, self.scale).view(*x.shape[:-1], -1)
            return y + self.bias.to(y.dtype) if self.bias is not None else y


def use_fp8(model: nn.Module) -> int:
    """Turn the linear layers of a model to 8 bits, in place; gives how many there are."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    layers = [layer for layer in layers if not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)]
    for layer in layers:
        layer.__class__ = Fp8Linear
        assert isinstance(layer, Fp8Linear)
        layer.renew()
    return len(layers)
