"""Attention for rows that hold several questions, each a shared context with branches.

    tokens     The cat sat on the | mat | red chair | Who wrote ...
    question    0   0   0   0   0    0     0    0      1    1
    branch      0   0   0   0   0    1     2    2      0    0
    position    0   1   2   3   4    5     5    6      0    1

A token sees the tokens of its own question at its position or before it that are in the shared context or in its own
branch. So the context of a question is computed once for all its choices, and short questions fill a row together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.config.model import ModelConfig
from ingot.model.attention import Attend, AttentionOp, SdpaAttend, SdpaAttention

PADDING = -1  # the question of tokens that are not text; they see each other and nothing else does


@dataclass(frozen=True)
class TokenRows:
    """Rows [B, T] on a device, and the P tokens in them that are scored."""

    tokens: Tensor
    question: Tensor
    branch: Tensor
    position: Tensor
    line: Tensor
    """The row that each scored token is in, [P]."""
    column: Tensor
    """The column that predicts it, [P]."""
    targets: Tensor
    """The scored tokens, [P]."""
    has_branches: bool = field(default=True, kw_only=True)
    """Whether rows hold questions and branches; otherwise one sequence each, for the model's own attention."""

    def padded(self, multiple: int) -> "TokenRows":
        """The same rows with a length that a multiple divides."""
        missing = (0, -self.tokens.shape[1] % multiple)
        return replace(
            self, tokens=F.pad(self.tokens, missing), question=F.pad(self.question, missing, value=PADDING),
            branch=F.pad(self.branch, missing), position=F.pad(self.position, missing),
        )  # fmt: skip

    def take(self, columns: Tensor) -> tuple["TokenRows", Tensor]:
        """Some columns [T'] of all rows, and which scored tokens [P] are predicted there."""
        index_of = torch.full((self.tokens.shape[1],), -1, device=columns.device)
        index_of[columns] = torch.arange(len(columns), device=columns.device)
        column = index_of[self.column]
        kept = column >= 0
        parts = [x[:, columns] for x in (self.tokens, self.question, self.branch, self.position)]
        scored = [self.line[kept], column[kept], self.targets[kept]]
        rows = TokenRows(*parts, *scored, has_branches=self.has_branches)
        return rows, kept


class BranchAttention(SdpaAttention):
    """torch's attention with a mask made from the question, branch and position of each token, all [B, S]."""

    def __init__(self, config: ModelConfig, heads: slice | None = None):
        super().__init__(config, heads)
        self.question = self.branch = self.position = torch.empty(0)
        self.columns: Tensor | None = None

    def set_rows(self, question: Tensor, branch: Tensor, position: Tensor, columns: Tensor | None = None) -> None:
        """Say where the tokens of the next pass are; with a cache, all tokens so far. `columns` [T] are those of the
        queries, where they are not the last ones."""
        self.question, self.branch, self.position, self.columns = question, branch, position, columns

    def prepare(self, new: int, total: int, device: torch.device, documents: Tensor | None = None) -> Attend:
        if self.columns is not None:
            total = self.question.shape[1]
        queries = slice(total - new, total) if self.columns is None else self.columns

        def pair(x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, queries, None], x[:, None, :total]  # queries [B, T, 1], keys [B, 1, S]

        (question, of_key), (branch, key_branch) = pair(self.question), pair(self.branch)
        position, key_position = pair(self.position)
        distance = position - key_position  # [B, T, S]
        seen = (question == of_key) & ((key_branch == 0) | (branch == key_branch)) & (distance >= 0)
        if self.config.sliding_window is not None:
            seen &= distance < self.config.sliding_window
        bias = torch.zeros(seen.shape, device=device).masked_fill(~seen, float("-inf"))[:, None]  # [B, 1, T, S]
        if (slopes := self.slopes()) is not None:
            bias = bias - slopes.to(device)[None, :, None, None] * distance[:, None]  # [B, H, T, S]
        return SdpaAttend(self.config, False, bias, (self.heads.start, total - new))


class _HasAttention(Protocol):
    attention_op: AttentionOp


@contextmanager
def attending_by(model: _HasAttention, op: AttentionOp) -> Iterator[None]:
    """Let a model attend in another way."""
    usual, model.attention_op = model.attention_op, op
    try:
        yield
    finally:
        model.attention_op = usual
