"""Trains a tokenizer: byte-level BPE, learned from any text, in the form that Hugging Face tools load.

Deterministic: Hugging Face's trainer counts words and breaks ties by id, so the same texts in the same order yield the
same merges. The first special token ends documents and has id 0, as in GPT-NeoX's tokenizer.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from ingot.data.tokenizer import Tokenizer
from ingot.errors import DataError
from ingot.plurals import count_of
from ingot.storage.byte_sizes import format_bytes

END_OF_DOCUMENT = "<|endoftext|>"
# How text is split into words, which merges never cross. cl100k keeps numbers in groups of three digits, runs of blank
# lines and a word's leading punctuation together, which compresses source code better.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS = ("gpt2", "cl100k")
_PART = 1 << 16  # characters
_BETWEEN_WORDS = re.compile(r"[a-zA-Z](?= [a-zA-Z])")
_LONGEST_WORD = 4096
_ENDLESS_WORD = re.compile(rf"\S{{{_LONGEST_WORD}}}")
_LARGEST = 1_000_000


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    folder: Path | None = None,
    splitter: str = "gpt2",
    special_tokens: Sequence[str] = (END_OF_DOCUMENT,),
) -> Tokenizer:
    """Learn up to `vocab_size` tokens from texts, and save them as a Hugging Face tokenizer folder, if one is named."""
    check_vocabulary(vocab_size, splitter, special_tokens)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = _pre_tokenizer(splitter)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator((part for text in texts for part in _parts(text)), trainer)
    tokenizer = Tokenizer(backend, {"eos_token": special_tokens[0]})
    if folder is not None:
        tokenizer.save(folder)
    return tokenizer


def describe_result(tokenizer: Tokenizer, wanted: int, documents: int, size: int, folder: Path) -> str:
    """What was learned, and whether the text had fewer tokens to learn than wanted."""
    learned = f"{tokenizer.vocab_size:,} tokens learned from {count_of(documents, 'document')}, {format_bytes(size)}"
    if tokenizer.vocab_size == wanted:
        return f"{folder}: {learned}"
    return f"{folder}: {learned}, fewer than the {wanted:,} asked for: no other pair of tokens occurs twice"


def _parts(text: str) -> Iterator[str]:
    """A text in parts of bounded size, since the library collects 256 of them before it counts words. It is cut between
    two words, where nothing is merged; an endless word is cut anywhere, since merging takes memory by the length."""
    start = 0
    while len(text) - start > _PART:
        window = text[start + _PART // 2 : start + _PART]
        between = _BETWEEN_WORDS.search(window)
        end = start + _PART // 2 + (between.end() if between else _PART // 2)
        yield from _without_endless_words(text[start:end])
        start = end
    yield from _without_endless_words(text[start:])


def _without_endless_words(text: str) -> Iterator[str]:
    if not _ENDLESS_WORD.search(text):
        yield text
        return
    for start in range(0, len(text), _LONGEST_WORD):
        yield text[start : start + _LONGEST_WORD]


def check_vocabulary(
    vocab_size: int, splitter: str = "gpt2", special_tokens: Sequence[str] = (END_OF_DOCUMENT,)
) -> None:
    """Refuse what no tokenizer can be trained to, before any text is read."""
    if splitter not in SPLITTERS:
        raise DataError(f"splitter {splitter!r}: known are {' and '.join(SPLITTERS)}")
    if not special_tokens or not all(special_tokens) or len(set(special_tokens)) < len(special_tokens):
        raise DataError(
            f"special tokens {list(special_tokens)}: give one or more different texts; the first ends documents"
        )
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise DataError(
            f"vocab_size={vocab_size}: byte-level BPE needs at least {smallest} tokens, one for each byte and the "
            "special ones"
        )
    if vocab_size > _LARGEST:
        raise DataError(f"vocab_size={vocab_size}: at most {_LARGEST:,} tokens can be trained; 32000 is common")


def _pre_tokenizer(splitter: str) -> Any:
    if splitter == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(_CL100K), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
