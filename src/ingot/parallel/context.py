"""Context parallelism: a sequence cut over processes, each of which attends to the keys and values of all.

The sequence is cut into 2 x context chunks; process r takes chunks r and (2 x context - 1 - r), an early and a late
one, so that the causal triangle is shared evenly. Gathering keys and values, instead of passing them round a ring,
works for every mask and position scheme, and a chunk then is the model's own attention of the last `new` of `total`
tokens.
"""

import torch
from torch import Tensor

from ingot.model.attention import AlibiAttend, Attend, SdpaAttend
from ingot.model.gpt import GPT
from ingot.parallel.collectives import all_gather
from ingot.parallel.mesh import ParallelMesh


class SequenceCut:
    """Which tokens of a sequence are a process's own."""

    def __init__(self, mesh: ParallelMesh, seq_len: int):
        parts = mesh.layout.context
        chunk = seq_len // (2 * parts)
        tokens = torch.arange(seq_len, device=mesh.device).view(2 * parts, chunk)
        owned = [torch.cat([tokens[r], tokens[2 * parts - 1 - r]]) for r in range(parts)]
        self.positions = owned[mesh.context_rank]  # [T]
        self.ends = tuple(int(p[-1]) + 1 for p in self.positions.view(2, chunk))  # keys that each chunk may see
        self.order = torch.cat(owned).argsort()  # gathered keys back into the order of the sequence

    def take(self, tokens: Tensor) -> Tensor:
        """[B, S] to this process's [B, T]."""
        return tokens[:, self.positions]


class GatheredAttend:
    """Attention of a process's two chunks over the keys and values of all processes."""

    def __init__(self, cut: SequenceCut, mesh: ParallelMesh, chunks: list[SdpaAttend]):
        assert mesh.context is not None
        self.cut, self.group, self.chunks = cut, mesh.context.get_group(), chunks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        k, v = self._gather(k), self._gather(v)  # [B, G, S, D]
        parts = [
            attend(part, k[:, :, :end], v[:, :, :end], dropout=dropout)
            for attend, part, end in zip(self.chunks, q.chunk(2, 2), self.cut.ends, strict=True)
        ]
        return torch.cat(parts, 2)  # [B, H, T, D]

    def _gather(self, x: Tensor) -> Tensor:
        return all_gather(x, 2, self.group).index_select(2, self.cut.order)


def replace_attention(
    gpt: GPT, mesh: ParallelMesh, cut: SequenceCut | None, kernel: str, seq_len: int, heads: slice
) -> None:
    """Let a model attend with its own heads only, and over the context axis if there is one."""
    alibi = AlibiAttend(gpt.config, seq_len, mesh.device, heads) if kernel == "triton" and cut is None else None

    def attend_over(new: int, total: int, device: torch.device) -> Attend:
        if cut is not None:
            chunks = [SdpaAttend(gpt.config, new // 2, end, device, heads) for end in cut.ends]
            return GatheredAttend(cut, mesh, chunks)
        return alibi or SdpaAttend(gpt.config, new, total, device, heads)

    gpt.attend_over = attend_over  # type: ignore[method-assign]
