"""Trains a tokenizer: byte-level BPE as in GPT-2, learned from any text.

Deterministic: Hugging Face's trainer counts words and breaks ties by id, so the same texts in the same order yield the
same merges. `<|endoftext|>` is id 0, as in GPT-NeoX's tokenizer.
"""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ingot.data.tokenizer import Tokenizer
from ingot.errors import DataError

_SMALLEST = 257  # 256 bytes and the end of a document


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Learn `vocab_size` tokens from texts and save them as a Hugging Face tokenizer folder."""
    if vocab_size < _SMALLEST:
        raise DataError(f"vocab_size={vocab_size}: byte-level BPE needs at least {_SMALLEST} tokens, one for each byte")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = Tokenizer(backend, {"eos_token": "<|endoftext|>"})
    tokenizer.save(folder)
    return tokenizer
