"""Generated answers, and whether they are right."""

import re
import string
from collections.abc import Callable, Sequence

from ingot.config.evaluation import TaskConfig
from ingot.data.tokenizer import Tokenizer
from ingot.evaluation.tasks.decoding import Decoding, continue_prompts
from ingot.evaluation.tasks.prompts import Question
from ingot.model.gpt import GPT

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))


def generate_answers(
    model: GPT, questions: Sequence[Question], tokenizer: Tokenizer, stops: Sequence[str], precision: str,
    batch_tokens: int, progress: Callable[[int], None] = lambda tokens: None,
) -> list[str]:  # fmt: skip
    """The text that each prompt is continued with, up to a stop string or the end of the document."""
    if not questions:
        return []
    new_tokens = max(question.max_new_tokens for question in questions)
    decoding = Decoding(new_tokens, tokenizer.eos_id, lambda ids: any(stop in tokenizer.decode(ids) for stop in stops))
    prompts = [question.rows[0].context for question in questions]
    usual = max(map(len, prompts)) + new_tokens
    written = continue_prompts(model, prompts, decoding, precision, batch_tokens, lambda n: progress(n * usual))
    return [cut(tokenizer.decode(ids), stops) for ids in written]


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string. Stops are literal here; LLM Foundry reads them as regular expressions."""
    return min((text.partition(stop)[0] for stop in stops if stop), key=len, default=text)


def is_right(task: TaskConfig, output: str, labels: Sequence[str]) -> bool:
    """Whether the output starts with a label, as in LLM Foundry: `18` is right where `1` is."""
    if task.cot_delimiter:
        output = output.rpartition(task.cot_delimiter)[2]
    tidy: Callable[[str], str] = normalize if task.do_normalization else str.strip
    return any(tidy(output).startswith(tidy(label)) for label in labels)


def normalize(text: str) -> str:
    """TriviaQA's normalization: case, punctuation, articles and repeated white space do not count."""
    plain = text.replace("_", " ").lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())
