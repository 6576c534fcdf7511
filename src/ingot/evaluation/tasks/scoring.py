"""Log-likelihoods of continuations: the model runs once over packed rows, and makes logits only where one is scored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.data.tokenizer import Tokenizer
from ingot.evaluation.tasks.answering import generate_answers
from ingot.evaluation.tasks.packing import PackedBatch, make_unit, pack
from ingot.evaluation.tasks.prompts import PromptRow, Question
from ingot.model.branch_attention import BranchAttention
from ingot.model.gpt import GPT
from ingot.model.precision import autocast

BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
_LOGIT_ROWS = 2048  # scored positions whose logits [P, V] exist at a time


@dataclass
class RowScore:
    """What the model makes of a row's continuation."""

    log_probs: list[float] = field(default_factory=list)  # of each token, in nats
    confidences: list[float] = field(default_factory=list)  # the largest probability at each token
    is_greedy: bool = True  # every token is the most likely one

    @property
    def log_likelihood(self) -> float:
        return float(np.sum(self.log_probs))

    @property
    def mean_log_prob(self) -> float:
        return self.log_likelihood / max(len(self.log_probs), 1)


class Scorer:
    """Scores rows with a model on one device."""

    def __init__(self, model: GPT, device: torch.device, precision: str):
        self.model, self.device, self.precision = model, device, precision
        config = model.config
        # masks between documents count end-of-document tokens from the start of a row: one row holds one sequence
        self._packs = not (config.document_mask or config.document_positions) or config.eos_token_id is None
        self.batch_tokens = BATCH_TOKENS[device.type]

    @torch.inference_mode()
    def score(
        self, questions: Sequence[Sequence[PromptRow]], progress: Callable[[int], None] = lambda tokens: None
    ) -> list[list[RowScore]]:
        """The scores of each question's rows. `progress` receives the tokens of each batch that is done."""
        rows = [row for question in questions for row in question]
        scores = [RowScore() for _ in rows]
        units, start = [], 0
        for question in questions:
            numbers = range(start, start + len(question))
            groups = [numbers] if self._packs else [[n] for n in numbers]
            units += [make_unit(group, [rows[n] for n in group]) for group in groups]
            start += len(question)
        usual = self.model.attention_op
        if self._packs:
            self.model.attention_op = BranchAttention(self.model.config)
        self.model.eval()
        try:
            for batch in pack(units, rows, self.batch_tokens, self._packs):
                self._score_batch(batch, scores)
                progress(batch.tokens.size)
        finally:
            self.model.attention_op = usual
        ends = np.cumsum([len(question) for question in questions]).tolist()
        return [scores[end - len(question) : end] for question, end in zip(questions, ends, strict=True)]

    def generate(
        self, questions: Sequence[Question], tokenizer: Tokenizer, stops: Sequence[str],
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> list[str]:  # fmt: skip
        """The text that each prompt is continued with."""
        return generate_answers(self.model, questions, tokenizer, stops, self.precision, self.batch_tokens, progress)

    def _score_batch(self, batch: PackedBatch, scores: list[RowScore]) -> None:
        if not batch.at:
            return
        tokens, position = self._on_device(batch.tokens), self._on_device(batch.position)
        with autocast(self.precision, self.device):
            if isinstance(self.model.attention_op, BranchAttention):
                question, branch = self._on_device(batch.question), self._on_device(batch.branch)
                self.model.attention_op.place(question, branch, position)
                hidden = self.model.hidden_states(tokens, positions=position)  # [B, T, d]
            else:
                hidden = self.model.hidden_states(tokens)
            line, column = self._on_device(np.array(batch.at)).unbind(1)
            scored = hidden[line, column]  # [P, d]
            targets = self._on_device(np.array(batch.targets))
            found = [
                self._judge(*part) for part in zip(scored.split(_LOGIT_ROWS), targets.split(_LOGIT_ROWS), strict=True)
            ]
        log_probs, confidences, greedy = (torch.cat(column).tolist() for column in zip(*found, strict=True))
        for owner, log_prob, confidence, is_top in zip(batch.owners, log_probs, confidences, greedy, strict=True):
            scores[owner].log_probs.append(log_prob)
            scores[owner].confidences.append(confidence)
            scores[owner].is_greedy &= is_top

    def _judge(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the targets, largest probabilities, and whether a target is the first of the largest."""
        logits = F.linear(hidden, self.model.output_weight)[:, : self.model.config.vocab_size].float()  # [P, V]
        total = logits.logsumexp(1)
        top = logits.max(1)
        own = logits.gather(1, targets[:, None])[:, 0]
        return own - total, (top.values - total).exp(), logits.argmax(1) == targets

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
