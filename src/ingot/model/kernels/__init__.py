"""The fast paths: Triton kernels, 8-bit products, bf16 copies of the weights.

`attach` puts them into a model by replacing modules, once, before its first pass. The new modules share the parameters
of the old ones, so names and checkpoints stay the same. The model itself (`model/*.py`) does not know of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ingot.config.model import ModelConfig
from ingot.model.attention import SdpaAttention
from ingot.model.gpt import GPT, Block
from ingot.model.kernels.bf16_weights import Bf16Embedding, Bf16Linear, CopiedWeight, WorkingLinear
from ingot.model.kernels.conditions import why_no_triton
from ingot.model.kernels.fp8.linear import Fp8Linear, fits_fp8, why_no_fp8
from ingot.model.kernels.fused_attention import AlibiAttention, CudnnAttention, FusedAttention, choose_attention


def attach(
    model: GPT, *, device: torch.device, precision: str, tensor_parallel: bool = False, gathered_weights: bool = False
) -> list[str]:
    """Give a model the fast paths of a device and precision. Returns what the user should know.

    With `tensor_parallel`, matrices are cut, and the kernels that fuse a layer's bias do not apply. With
    `gathered_weights`, FSDP2 gathers weights in bf16, and layers need no copies of their own.
    """
    notes = _attach_attention(model, device, precision)
    if precision not in ("bf16", "fp8"):
        return notes
    model.residual_dtype = torch.bfloat16
    if precision == "fp8":
        why = why_no_fp8(device)
        notes.append(
            f"bf16 instead of fp8: {why}"
            if why
            else f"{use_fp8(model.blocks, gathered_weights)} linear layers multiply in 8 bits"
        )
    if tensor_parallel:
        return notes
    use_bf16_weights(model.blocks, gathered_weights)
    why = why_no_triton(device)
    if why is None:
        _attach_triton(model, gathered_weights)
    elif device.type == "cuda":
        notes.append(f"plain torch instead of our kernels: {why}")
    return notes


def refresh(model: nn.Module) -> None:
    """Follow changes of the weights, and set gradients that have been dropped to zero.

    Call it before the first pass after an optimizer step, a load, or `zero_grad`. Torch cannot tell: its fused
    optimizers leave no trace in a tensor's version counter.
    """
    for layer in model.modules():
        if isinstance(layer, WorkingLinear | Bf16Embedding):
            layer.refresh()


def hold_copies(model: nn.Module, hold: bool) -> None:
    """Choose whether layers keep bf16 copies of their weights or cast them for each matrix product."""
    for layer in model.modules():
        if isinstance(layer, Bf16Linear | Bf16Embedding) and isinstance(layer.working, CopiedWeight):
            layer.working.hold(hold)


def use_bf16_weights(model: nn.Module, gathered: bool = False) -> int:
    """Let the plain linear layers in a module multiply with the bf16 form of their weights. Returns their number."""
    return _replace(model, nn.Linear, lambda layer: Bf16Linear(layer, None if gathered else CopiedWeight(layer.weight)))


def use_fp8(model: nn.Module, gathered: bool = False) -> int:
    """Let the linear layers in a module whose shapes allow it multiply in 8 bits. Returns their number."""
    return _replace(model, nn.Linear, lambda layer: Fp8Linear(layer, gathered) if fits_fp8(layer) else layer)


def _attach_attention(model: GPT, device: torch.device, precision: str) -> list[str]:
    op = model.attention_op
    if not isinstance(op, SdpaAttention):
        return ["attention: sdpa (over the keys and values of all ranks of the context axis)"]
    kernel, why = choose_attention(model.config, device, precision)
    if kernel == "triton":
        model.attention_op = AlibiAttention(op, device)
        _fuse_attention(model, fuse_bias=False)
    elif kernel == "cudnn":
        model.attention_op = CudnnAttention(op)
    return [f"attention: {kernel} ({why})"]


def _attach_triton(model: GPT, gathered_weights: bool) -> None:
    from ingot.model.kernels.fused_block import FUSED_NORMS, FusedBlock, FusedMLP
    from ingot.model.kernels.linear_cross_entropy import LinearCrossEntropy

    config: ModelConfig = model.config
    _fuse_attention(model, fuse_bias=True)
    for name, block in _blocks(model).items():
        if config.activation == "gelu":
            block.mlp = FusedMLP(block.mlp)
        if config.resid_pdrop == 0:
            model.blocks[name] = FusedBlock(block)
    if not model.has_head:
        return
    norm: Any = model.norm_f
    model.norm_f = FUSED_NORMS[type(norm)](norm)
    tied = config.tie_word_embeddings
    layer: Any = model.wte if tied else model.head
    new = (Bf16Embedding if tied else Bf16Linear)(layer, None if gathered_weights else CopiedWeight(layer.weight))
    setattr(model, "wte" if tied else "head", new)
    model.loss_fn = LinearCrossEntropy(config.vocab_size, new.working)


def _fuse_attention(model: GPT, fuse_bias: bool) -> None:
    if not model.config.qk_ln and model.config.positions != "rotary":
        for block in _blocks(model).values():
            block.attn = FusedAttention(block.attn, fuse_bias)


def _blocks(model: GPT) -> dict[str, Block]:
    return {name: block for name, block in model.blocks.items() if isinstance(block, Block)}


def _replace(model: nn.Module, kind: type[nn.Module], make: Callable) -> int:
    """Replace the modules of exactly one class. Returns how many have changed."""
    changed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is kind and (new := make(child)) is not child:
                setattr(parent, name, new)
                changed += 1
    return changed
