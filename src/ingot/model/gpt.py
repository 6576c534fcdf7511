"""The one GPT. Every family is this class with other parts; it knows nothing of devices or how it is spread.

Shapes: B batch, T tokens, d d_model, V vocab_size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ingot.config.model import ModelConfig
from ingot.model.activation_checkpointing import recompute
from ingot.model.attention import AlibiAttend, Attend, Attention, KVCache, SdpaAttend, rotary_tables
from ingot.model.kernels.bf16_weights import (
    TRITON,
    Narrow,
    NarrowLinear,
    autocast_dtype,
    fuses,
    leave_bias,
    narrow_weights,
    renew,
)
from ingot.model.kernels.fp8 import use_fp8, why_no_fp8
from ingot.model.mlp import MLP
from ingot.model.norm import make_norm

if TRITON:
    from ingot.model.kernels.add_norm import add_norm
    from ingot.model.kernels.linear_cross_entropy import linear_cross_entropy

IGNORE = -100  # a label that takes no part in the loss
DEEP = 16  # layers from which a model is compiled block by block


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.parallel = config.parallel_residual
        self.norm_1 = make_norm(config, config.d_model)
        self.attn = Attention(config, layer)
        self.norm_2 = make_norm(config, config.d_model)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: Attend,
        cache: KVCache | None = None,
        chain: tuple[Tensor, nn.Module] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The stream x [B, T, d] after this block. In a `chain` of blocks, which gives x by `norm_1` and the norm that
        comes after the block: the stream, and it by that norm, made in one kernel with the last addition."""
        if self.fused(x):
            x, normed = add_norm(self.norm_1, x) if chain is None else (x, chain[0])
            if self.parallel:
                x, other = add_norm(self.norm_2, x)
                return x + self.attn(normed, rotary, attend, cache) + self.mlp(other)
            attended = self.attn.attended(normed, rotary, attend, cache)
            x, normed = add_norm(self.norm_2, x, *leave_bias(self.attn.out, attended))
            if chain is None:
                return x + self.mlp(normed)
            return add_norm(chain[1], x, *leave_bias(self.mlp.down, self.mlp.inner(normed)))
        attended = self.dropout(self.attn(self.norm_1(x), rotary, attend, cache))
        if self.parallel:
            return x + attended + self.dropout(self.mlp(self.norm_2(x)))
        x = x + attended
        return x + self.dropout(self.mlp(self.norm_2(x)))

    def fused(self, x: Tensor) -> bool:
        """Whether norms, and residual additions where they follow one another, are kernels of ours."""
        dropped = self.training and self.dropout.p > 0
        return not dropped and fuses(self.attn.out, x)


