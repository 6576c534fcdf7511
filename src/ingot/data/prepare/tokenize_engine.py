"""The library that turns text into ids: `gigatoken` where it returns the same ids, Hugging Face `tokenizers` otherwise.

`gigatoken` is 30 to 100 times faster, but it has a newer Unicode than Hugging Face: a letter that only one of them
knows splits words differently, and NFC puts a new combining mark into another order. So the choice is made twice. At
start-up, hostile probes must yield equal ids, or the fast engine is not used at all. Then for each document: one with
a character outside the part of Unicode on which both agree goes to Hugging Face.
"""

import functools
import random
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from ingot.data.tokenizer import Tokenizer, parse_tokenizer
from ingot.errors import DataError

_TABLE_END = 0x20000  # code points above are rare; of these, the fast engine gets only the old ideographs
_IDEOGRAPHS = (0x20000, 0x2A6D6)
_CHUNK_CHARS = 1 << 22  # longer documents are encoded in chunks, to bound memory
_EXACT_CHARS = 1 << 20  # batch size for Hugging Face


@dataclass(frozen=True)
class Rules:
    """What an engine needs to know about a tokenizer, as plain values."""

    json: str
    normalizes: bool
    cuts_are_safe: bool  # a long text may be cut between words
    prefix: list[int]  # what the tokenizer itself puts before each document, such as Llama's `<s>`
    suffix: list[int]
    probes: list[str]  # texts that tell engines apart
    probe_ids: list[list[int]]  # Hugging Face's ids of each

    @staticmethod
    def of(tokenizer: Tokenizer) -> "Rules":
        normalizes = tokenizer.backend.normalizer is not None
        prefix, suffix = _document_frame(tokenizer)
        probes = hostile_texts(tokenizer, count=1000, seed=0)
        ids = [e.ids for e in tokenizer.backend.encode_batch_fast(probes, add_special_tokens=False)]
        return Rules(tokenizer.json, normalizes, tokenizer.is_byte_level, prefix, suffix, probes, ids)


