"""Sample text from a model, one token at a time, with a key/value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.errors import IngotError
from ingot.model.attention import KVCache
from ingot.model.gpt import GPT


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: int | None = None,
    seed: int | None = None,
) -> Iterator[int]:
    """Yield new token ids until `stop` or the limit. Temperature 0 takes the most likely token each time."""
    if not prompt:
        raise IngotError("the prompt is empty: give at least one token to start from")
    limit = model.config.context
    if len(prompt) >= limit and model.config.positions == "learned":
        raise IngotError(f"the prompt has {len(prompt)} tokens; this model's positions end at {limit}")
    if model.config.positions == "learned":
        max_new_tokens = min(max_new_tokens, limit - len(prompt))
    parameter = next(model.parameters())
    device = parameter.device
    generator = torch.Generator(device)
    if seed is not None:
        generator.manual_seed(seed)
    else:
        generator.seed()
    model.eval()
    cache = KVCache(model.config, 1, len(prompt) + max_new_tokens, device, parameter.dtype)
    tokens = torch.tensor([prompt], device=device)
    for _ in range(max_new_tokens):
        logits = model(tokens, cache=cache)[0, -1].float()  # [V]
        token = sample(logits, temperature, top_k, top_p, generator)
        if token == stop:
            return
        yield token
        tokens = torch.tensor([[token]], device=device)


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """Draw one token from logits [V], limited to the top_k most likely ones and to the smallest set of mass top_p."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k > 0:
        least = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p  # the token that crosses top_p stays
        ordered = ordered.masked_fill(outside, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(0, order, ordered)
    return int(torch.multinomial(probabilities, 1, generator=generator))
