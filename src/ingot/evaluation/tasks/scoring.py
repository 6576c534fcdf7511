"""Log-likelihoods of continuations: the model runs once over packed rows, and makes logits only where one is scored."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ingot.config.model import ModelConfig
from ingot.data.tokenizer import Tokenizer
from ingot.evaluation.tasks.answering import generate_answers
from ingot.evaluation.tasks.packing import PackedBatch, RowShapes, make_units, pack
from ingot.evaluation.tasks.prompts import PromptRow, Question
from ingot.model.branch_attention import BranchAttention, TokenRows, attending_by
from ingot.model.gpt import GPT
from ingot.model.precision import autocast

BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}


@dataclass
class RowScore:
    """What the model makes of a row's continuation."""

    log_probs: list[float]  # of each token, in nats
    confidences: list[float]  # the largest probability at each token
    is_greedy: bool  # every token is the most likely one

    @property
    def log_likelihood(self) -> float:
        return float(np.sum(self.log_probs))

    @property
    def mean_log_prob(self) -> float:
        return self.log_likelihood / max(len(self.log_probs), 1)


class ScoreTable:
    """The scores of all tokens that are scored, row after row, as they come in batch by batch."""

    def __init__(self, questions: Sequence[Sequence[PromptRow]]):
        self.questions = questions
        self.rows = [row for question in questions for row in question]
        self.starts = np.cumsum([0, *(len(row.continuation) for row in self.rows)])

    @property
    def tokens(self) -> int:
        """How many there are."""
        return int(self.starts[-1])

    def places(self, batch: PackedBatch) -> np.ndarray:
        """Where the scores of a batch belong."""
        is_first = np.diff(batch.owners, prepend=-1) != 0
        first = np.maximum.accumulate(np.where(is_first, np.arange(len(batch.owners)), 0))
        return self.starts[batch.owners] + np.arange(len(batch.owners)) - first

    def by_question(self, scores: np.ndarray) -> list[list[RowScore]]:
        """The scores [tokens, 3] of `CrossEntropy.token_scores` as those of each question's rows.

        Equal rows of a question have equal scores: choices that are the same tie, and no rounding decides.
        """
        found, number = [], 0
        for question in self.questions:
            first: dict[PromptRow, RowScore] = {}
            for row in question:
                if row not in first:
                    first[row] = _row_score(scores[self.starts[number] : self.starts[number + 1]], row)
                number += 1
            found.append([first[row] for row in question])
        return found


class Scorer:
    """Scores rows with a model on one device."""

    def __init__(self, model: GPT, device: torch.device, precision: str):
        self.model, self.device, self.precision = model, device, precision
        self.batch_tokens = BATCH_TOKENS[device.type]
        self.is_compiled = False

    def compile(self) -> None:
        """Compile the blocks, for the few shapes that rows then have. It takes about ten seconds for each shape."""
        for block in self.model.blocks.values():
            block.compile(dynamic=False)
        self.is_compiled = True

    @torch.inference_mode()
    def score(
        self, questions: Sequence[Sequence[PromptRow]], progress: Callable[[int], None] = lambda tokens: None
    ) -> list[list[RowScore]]:
        """The scores of each question's rows. `progress` receives the tokens of each batch that is done."""
        table = ScoreTable(questions)
        found = np.zeros((table.tokens, 3), np.float64)
        shapes = shapes_for(self.model.config, self.batch_tokens, fixed=self.is_compiled)
        self.model.eval()
        running: tuple[PackedBatch, Tensor] | None = None
        for batch in pack(make_units(questions, shapes.shares), table.rows, shapes):
            started = batch, self._run(batch)
            if running:  # while the device works on this batch, the results of the one before are fetched
                found[table.places(running[0])] = running[1].cpu().numpy()
                progress(running[0].tokens.size)
            running = started
        if running:
            found[table.places(running[0])] = running[1].cpu().numpy()
            progress(running[0].tokens.size)
        return table.by_question(found)

    def generate(
        self, questions: Sequence[Question], tokenizer: Tokenizer, stops: Sequence[str],
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> list[str]:  # fmt: skip
        """The text that each prompt is continued with."""
        return generate_answers(self.model, questions, tokenizer, stops, self.precision, self.batch_tokens, progress)

    def _run(self, batch: PackedBatch) -> Tensor:
        rows = to_device(batch, self.device)
        attention: AbstractContextManager = nullcontext()
        if rows.has_branches:
            op = BranchAttention(self.model.config)
            op.set_rows(rows.question, rows.branch, rows.position)
            attention = attending_by(self.model, op)
        with attention, autocast(self.precision, self.device):
            return self.model.token_scores(rows)


def shapes_for(config: ModelConfig, batch_tokens: int, *, alone: bool = True, fixed: bool = False) -> RowShapes:
    """The rows that a model can take."""
    # masks between documents count end-of-document tokens from the start of a row: one row holds one sequence
    shares = not (config.document_mask or config.document_positions) or config.eos_token_id is None
    return RowShapes(batch_tokens, config.context, shares=shares, alone=alone, fixed=fixed)


def to_device(batch: PackedBatch, device: torch.device) -> TokenRows:
    """The rows of a batch as tensors."""
    arrays = (batch.tokens, batch.question, batch.branch, batch.position, batch.line, batch.column, batch.targets)
    moved = (torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True) for array in arrays)
    return TokenRows(*moved, has_branches=batch.has_branches)


def _row_score(scores: np.ndarray, row: PromptRow) -> RowScore:
    return RowScore(scores[:, 0].tolist(), scores[:, 1].tolist(), bool((scores[:, 2] == row.continuation).all()))
