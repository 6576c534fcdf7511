"""Tensor parallelism: every matrix cut over the `tensor` axis, and between matrices the sequence (sequence parallel).

qkv and up are cut by output rows, out and down by input columns, the embedding by tokens. Norms and residuals work on
a part of the sequence each. The loss is taken from logits that no process ever holds whole.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ingot.model.attention import SdpaAttention
from ingot.model.branch_attention import TokenRows
from ingot.model.gpt import GPT, IGNORE, CrossEntropy
from ingot.parallel.collectives import all_gather, all_reduce, reduce_scatter, shared, sum_over
from ingot.parallel.mesh import ParallelMesh

BLOCK = {
    "norm_1": SequenceParallel(),
    "attn.qkv": ColwiseParallel(input_layouts=Shard(1)),
    "attn.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm_2": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
ENDS = {
    "norm_f": SequenceParallel(use_local_output=True),
    "head": ColwiseParallel(),  # only its weight is used, by the loss below
}


def shard_tensors(gpt: GPT, mesh: ParallelMesh) -> None:
    """Cut a model's matrices over the tensor axis, its attention by heads, and its loss by the vocabulary."""
    present = dict(gpt.named_modules())
    parallelize_module(gpt, mesh.tensor, {name: style for name, style in ENDS.items() if name in present})
    for block in gpt.blocks.values():
        parts = dict(block.named_modules())
        parallelize_module(block, mesh.tensor, {name: style for name, style in BLOCK.items() if name in parts})
        if gpt.config.qk_ln:
            attention: Any = block.attn
            each = gpt.config.qk_ln == "heads"
            attention.q_norm = HeadNorm(attention.q_norm, mesh, each)
            attention.k_norm = HeadNorm(attention.k_norm, mesh, each)
    for name in ("wte", "wpe"):
        if name in present:
            setattr(gpt, name, ShardedEmbedding(present[name], mesh))
    heads = gpt.config.n_heads // mesh.layout.tensor
    gpt.attention_op = SdpaAttention(gpt.config, slice(heads * mesh.tensor_rank, heads * (mesh.tensor_rank + 1)))
    gpt.sequence_part = (mesh.tensor_rank, mesh.layout.tensor)
    gpt.loss_fn = VocabParallelCrossEntropy(gpt.config.vocab_size, mesh)


class ShardedEmbedding(nn.Module):
    """An embedding cut by rows: tokens [..., T] that all have to vectors [..., T/tensor, d].

    Not DTensor's: its backward pass makes the gradient of all rows on every process before it cuts it.
    """

    weight: Any

    def __init__(self, whole: Any, mesh: ParallelMesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(whole.weight, mesh.tensor, [Shard(0)]))
        self.group, self.rank = mesh.tensor.get_group(), mesh.tensor_rank

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight.to_local()  # [V/tensor, d]
        row = tokens - self.rank * len(weight)
        own = (row >= 0) & (row < len(weight))
        x = F.embedding(torch.where(own, row, 0), weight) * own.unsqueeze(-1)
        # a copy, since torch.compile takes the gradient of a tensor for zero that a collective is still filling
        return reduce_scatter(x, tokens.ndim - 1, self.group).clone()


class HeadNorm(nn.Module):
    """A layer or root-mean-square norm on the heads of one process, in fp32: over all heads, x [B, T, F/tensor], or
    over each, x [..., D]."""

    weight: Any
    bias: Any

    def __init__(self, norm: Any, mesh: ParallelMesh, each: bool):
        super().__init__()
        self.group, self.ranks, self.each = mesh.tensor.get_group(), 1 if each else mesh.layout.tensor, each
        self.centered, self.eps = isinstance(norm, nn.LayerNorm), float(norm.eps)
        for name in ("weight", "bias"):
            whole = getattr(norm, name, None)
            place = [Replicate() if each else Shard(0)]
            cut = nn.Parameter(distribute_tensor(whole, mesh.tensor, place)) if whole is not None else None
            self.register_parameter(name, cut)

    def forward(self, x: Tensor) -> Tensor:
        x, features = x.float(), x.shape[-1] * self.ranks
        if self.centered:
            x = x - self._total(x) / features
        x = x * (self._total(x.square()) / features + self.eps).rsqrt() * self._own(self.weight)
        return x + self._own(self.bias) if self.bias is not None else x

    def _total(self, x: Tensor) -> Tensor:
        total = x.sum(-1, keepdim=True)
        return total if self.each else sum_over(total, self.group)

    def _own(self, parameter: Any) -> Tensor:
        return shared(parameter.to_local(), self.group) if self.each else parameter.to_local()