class Engine:
    """Encodes documents. `reason` says why this engine was chosen."""

    def __init__(self, rules: Rules, name: str, reason: str = ""):
        self.rules, self.name, self.reason = rules, name, reason
        self._fast: Any = _load_gigatoken(rules.json) if name == "gigatoken" else None
        self._known = _agreed_characters(rules.normalizes) if self._fast else None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Hugging Face's tokenizer, which the fast engine rarely needs."""
        return parse_tokenizer(self.rules.json)

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of some documents (UTF-8) back to back, uint32 [tokens], and the number of each, int64 [documents].

        The caller adds what belongs around a document (`rules.prefix`, `rules.suffix`).
        """
        if any(len(text) > _CHUNK_CHARS for text in texts):
            return self._encode_long(texts)
        return self._encode_batch(texts)

    def _encode_batch(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        if self._fast is None:
            return self._encode_exactly(texts)
        if not self._has_foreign(b"".join(texts)):
            return self._encode_fast(texts)
        foreign = np.array([self._has_foreign(text) for text in texts])  # bool [documents]
        lengths = np.zeros(len(texts), np.int64)
        fast, lengths[~foreign] = self._encode_fast(list(compress(texts, ~foreign)))
        exact, lengths[foreign] = self._encode_exactly(list(compress(texts, foreign)))
        from_exact = np.repeat(foreign, lengths)  # bool [tokens]
        ids = np.empty(len(from_exact), np.uint32)
        ids[~from_exact], ids[from_exact] = fast, exact
        return ids, lengths

    def _encode_fast(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        if not texts:
            return np.zeros(0, np.uint32), np.zeros(0, np.int64)
        layout = self._fast.encode_batch(texts, parallel=False).layout
        offsets = np.asarray(layout.offsets)
        return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)

    def _encode_exactly(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        ids: list[np.ndarray] = []
        # in batches, since Hugging Face's result takes some 150 bytes per token
        for batch in _batches([text.decode() for text in texts]):
            encodings = self.tokenizer.backend.encode_batch_fast(batch, add_special_tokens=False)
            ids += [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        lengths = np.array([len(i) for i in ids], dtype=np.int64)
        return np.concatenate(ids) if ids else np.zeros(0, np.uint32), lengths

    def _encode_long(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = [], []
        for text in texts:
            parts = [self._encode_batch([chunk.encode()])[0] for chunk in self._chunks(text.decode())]
            ids += parts
            lengths.append(sum(len(p) for p in parts))
        return np.concatenate(ids), np.array(lengths, dtype=np.int64)

    def _chunks(self, text: str) -> Iterator[str]:
        """Cut a long text where its ids are the same as if it had not been cut."""
        start = 0
        while self.rules.cuts_are_safe and len(text) - start > _CHUNK_CHARS:
            cut = self.find_cut(text, start + _CHUNK_CHARS // 2, start + _CHUNK_CHARS)
            if cut is None:
                break
            yield text[start:cut]
            start = cut
        yield text[start:]

    def find_cut(self, text: str, low: int, high: int) -> int | None:
        """The last position in [low, high) between a word and the single space before the next, if cuts are safe.

        Every byte-level pre-tokenizer in use splits there; the text around it is encoded both ways to be sure.
        """
        if not self.rules.cuts_are_safe:
            return None
        encode = self.tokenizer.encode
        at = high
        for _ in range(10_000):
            at = text.rfind(" ", low, at)
            if at < 1 or at + 1 >= len(text):
                return None
            around = text[at - 1] + text[at + 1]
            if around.isascii() and around.isalpha():
                left, right = text[max(0, at - 64) : at], text[at : at + 64]
                if encode(left) + encode(right) == encode(left + right):
                    return at
        return None

    def _has_foreign(self, text: bytes) -> bool:
        """Whether a text has a character on which the engines may disagree."""
        data = np.frombuffer(text, np.int8)
        rest = data[data < 0].tobytes()  # all but ASCII, which is still valid UTF-8, and mostly short
        if not rest:
            return False
        points = np.frombuffer(rest.decode().encode("utf-32-le"), dtype=np.uint32)  # [characters]
        assert self._known is not None
        high = points[points >= _TABLE_END]
        unknown = not self._known[points[points < _TABLE_END]].all()
        return unknown or bool(((high < _IDEOGRAPHS[0]) | (high > _IDEOGRAPHS[1])).any())


def choose_engine(tokenizer: Tokenizer, wanted: str = "auto") -> Engine:
    """The fastest engine with Hugging Face's ids, or the requested one (`gigatoken`, `hf`)."""
    return pick_engine(Rules.of(tokenizer), wanted)


def pick_engine(rules: Rules, wanted: str) -> Engine:
    """`choose_engine` for a process that has only the rules of the tokenizer."""
    if wanted == "hf":
        return Engine(rules, "hf", "requested")
    try:
        engine = Engine(rules, "gigatoken", "same ids as Hugging Face on all probes")
    except ImportError:
        reason = "gigatoken is not installed: pip install gigatoken"
    except Exception as error:  # a tokenizer that it does not support
        reason = f"gigatoken does not support this tokenizer ({str(error).splitlines()[0][:120]})"
    else:
        # Probes with characters that the fast engine never gets do not count.
        probes = zip(rules.probes, rules.probe_ids, strict=True)
        known = [(text, expected) for text, expected in probes if not engine._has_foreign(text.encode())]
        ids, lengths = engine._encode_fast([text.encode() for text, _ in known])
        found = np.split(ids, np.cumsum(lengths)[:-1])
        wrong = [text for (text, expected), got in zip(known, found, strict=True) if got.tolist() != expected]
        if not wrong:
            return engine
        reason = f"gigatoken returns other ids than Hugging Face, for example for {wrong[0][:40]!r}"
    if wanted == "gigatoken":
        raise DataError(f"engine=gigatoken does not work with this tokenizer: {reason}; use engine=hf")
    return Engine(rules, "hf", reason)


