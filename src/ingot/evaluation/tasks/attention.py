"""Attention for rows that hold several questions, each a shared context with branches.

    tokens     The cat sat on the | mat | red chair | Who wrote ...
    question    0   0   0   0   0    0     0    0      1    1
    branch      0   0   0   0   0    1     2    2      0    0
    position    0   1   2   3   4    5     5    6      0    1

A token sees the tokens of its own question at its position or before it that are in the shared context or in its own
branch. So the context of a question is computed once for all its choices, and short questions fill a row together.
"""

import torch
from torch import Tensor

from ingot.config.model import ModelConfig
from ingot.model.attention import Attend, SdpaAttend, SdpaAttention

PADDING = -1  # the question of tokens that are not text; they see each other and nothing else does


class BranchAttention(SdpaAttention):
    """torch's attention with a mask made from the question, branch and position of each token, all [B, S]."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.question = self.branch = self.position = torch.empty(0)

    def place(self, question: Tensor, branch: Tensor, position: Tensor) -> None:
        """Say where the tokens of the next pass are; with a cache, all tokens so far."""
        self.question, self.branch, self.position = question, branch, position

    def prepare(self, new: int, total: int, device: torch.device, documents: Tensor | None = None) -> Attend:
        def pair(x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, total - new : total, None], x[:, None, :total]  # queries [B, T, 1], keys [B, 1, S]

        (question, of_key), (branch, key_branch) = pair(self.question), pair(self.branch)
        position, key_position = pair(self.position)
        distance = position - key_position  # [B, T, S]
        seen = (question == of_key) & ((key_branch == 0) | (branch == key_branch)) & (distance >= 0)
        if self.config.sliding_window is not None:
            seen &= distance < self.config.sliding_window
        bias = torch.zeros(seen.shape, device=device).masked_fill(~seen, float("-inf"))[:, None]  # [B, 1, T, S]
        if (slopes := self.slopes()) is not None:
            bias = bias - slopes.to(device)[None, :, None, None] * distance[:, None]  # [B, H, T, S]
        return SdpaAttend(self.config, False, bias, (0, total - new))
