"""Continues many prompts at once, with a key/value cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.model.attention import KVCache
from ingot.model.branch_attention import PADDING, BranchAttention, attending_by
from ingot.model.generate import sample
from ingot.model.gpt import GPT
from ingot.model.precision import autocast, compute_dtype


@dataclass(frozen=True)
class Decoding:
    """How prompts are continued: greedily, unless there is a temperature."""

    new_tokens: int  # at most
    eos_id: int | None  # ends a text and is not part of it
    is_done: Callable[[list[int]], bool]  # whether the tokens of a text hold a stop string
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@torch.inference_mode()
def continue_prompts(
    model: GPT, prompts: Sequence[Sequence[int]], decoding: Decoding, precision: str, batch_tokens: int,
    progress: Callable[[int], None] = lambda prompts: None,
) -> list[list[int]]:  # fmt: skip
    """The tokens that each prompt is continued with. `progress` receives how many prompts are done.

    Prompts are padded at the left: all rows then write the same column of the cache, and positions start behind the
    padding, which nothing sees.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    written: list[list[int]] = [[] for _ in prompts]
    model.eval()
    with attending_by(model, BranchAttention(model.config)):
        while order:
            count = max(1, batch_tokens // (len(prompts[order[0]]) + decoding.new_tokens))
            chosen, order = order[:count], order[count:]
            with autocast(precision, next(model.parameters()).device):
                found = _continue_batch(model, [list(prompts[i]) for i in chosen], decoding, precision)
            for i, tokens in zip(chosen, found, strict=True):
                written[i] = tokens
            progress(len(chosen))
    return written


def _continue_batch(model: GPT, prompts: list[list[int]], decoding: Decoding, precision: str) -> list[list[int]]:
    device = next(model.parameters()).device
    length, count, most = max(map(len, prompts)), len(prompts), decoding.new_tokens
    padding = torch.tensor([length - len(prompt) for prompt in prompts], device=device)[:, None]  # [B, 1]
    tokens = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts], device=device)  # [B, T]
    columns = torch.arange(length + most, device=device)[None, :]
    position = (columns - padding).clamp(min=0)  # [B, S]
    question = torch.where(columns < padding, PADDING, 0)
    attention = model.attention_op
    assert isinstance(attention, BranchAttention)
    attention.set_rows(question, torch.zeros_like(question), position)
    dtype = compute_dtype(precision) if precision != "fp32" else next(model.parameters()).dtype
    cache = KVCache(model.config, count, length + most, device, dtype)
    written: list[list[int]] = [[] for _ in prompts]
    done = [False] * count
    generator = torch.Generator(device).manual_seed(0) if decoding.temperature else None
    for _ in range(most):
        start = cache.length
        hidden = model.hidden_states(tokens, cache, position[:, start : start + tokens.shape[1]])[:, -1]  # [B, d]
        logits = F.linear(hidden, model.output_weight)[:, : model.config.vocab_size].float()
        tokens = _choose(logits, decoding, generator)[:, None]  # [B, 1]
        for row, token in enumerate(tokens[:, 0].tolist()):
            if done[row]:
                continue
            if token != decoding.eos_id:
                written[row].append(token)
            done[row] = token == decoding.eos_id or decoding.is_done(written[row])
        if all(done):
            break
    return written


def _choose(logits: Tensor, decoding: Decoding, generator: torch.Generator | None) -> Tensor:
    """The next token of each row [B], from logits [B, V]."""
    if generator is None:
        return logits.argmax(1)
    drawn = [sample(row, decoding.temperature, decoding.top_k, decoding.top_p, generator) for row in logits]
    return torch.tensor(drawn, device=logits.device)