def hostile_texts(tokenizer: Tokenizer, count: int, seed: int) -> list[str]:
    """Texts of what tokenizers get wrong: odd spaces, marks, contractions, halves of special tokens, digits."""
    rng = random.Random(seed)
    added = [a.content for a in tokenizer.backend.get_added_tokens_decoder().values()] or ["<s>"]
    words = sorted(tokenizer.vocab)
    spaces = " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2003\u200a\u2028\u2029\u202f\u205f\u3000\u200b\u200d\ufeff\x00"
    odd = "'’ʼ＇́̈éßẞſKÅΩﬁ①²½Ⅷ٣३๙𝟙〇一İıǅְّ가각\U0001f600\U0001f468\ufe0f�\U0010ffff\ue000Å゙ﾞｶ\u0958"
    parts = {
        "plain": lambda: rng.choice("abcxyzABCXYZ0189.,;:!?-_()[]{}<>|/\\@#$%^&*+=~`\"'"),
        "space": lambda: rng.choice(spaces),
        "spaces": lambda: rng.choice([" ", "  ", "\n", "\n\n", " \n", "\n ", "\r\n", " " * rng.randint(1, 40)]),
        "odd": lambda: rng.choice(odd),
        "contraction": lambda: rng.choice(["'s", "'S", "'t", "'re", "'VE", "'m", "'ll", "'d", "’s", "''s", " 's"]),
        "added": lambda: rng.choice(added),
        "half": lambda: (token := rng.choice(added))[: rng.randrange(len(token) + 1)],
        "word": lambda: rng.choice(words),
        "number": lambda: str(rng.randint(0, 10 ** rng.randint(1, 12))),
        "any": lambda: chr(c) if not 0xD800 <= (c := rng.randrange(0x110000)) < 0xE000 else "",
        "common": lambda: chr(rng.randrange(0x3000)),
    }
    makers = list(parts.values())
    return ["".join(rng.choice(makers)() for _ in range(rng.choice((1, 2, 3, 5, 10, 30)))) for _ in range(count)]


def _load_gigatoken(text: str) -> Any:
    import gigatoken

    return gigatoken.Tokenizer.from_json(text)


def _batches(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _EXACT_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@functools.cache
def _agreed_characters(normalizes: bool) -> np.ndarray:
    """For each code point below _TABLE_END, whether both engines treat it alike, bool.

    It must be assigned in Python's tables, which are older than both engines'. If the tokenizer normalizes, it must
    also have the combining class and decomposition of Unicode 3.2, since Hugging Face's NFC is that of an old version.
    """
    old = unicodedata.ucd_3_2_0
    known = np.zeros(_TABLE_END, dtype=bool)
    composed: set[int] = set()
    for point in range(_TABLE_END):
        char = chr(point)
        known[point] = unicodedata.category(char) not in ("Cn", "Cs")
        if not normalizes:
            continue
        decomposition, combining = unicodedata.decomposition(char), unicodedata.combining(char)
        canonical = bool(decomposition) and decomposition[0] != "<"
        if (combining or canonical) and (old.category(char) == "Cn" or old.combining(char) != combining):
            known[point] = False
            composed |= {int(p, 16) for p in decomposition.split()} if canonical else set()
    for point in composed:
        if point < _TABLE_END and old.category(chr(point)) == "Cn":
            known[point] = False
    return known


def _document_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer itself puts before and after each document, such as Llama's `<s>`."""
    bare, framed = tokenizer.encode("a"), tokenizer.encode("a", special_tokens=True)
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    raise DataError("the tokenizer's post-processor changes the tokens of the text, which `prepare` does not support")
