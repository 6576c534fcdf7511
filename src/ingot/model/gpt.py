"""The one GPT. Every model family is this class with other parts, chosen by `ModelConfig`.

This file and its neighbors (attention, mlp, norm) are the reference: plain PyTorch that equals the Hugging Face
classes. They know nothing of devices, parallelism or kernels, which plug into the slots of `GPT`.

Shapes: B batch, T tokens, d d_model, V vocab_size, R rows of the embedding (V and padding).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.config.model import ModelConfig
from ingot.model.activation_checkpointing import run_checkpointed
from ingot.model.attention import Attend, Attention, AttentionOp, KVCache, SdpaAttention, rotary_tables
from ingot.model.branch_attention import TokenRows
from ingot.model.dropout import BlockKeys, ModelKeys, dropout, model_keys
from ingot.model.mlp import MLP
from ingot.model.norm import make_norm

IGNORE = -100  # a label that takes no part in the loss
LOGIT_ROWS = 2048  # scored tokens whose logits [P, V] exist at a time


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm, each added to the residual stream.

    one after the other (MPT, GPT-3, Llama)             parallel_residual (GPT-NeoX)

    x --+-- norm_1 -- attn --+                          x --+-- norm_1 -- attn --+
        |                    |                              |                    |
        +------------------- + --+-- norm_2 -- mlp --+      +-- norm_2 -- mlp ---+
                                 |                   |      |                    |
                                 +------------------ + -->  +------------------- + -->
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.norm_1 = make_norm(config, config.d_model)
        self.attn = Attention(config, layer)
        self.norm_2 = make_norm(config, config.d_model)
        self.mlp = MLP(config)
        self.pdrop = config.resid_pdrop
        self.recompute: str | None = None  # see `GPT.activation_checkpointing`

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: Attend,
        cache: KVCache | None = None,
        keys: BlockKeys | None = None,
    ) -> Tensor:
        """The residual stream [B, T, d] after this block, with dropout where there are keys."""
        if self.recompute is not None and self.training:
            # within the block, so that the compiler sees its recomputation, and FSDP2 gathers for both
            return run_checkpointed(self.compute, self.recompute, x, rotary, attend, None, keys)
        return self.compute(x, rotary, attend, cache, keys)

    def compute(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: Attend,
        cache: KVCache | None = None,
        keys: BlockKeys | None = None,
    ) -> Tensor:
        """The pass itself."""
        attention_keys, attn_out_keys, mlp_out_keys = keys or (None, None, None)
        attended = self.attn(self.norm_1(x), rotary, attend, cache, attention_keys)
        attended = x + dropout(attended, attn_out_keys, self.pdrop)
        x = x if self.parallel_residual else attended
        return attended + dropout(self.mlp(self.norm_2(x)), mlp_out_keys, self.pdrop)


class CrossEntropy(nn.Module):
    """The summed cross-entropy of logits in fp32. The caller divides by the tokens of the whole global batch."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """A scalar, from hidden states [B, T, d], the output weight [R, d] and labels [B, T]."""
        logits = F.linear(hidden, weight)[..., : self.vocab_size].float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def token_scores(self, hidden: Tensor, weight: Tensor, rows: TokenRows) -> Tensor:
        """Of each scored token its log-probability, the largest probability there, and the first token that has it,
        [P, 3] in fp32."""
        scored = hidden[rows.line, rows.column]  # [P, d]
        parts = zip(scored.split(LOGIT_ROWS), rows.targets.split(LOGIT_ROWS), strict=True)
        return torch.cat([self._judge(part, weight, targets) for part, targets in parts])

    def _judge(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)[:, : self.vocab_size].float()  # [P, V]
        own, first = logits.gather(1, targets[:, None]), logits.argmax(1, keepdim=True)  # [P, 1]
        top = logits.gather(1, first)
        total = top + logits.sub_(top).exp_().sum(1, keepdim=True).log()  # in place: these are the largest tensors
        return torch.cat([own - total, (top - total).exp(), first.float()], 1)


class GPT(nn.Module):
    """Token ids [B, T] to logits [B, T, V].

    Parallelism and kernels change a model only through these slots, before its first pass:

    - `blocks`: the layers by number. A block, or a module in it, may be replaced by a faster one that shares its
      parameters. A pipeline stage holds a range of layers; names stay `blocks.N...`.
    - `attention_op`: scaled dot-product attention with its masks.
    - `loss_fn`: hidden states, output weight and labels to the summed loss.
    - `activation_checkpointing`: what the backward pass of a block recomputes.
    - `residual_dtype`: the type of the residual stream; None keeps the type of the embedding. With bf16, its traffic
      and memory are halved, and passes must run under autocast.
    - `sequence_part`: which of how many parts of the tokens the residual stream holds, where ranks share a sequence.
    """

    def __init__(
        self, config: ModelConfig, layers: range | None = None, has_embedding: bool = True, has_head: bool = True
    ):
        super().__init__()
        self.config, self.has_head = config, has_head
        if has_embedding or (has_head and config.tie_word_embeddings):
            self.wte = _embedding(config.vocab_rows, config.d_model)
        if has_embedding and config.positions == "learned":
            self.wpe = _embedding(config.context, config.d_model)
        self.layers = range(config.n_layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer) for layer in self.layers})
        if has_head:
            self.norm_f = make_norm(config, config.d_model)
        if has_head and not config.tie_word_embeddings:
            self.head = nn.Linear(config.d_model, config.vocab_rows, bias=False)
        self.attention_op: AttentionOp = SdpaAttention(config)
        self.loss_fn: nn.Module = CrossEntropy(config.vocab_size)
        self.residual_dtype: torch.dtype | None = None
        self.sequence_part = (0, 1)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, T, V] of tokens [B, T], which follow those in the cache."""
        hidden = self.hidden_states(tokens, cache)
        return F.linear(hidden, self.output_weight)[..., : self.config.vocab_size]

    def loss(
        self, tokens: Tensor, labels: Tensor, positions: Tensor | None = None, sequence_keys: Tensor | None = None
    ) -> Tensor:
        """The summed cross-entropy, a scalar. `positions` [T] are given where a rank holds a part of each sequence,
        `sequence_keys` [B] determine the dropout of each sequence."""
        return self.loss_fn(self.hidden_states(tokens, None, positions, sequence_keys), self.output_weight, labels)

    def token_scores(self, rows: TokenRows) -> Tensor:
        """What the model makes of the scored tokens, [P, 3]: see `CrossEntropy.token_scores`."""
        hidden = self.hidden_states(rows.tokens, positions=rows.position if rows.has_branches else None)
        return self.loss_fn.token_scores(hidden, self.output_weight, rows)  # type: ignore[operator]

    @property
    def activation_checkpointing(self) -> str | None:
        """What the backward pass of a block recomputes: full, selective or nothing."""
        return next((block.recompute for block in self.blocks.values()), None)  # type: ignore[return-value]

    @activation_checkpointing.setter
    def activation_checkpointing(self, kind: str | None) -> None:
        for block in self.blocks.values():
            block.recompute = kind  # type: ignore[assignment]

    @property
    def output_weight(self) -> Tensor:
        """The weight [R, d] that turns hidden states into logits."""
        return self.wte.weight if self.config.tie_word_embeddings else self.head.weight

    def hidden_states(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        sequence_keys: Tensor | None = None,
    ) -> Tensor:
        """What the output head reads, [B, T, d]."""
        config, documents = self.config, None
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)  # [T]
        keys = self.dropout_keys(sequence_keys, len(tokens), positions)
        separate = config.document_mask or config.document_positions
        if separate and config.eos_token_id is not None and cache is None:  # generated text is one document
            starts = F.pad(tokens[:, :-1].eq(config.eos_token_id), (1, 0))  # [B, T]
            documents = starts.cumsum(1) if config.document_mask else None
            if config.document_positions:
                positions = positions - torch.where(starts, positions, 0).cummax(1).values  # [B, T]
        return self.transform(self.embed(tokens, positions, keys), positions, cache, documents, keys)

    def dropout_keys(self, sequence_keys: Tensor | None, batch: int, positions: Tensor) -> ModelKeys | None:
        """What determines the dropout of a forward pass over tokens at these positions [T] of their sequences; None
        where nothing is dropped. Without keys of the sequences, each pass has others."""
        config = self.config
        if not self.training or max(config.emb_pdrop, config.resid_pdrop, config.attn_pdrop) == 0:
            return None
        if sequence_keys is None:
            sequence_keys = torch.randint(2**62, (batch,), device=positions.device)
        part, parts = self.sequence_part
        return model_keys(sequence_keys, self.layers, positions.chunk(parts)[part])

    def embed(self, tokens: Tensor, positions: Tensor, keys: ModelKeys | None = None) -> Tensor:
        """The input of the first block, [B, T, d]."""
        x = self.wte(tokens)
        if self.config.positions == "learned":
            x = x + self.wpe(positions)
        x = x if self.residual_dtype is None else x.to(self.residual_dtype)
        return dropout(x, keys.embedding if keys is not None else None, self.config.emb_pdrop)

    def transform(
        self,
        x: Tensor,
        positions: Tensor,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        keys: ModelKeys | None = None,
    ) -> Tensor:
        """The blocks one after the other, and the last norm where this stage has it. `documents` [B, T] numbers the
        documents of each sequence; tokens attend within their own."""
        new, cached = positions.shape[-1], cache.length if cache is not None else 0
        rotary = rotary_tables(self.config, positions) if self.config.positions == "rotary" else None
        attend = self.attention_op.prepare(new, cached + new, positions.device, documents)
        for index, block in enumerate(self.blocks.values()):
            block_keys = keys.blocks[index] if keys is not None else None
            x = block(x, rotary, attend, cache, block_keys)
        if cache is not None:
            cache.length += new
        return self.norm_f(x) if self.has_head else x


def _embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding whose weights are not drawn: on the meta device that alone would import the compiler, a second."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def allocate(config: ModelConfig, device: torch.device | str) -> GPT:
    """A model whose weights are not set yet."""
    with torch.device("meta"):
        model = GPT(config)
    return model.to_empty(device=device)