class GPT(nn.Module):
    """Token ids [B, T] to logits [B, T, V], or with labels to the summed cross-entropy."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_rows, config.d_model)
        if config.positions == "learned":
            self.wpe = nn.Embedding(config.context, config.d_model)
        self.dropout = nn.Dropout(config.emb_pdrop)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm_f = make_norm(config, config.d_model)
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.d_model, config.vocab_rows, bias=False)
        self.kernel: AlibiAttend | None = None
        self.recompute: str | None = None  # full or selective

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        start = cache.length if cache is not None else 0
        if positions is None:
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)  # [T]
        c, documents = self.config, None
        apart = c.document_mask or c.document_positions
        if c.eos_token_id is not None and apart and cache is None:  # what is generated is one document
            starts = F.pad(tokens[:, :-1].eq(c.eos_token_id), (1, 0))  # [B, T]
            documents = starts.cumsum(1) if c.document_mask else None
            if c.document_positions:
                positions = positions - torch.where(starts, positions, 0).cummax(1).values  # [B, T]
        x = self.embed(tokens, positions)
        hidden = self.transform(x, positions, start, cache, documents)  # [B, T, d]
        return self.logits(hidden) if labels is None else self.loss(hidden, labels)

    def train(self, mode: bool = True) -> "GPT":
        """As ever; and since each step and each evaluation begins here, narrow weights catch up with the optimizer."""
        super().train(mode)
        renew(self)
        return self

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What enters the first block, [B, T, d]."""
        x = self.wte(tokens)
        if self.config.positions == "learned":
            x = x + self.wpe(positions)
        if autocast_dtype(x.device) == torch.bfloat16:
            x = x.bfloat16()  # and with it the residual stream: half its traffic and memory
        return self.dropout(x)

    def transform(
        self,
        x: Tensor,
        positions: Tensor,
        start: int = 0,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """All blocks, one after the other, and the last norm where this process has it, on the tokens at the given
        positions after `start` cached ones; where documents [B, T] are numbered, within each."""
        new = positions.shape[-1]
        rotary = rotary_tables(self.config, positions) if self.config.positions == "rotary" else None
        attend = self.attend_over(new, start + new, positions.device)
        if documents is not None:
            assert isinstance(attend, SdpaAttend | AlibiAttend)
            attend = attend.within(documents)
        blocks: list[Block] = list(self.blocks.children())  # type: ignore[arg-type]
        if cache is None and self.chained(blocks, x):
            x, normed = add_norm(blocks[0].norm_1, x)
            for block, after in zip(blocks, [*(block.norm_1 for block in blocks[1:]), self.norm_f], strict=True):
                x, normed = block(x, rotary, attend, None, (normed, after))
            return normed
        for block in blocks:
            if self.recompute is not None and self.training:
                x = recompute(block, self.recompute, x, rotary, attend)
            else:
                x = block(x, rotary, attend, cache)
        if cache is not None:
            cache.length += new
        return x if self.norm_f is None else self.norm_f(x)

    def chained(self, blocks: list[Block], x: Tensor) -> bool:
        """Whether the last addition of a block and the norm after it are one kernel: on one process, since FSDP2 wants
        all gradients of a block from that block; recomputing would keep two tensors per block instead of one; and of
        parallel halves the last addition has three terms."""
        if self.recompute is not None or self.config.parallel_residual or not len(blocks):
            return False
        return isinstance(blocks[0].mlp.down, NarrowLinear) and blocks[0].fused(x)

    def attend_over(self, new: int, total: int, device: torch.device) -> Attend:
        """Attention of the last `new` of `total` tokens, for all blocks of a forward pass."""
        if self.kernel is not None and new == total == self.kernel.length:
            return self.kernel
        return SdpaAttend(self.config, new, total, device)

    def use_kernel(self, kernel: str, seq_len: int, device: torch.device) -> None:
        """Train with the kernel that `choose_kernel` chose."""
        self.kernel = AlibiAttend(self.config, seq_len, device) if kernel == "triton" else None

    def use_precision(self, precision: str, device: torch.device) -> str | None:
        """Prepare the weights to train in a precision; gives what the user should know of it."""
        note = None
        if precision == "fp8":
            why = why_no_fp8(device)
            note = f"bf16 instead of fp8: {why}" if why else f"{use_fp8(self.blocks)} linear layers multiply in 8 bits"
        if precision in ("bf16", "fp8"):
            narrow_weights(self.blocks, torch.bfloat16)
            if TRITON and device.type == "cuda":  # where the loss has a kernel for it
                narrow_weights(self.unembedding, torch.bfloat16)
        return note

    @property
    def unembedding(self) -> nn.Embedding | nn.Linear:
        """The layer whose weight turns hidden states to logits."""
        return self.wte if self.config.tie_word_embeddings else self.head

    def compiled(self) -> nn.Module:
        """The model compiled for one process: a shallow one whole; a deep one by blocks, which share one program, so
        that 24 layers take seconds, not a minute, and run up to 1% slower. Recomputing needs the whole in view."""
        if len(self.blocks) < DEEP or self.recompute is not None:
            return torch.compile(self, dynamic=False)  # type: ignore[return-value]
        for part in (*self.blocks, self.norm_f):
            part.compile(dynamic=False)
        return self

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The summed cross-entropy, a scalar: the caller divides by the tokens of the whole global batch."""
        dtype = autocast_dtype(hidden.device) or hidden.dtype
        if TRITON and hidden.is_cuda and dtype == torch.bfloat16:
            layer = self.unembedding
            both = (layer.narrow, layer.total) if isinstance(layer, Narrow) else None
            return linear_cross_entropy(hidden, layer.weight, labels, self.config.vocab_size, IGNORE, both)
        logits = self.logits(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the real tokens; the padding rows of the embedding are cut off."""
        return F.linear(hidden, self.unembedding.weight)[..., : self.config.vocab_size]  # [B, T, V]


class _Unfilled(TorchFunctionMode):
    """Leaves out what torch's layers draw for themselves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def allocate(config: ModelConfig, device: torch.device | str) -> GPT:
    """A model whose weights are not set. (Made on "meta" and emptied, as is usual, it would cost a second for imports
    of the compiler.)"""
    with torch.device(device), _Unfilled():
        return GPT(config)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a hidden weight matrix: not embedding, head, norm or bias."""
    return name.startswith("blocks.") and parameter.ndim == 2


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape, in the model's own order; nothing is allocated."""
    return {name: tuple(p.shape) for name, p in allocate(config, "meta").named_parameters()}


def flops_per_token(config: ModelConfig, seq_len: int, causal: bool = False) -> float:
    """Training FLOPs per token, forward and backward: 6 N + 12 L d S, the full square of attention as the field
    reports it; `causal` counts only the half that is computed. N leaves out an input embedding that is not the head.
    """
    n = config.parameters
    if not config.tie_word_embeddings:
        n -= config.vocab_rows * config.d_model
    attention = 12 * config.n_layers * config.n_heads * config.head_width * seq_len
    return 6 * n + attention / (2 if causal else 1)
