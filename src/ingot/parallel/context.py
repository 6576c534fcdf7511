"""Context parallelism: a sequence cut over processes, each of which attends to the keys and values of all.

The sequence is cut into 2 x context chunks. Process r takes chunks r and (2 x context - 1 - r), an early and a late
one, so that the causal triangle is shared evenly. Keys and values are gathered instead of passed around a ring, which
works for every mask and position scheme: a chunk is the model's own attention of the last `new` of `total` tokens.
"""

import torch
from torch import Tensor

from ingot.model.attention import Attend, AttentionOp
from ingot.model.branch_attention import BranchAttention, TokenRows
from ingot.model.gpt import GPT
from ingot.parallel.collectives import all_gather
from ingot.parallel.loss_model import LossModel
from ingot.parallel.mesh import ParallelMesh


class SequenceCut:
    """The tokens of a sequence that belong to this process."""

    def __init__(self, mesh: ParallelMesh, seq_len: int):
        assert mesh.context is not None
        self.mesh = mesh
        self.group = mesh.context.get_group()
        parts = mesh.layout.context
        chunk = seq_len // (2 * parts)
        tokens = torch.arange(seq_len, device=mesh.device).view(2 * parts, chunk)
        owned = [torch.cat([tokens[r], tokens[2 * parts - 1 - r]]) for r in range(parts)]
        self.positions = owned[mesh.context_rank]  # [T]
        self.ends = tuple(int(p[-1]) + 1 for p in self.positions.view(2, chunk))  # keys that each chunk may see
        self.order = torch.cat(owned).argsort()  # gathered keys back into the order of the sequence

    def of_length(self, seq_len: int) -> "SequenceCut":
        """How sequences of another length are cut."""
        return self if seq_len == len(self.order) else SequenceCut(self.mesh, seq_len)

    def take(self, tokens: Tensor) -> Tensor:
        """[B, S] to this process's [B, T]."""
        return tokens[:, self.positions]

    def gather(self, x: Tensor) -> Tensor:
        """[B, G, T, D] of every process to [B, G, S, D]."""
        return all_gather(x, 2, self.group).index_select(2, self.order)


class ContextLossModel(LossModel):
    """The loss of this process's part of each sequence."""

    def __init__(self, gpt: GPT, cut: SequenceCut):
        super().__init__(gpt)
        self.cut = cut

    def forward(self, tokens: Tensor, labels: Tensor, sequence_keys: Tensor | None = None) -> Tensor:
        return self.gpt.loss(self.cut.take(tokens), self.cut.take(labels), self.cut.positions, sequence_keys)

    def token_scores(self, rows: TokenRows) -> Tensor:
        """Zero for the tokens that are predicted on other processes."""
        own, here = rows.take(self.cut.of_length(rows.tokens.shape[1]).positions)
        scores = torch.zeros(len(here), 3, device=here.device)
        scores[here] = self.gpt.token_scores(own)
        return scores


class GatheredAttention:
    """Attention of a process's two chunks over the keys and values of all processes."""

    def __init__(self, inner: AttentionOp, cut: SequenceCut):
        self.inner, self.cut = inner, cut

    def prepare(self, new: int, total: int, device: torch.device, documents: Tensor | None = None) -> Attend:
        assert documents is None, "documents need whole sequences"
        return GatheredAttend(self.cut, [self.inner.prepare(new // 2, end, device) for end in self.cut.ends])


class GatheredAttend:
    """One forward pass of GatheredAttention."""

    def __init__(self, cut: SequenceCut, chunks: list[Attend]):
        self.cut, self.chunks = cut, chunks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None) -> Tensor:
        k, v = self.cut.gather(k), self.cut.gather(v)  # [B, G, S, D]
        parts = [
            attend(part, k[:, :, :end], v[:, :, :end], keys)
            for attend, part, end in zip(self.chunks, q.chunk(2, 2), self.cut.ends, strict=True)
        ]
        return torch.cat(parts, 2)  # [B, H, T, D]


class GatheredBranchAttention:
    """Attention of this process's part of rows of questions over the keys and values of all processes."""

    def __init__(self, inner: BranchAttention, cut: SequenceCut):
        self.inner, self.cut = inner, cut

    def prepare(self, new: int, total: int, device: torch.device, documents: Tensor | None = None) -> Attend:
        attend = self.inner.prepare(new, total, device)
        return lambda q, k, v, keys: attend(q, self.cut.gather(k), self.cut.gather(v), keys)
