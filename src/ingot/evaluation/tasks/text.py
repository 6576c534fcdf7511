"""Perplexity and bits per byte of any text: each document on its own, every token scored once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ingot.data.tokenizer import Tokenizer
from ingot.evaluation.tasks.prompts import PromptRow
from ingot.evaluation.tasks.run import QuestionScorer

_DOCUMENTS = 64  # documents in memory at a time


@dataclass
class TextScore:
    """The loss on a text."""

    label: str
    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    documents: int = 0

    def named_metrics(self) -> dict[str, float]:
        """The metrics under the names of a validation set with a label."""
        loss = self.nats / max(self.tokens, 1)
        found = {"LanguageCrossEntropy": loss, "LanguagePerplexity": math.exp(min(loss, 700.0))}
        found["BitsPerByte"] = self.nats / math.log(2) / max(self.bytes, 1)
        return {f"metrics/eval/{self.label}/{name}": value for name, value in found.items()}


def score_text(
    label: str, documents: Iterable[str], scorer: QuestionScorer, tokenizer: Tokenizer, row_length: int
) -> TextScore:
    """Score documents. A long one is cut into windows, which start with the last token of the window before."""
    score, held = TextScore(label), list[list[PromptRow]]()
    start = tokenizer.eos_id  # what the model saw before a document when it was trained

    def flush() -> None:
        for rows in scorer.score(held, lambda tokens: None):
            score.nats -= sum(row.log_likelihood for row in rows)
        held.clear()

    for text in documents:
        ids = tokenizer.encode(text)
        tokens = ids if start is None else [start, *ids]
        if len(tokens) < 2:
            continue
        score.documents += 1
        score.bytes += len(text.encode())
        score.tokens += len(tokens) - 1
        for at in range(0, len(tokens) - 1, row_length - 1):
            window = tokens[at : at + row_length]
            held.append([PromptRow((window[0],), tuple(window[1:]), "", is_cut=False)])
        if len(held) >= _DOCUMENTS:
            flush()
    flush()
    return score