class VocabParallelCrossEntropy(CrossEntropy):
    """The summed cross-entropy of hidden [B, T/tensor, d] and labels [B, T], equal on all processes of the axis."""

    def __init__(self, vocab_size: int, mesh: ParallelMesh):
        super().__init__(vocab_size)
        self.group, self.rank = mesh.tensor.get_group(), mesh.tensor_rank

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        hidden = all_gather(hidden, 1, self.group)  # [B, T, d]
        assert isinstance(weight, DTensor)
        logits = F.linear(hidden, weight.to_local()).float().flatten(0, 1)  # [B T, V/tensor]
        first = self.rank * logits.shape[1]
        return _CrossEntropyFunction.apply(logits, labels.flatten(), first, self.vocab_size, self.group)

    def token_scores(self, hidden: Tensor, weight: Tensor, rows: TokenRows) -> Tensor:
        return super().token_scores(all_gather(hidden, 1, self.group), weight, rows)

    def _judge(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        assert isinstance(weight, DTensor)
        logits = F.linear(hidden, weight.to_local()).float()  # [P, V/tensor]
        first = self.rank * logits.shape[1]
        columns = torch.arange(first, first + logits.shape[1], device=logits.device)
        logits = logits.masked_fill(columns >= self.vocab_size, float("-inf"))
        top = logits.amax(1)
        highest = all_reduce(top, self.group, "max")
        total = all_reduce((logits - highest[:, None]).exp().sum(1), self.group).log()
        own = (targets >= first) & (targets < first + logits.shape[1])
        column = torch.where(own, targets - first, 0)
        target = torch.where(own, logits.gather(1, column[:, None])[:, 0] - highest, 0.0)
        best = torch.where(top == highest, (logits.argmax(1) + first).float(), float("inf"))  # the first, if equal
        log_prob = all_reduce(target, self.group) - total
        return torch.stack([log_prob, (-total).exp(), all_reduce(best, self.group, "min")], 1)


class _CrossEntropyFunction(torch.autograd.Function):
    """Cross-entropy over logits whose columns are cut over a group: three small all-reduces of [tokens]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, vocab: int, group: dist.ProcessGroup) -> Tensor:
        columns = torch.arange(first, first + logits.shape[1], device=logits.device)
        logits = logits.masked_fill(columns >= vocab, float("-inf"))  # rows of padding are never predicted
        highest = logits.max(1).values
        highest = all_reduce(highest, group, "max")
        probabilities = (logits - highest[:, None]).exp()
        total = probabilities.sum(1)
        total = all_reduce(total, group)
        counted = labels != IGNORE
        own = (labels >= first) & (labels < first + logits.shape[1])
        column = torch.where(own, labels - first, 0)
        target = torch.where(own, logits.gather(1, column[:, None])[:, 0] - highest, 0.0)
        target = all_reduce(target, group)
        probabilities /= total[:, None]
        ctx.save_for_backward(probabilities, column, own, counted)
        return torch.where(counted, total.log() - target, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, column, own, counted = ctx.saved_tensors
        slope = probabilities.scatter_add(1, column[:, None], -own[:, None].to(probabilities.dtype))
        return slope * (counted * gradient)[:, None], None, None, None, None
