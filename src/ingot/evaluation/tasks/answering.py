"""Generated answers: greedy decoding of many prompts at once, with a key/value cache."""

import re
import string
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ingot.config.evaluation import TaskConfig
from ingot.data.tokenizer import Tokenizer
from ingot.evaluation.tasks.prompts import Question
from ingot.model.attention import KVCache
from ingot.model.branch_attention import PADDING, BranchAttention
from ingot.model.gpt import GPT
from ingot.model.precision import autocast, compute_dtype

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))


@torch.inference_mode()
def generate_answers(
    model: GPT, questions: Sequence[Question], tokenizer: Tokenizer, stops: Sequence[str], precision: str,
    batch_tokens: int, progress: Callable[[int], None] = lambda tokens: None,
) -> list[str]:  # fmt: skip
    """The text that each prompt is continued with, up to a stop string or the end of the document.

    Prompts are padded at the left: all rows then write the same column of the cache, and positions start behind the
    padding, which nothing sees.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(questions)), key=lambda i: -len(questions[i].rows[0].context))
    answers = [""] * len(questions)
    usual, model.attention_op = model.attention_op, BranchAttention(model.config)
    model.eval()
    try:
        while order:
            longest = questions[order[0]]
            length = len(longest.rows[0].context) + longest.max_new_tokens
            chosen, order = order[: max(1, batch_tokens // length)], order[max(1, batch_tokens // length) :]
            prompts = [list(questions[i].rows[0].context) for i in chosen]
            with autocast(precision, device):
                texts = _generate_batch(model, prompts, longest.max_new_tokens, tokenizer, stops, precision)
            for i, text in zip(chosen, texts, strict=True):
                answers[i] = text
            progress(len(chosen) * length)
    finally:
        model.attention_op = usual
    return answers


def _generate_batch(
    model: GPT, prompts: list[list[int]], new_tokens: int, tokenizer: Tokenizer, stops: Sequence[str], precision: str
) -> list[str]:
    device = next(model.parameters()).device
    length, count = max(map(len, prompts)), len(prompts)
    padding = torch.tensor([length - len(prompt) for prompt in prompts], device=device)[:, None]  # [B, 1]
    tokens = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts], device=device)  # [B, T]
    columns = torch.arange(length + new_tokens, device=device)[None, :]
    position = (columns - padding).clamp(min=0)  # [B, S]
    question = torch.where(columns < padding, PADDING, 0)
    attention = model.attention_op
    assert isinstance(attention, BranchAttention)
    attention.place(question, torch.zeros_like(question), position)
    dtype = compute_dtype(precision) if precision != "fp32" else next(model.parameters()).dtype
    cache = KVCache(model.config, count, length + new_tokens, device, dtype)
    written: list[list[int]] = [[] for _ in prompts]
    done = [False] * count
    for _ in range(new_tokens):
        start = cache.length
        hidden = model.hidden_states(tokens, cache, position[:, start : start + tokens.shape[1]])[:, -1]  # [B, d]
        logits = F.linear(hidden, model.output_weight)[:, : model.config.vocab_size].float()
        tokens = logits.argmax(1)[:, None]  # [B, 1]
        for row, token in enumerate(tokens[:, 0].tolist()):
            if not done[row] and token != tokenizer.eos_id:
                written[row].append(token)
            done[row] |= token == tokenizer.eos_id or any(stop in tokenizer.decode(written[row]) for stop in stops)
        if all(done):
            break
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
