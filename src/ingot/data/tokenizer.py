"""Text to token ids and back, on Hugging Face `tokenizers`, without `transformers`.

`transformers` loads the same `tokenizer.json`, but takes seconds to import in every worker and hides which file was
used. What training needs of it is small and is here: the token that ends a document, the number of embedding rows, and
the bytes of text that each token represents (for bits per byte).
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ingot.errors import DataError, disk_error, first_sentence
from ingot.storage.atomic import write_whole

# Names of the end-of-document token, the most reliable first.
_EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer:
    """A Hugging Face tokenizer and what `tokenizer_config.json` says about it."""

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None):
        backend.no_truncation()  # some published files carry a limit that would silently cut documents
        backend.no_padding()
        self.backend = backend
        self.config = dict(config or {})
        self.is_byte_level = _is_byte_level(backend)
        self.eos_id = self._find_eos()
        self.bos_id = self._id_of("bos_token")

    @cached_property
    def json(self) -> str:
        """The tokenizer.json, as the library writes it."""
        return self.backend.to_str()

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Every token and its id."""
        return self.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """How many rows an embedding needs."""
        return max(self.vocab.values(), default=-1) + 1

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Token ids of a text; `special_tokens` adds what the tokenizer puts around a document (`<s>` of Llama)."""
        return list(self.backend.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some token ids, special tokens included."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text that each token represents, int32 [vocab_size]; None if tokens do not map to bytes."""
        if not self.is_byte_level:
            return None
        sizes = np.zeros(self.vocab_size, dtype=np.int32)
        for token, index in self.backend.get_vocab(with_added_tokens=False).items():
            sizes[index] = len(token)  # byte-level BPE spells each byte as one printable character
        for index, added in self.backend.get_added_tokens_decoder().items():
            sizes[index] = 0 if added.special else len(added.content.encode())
        return sizes

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        folder = Path(folder)
        eos = self.backend.id_to_token(self.eos_id) if self.eos_id is not None else None
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config, **({"eos_token": eos} if eos else {})}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "tokenizer.json", self.json.encode())
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            write_whole(folder / "tokenizer_config.json", text.encode())
        except OSError as error:
            raise disk_error("write the tokenizer to", folder, error) from None

    def fingerprint(self) -> str:
        """A short hash of vocabulary, merges and rules."""
        return hashlib.sha256(self.json.encode()).hexdigest()[:16]

    def _find_eos(self) -> int | None:
        named = self._id_of("eos_token")
        ids = (named, *(self.backend.token_to_id(name) for name in _EOS_NAMES))
        return next((index for index in ids if index is not None), None)

    def _id_of(self, key: str) -> int | None:
        """The id of a token that the config names."""
        named = self.config.get(key)
        name = named.get("content") if isinstance(named, dict) else named
        found: int | None = self.backend.token_to_id(name) if isinstance(name, str) else None
        return found


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a folder with tokenizer.json, such a file, a vocab.json next to its merges.txt, or a Hugging Face hub id."""
    location = Path(path)
    if location.is_dir():
        if (location / "tokenizer.json").is_file():
            return _from_json_file(location / "tokenizer.json")
        if (location / "vocab.json").is_file() and (location / "merges.txt").is_file():
            return load_gpt2_tokenizer(location / "vocab.json", location / "merges.txt")
        raise DataError(f"{location}: no tokenizer.json in this folder, nor vocab.json with merges.txt")
    if location.is_file():
        if location.name.endswith("vocab.json"):
            return load_gpt2_tokenizer(location, location.with_name(location.name.replace("vocab.json", "merges.txt")))
        return _from_json_file(location)
    return _from_hub(str(path))


def parse_tokenizer(text: str) -> Tokenizer:
    """The tokenizer whose `json` this is."""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(text))
    tokenizer.json = text
    return tokenizer


def load_gpt2_tokenizer(vocab_file: str | Path, merges_file: str | Path) -> Tokenizer:
    """The tokenizer of GPT-2's two files, which Megatron's and NeoX's GPT2BPETokenizer read."""
    for file in (vocab_file, merges_file):
        if not Path(file).is_file():
            raise DataError(f"{file}: no such file; a GPT-2 tokenizer needs its vocab.json and its merges.txt")
    try:
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab_file), str(merges_file)))
    except Exception as error:  # the Rust side raises bare Exception
        raise DataError(f"{vocab_file}: not a vocab.json of GPT-2 with its merges.txt: {error}") from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if backend.token_to_id("<|endoftext|>") is not None:
        backend.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(backend, {"eos_token": "<|endoftext|>"})


def _from_json_file(file: Path) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception
        raise DataError(f"{file}: not a tokenizer.json of Hugging Face tokenizers: {error}") from None
    config_file = file.with_name("tokenizer_config.json")
    if not config_file.is_file():
        return Tokenizer(backend)
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{config_file}: cannot be read as JSON: {error}") from None
    return Tokenizer(backend, config if isinstance(config, dict) else {})


def _from_hub(name: str) -> Tokenizer:
    advice = f"{name}: no such file or folder"
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise DataError(f"{advice}; pass a tokenizer.json, a folder that holds one, or a Hugging Face hub id")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise DataError(f"{advice}, and hub ids need huggingface_hub: pip install huggingface_hub") from None
    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the error is reported once, below
    try:
        file = Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # the hub client raises many kinds: offline, 401, 404, bad name
        reason = first_sentence(error)
        raise DataError(
            f"{advice}, and its tokenizer.json is neither in the local Hugging Face cache nor available from the hub "
            f"({reason}); check the connection, or download it elsewhere and pass its path"
        ) from None
    with contextlib.suppress(Exception):  # optional; without it the usual names of EOS are tried
        hf_hub_download(name, "tokenizer_config.json")
    return _from_json_file(file)


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether it is byte-level BPE: tokens spell every text exactly, byte by byte."""
    if not isinstance(backend.model, models.BPE) or backend.pre_tokenizer is None:
        return False
    spec = json.loads(backend.pre_tokenizer.__getstate__())
    return any(part["type"] == "ByteLevel" for part in (spec, *spec.get("pretokenizers", [])))
