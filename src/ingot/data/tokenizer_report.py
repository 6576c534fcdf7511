"""How well a tokenizer suits a text: its tokens per byte, and whether decoding returns the text."""

from collections.abc import Iterable
from dataclasses import dataclass

from ingot.data.tokenizer import Tokenizer


@dataclass
class TokenizerFit:
    """What a tokenizer makes of some texts."""

    tokens: int = 0
    bytes: int = 0
    documents: int = 0
    changed: int = 0  # documents that decode to another text
    first_change: str = ""
    used: int = 0  # different tokens that occur

    @property
    def tokens_per_byte(self) -> float:
        return self.tokens / max(self.bytes, 1)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / max(self.tokens, 1)


def measure_fit(tokenizer: Tokenizer, texts: Iterable[str]) -> TokenizerFit:
    """Encode and decode each text."""
    fit, seen = TokenizerFit(), set[int]()
    for text in texts:
        ids = tokenizer.encode(text)
        fit.tokens += len(ids)
        fit.bytes += len(text.encode())
        fit.documents += 1
        seen.update(ids)
        back = tokenizer.decode(ids)
        if back != text:
            fit.changed += 1
            fit.first_change = fit.first_change or _first_difference(text, back)
    fit.used = len(seen)
    return fit


def _first_difference(text: str, back: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
    return f"{text[at : at + 20]!r} decodes to {back[at : at + 20]!r}"


def describe(tokenizer: Tokenizer) -> dict[str, object]:
    """What a tokenizer is, for a person or as JSON."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        "vocab_size": tokenizer.vocab_size,
        "model": type(tokenizer.backend.model).__name__ + (", byte level" if tokenizer.is_byte_level else ""),
        "end_of_document": tokenizer.backend.id_to_token(tokenizer.eos_id) if tokenizer.eos_id is not None else None,
        "special_tokens": {token.content: index for index, token in sorted(added.items()) if token.special},
        "fingerprint": tokenizer.fingerprint(),
    }
