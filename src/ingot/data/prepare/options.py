"""The options of a preparation, each declared once: they are the options of `ingot prepare` and the keywords of
`ingot.prepare`. The docstring of a field is its help."""

import difflib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from ingot.config.base import Section, rule_error
from ingot.config.error_messages import Origins, error_messages
from ingot.errors import DataError
from ingot.storage.byte_sizes import parse_bytes
from ingot.storage.names import plain_name

SPLIT_SAMPLES = {"train_small": 100_000, "val_small": 10_000, "val_xsmall": 3_000, "val_xxsmall": 100}
"""LLM Foundry's truncated splits: how many samples each holds."""

TRAIN = "train:"
"""What the name of a tokenizer begins with that is trained on the input; a number of tokens follows."""
_DOCUMENTS = ("file", "line", "paragraph")
_LONGEST_SEPARATOR = 200

F = TypeVar("F", bound=Callable[..., Any])


def _share(value: Any) -> Any:
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", value)
        value = tuple(map(int, match.groups())) if match else ()
    if value is None or (len(value) == 2 and 0 <= value[0] < value[1]):
        return value
    raise ValueError("must be K/N with K from 0 to N-1, such as 0/3, 1/3 and 2/3 for three processes")


Bytes = Annotated[int, BeforeValidator(lambda value: parse_bytes(value) if isinstance(value, str) else value)]
Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (str(value),) if isinstance(value, str | Path) else value)
]
Share = Annotated[tuple[int, int], BeforeValidator(_share)]


def flags(*names: str, several: bool = False) -> Any:
    """How an option is spelled on the command line, and whether it can be given several times there."""
    return {"flags": list(names), "several": several}


class PrepareOptions(Section):
    """What to read, how to tokenize it, and what to write."""

    input: Names = Field((), json_schema_extra=flags("--path", "--input", "--input_folder"))
    """Files, folders, globs or URLs: text of any kind, jsonl, json, parquet, csv, plain or .gz .zst .xz .bz2 .zip; from
    a folder what has a known suffix, by a glob any text."""
    out_root: Path | None = Field(None, json_schema_extra=flags("--out_root", "--out", "-o", "--output_folder"))
    """Folder of the dataset; each split is a folder in it."""
    output_prefix: str | None = None
    """Write PREFIX_KEY_document.bin and .idx, as Megatron does."""
    split: str = Field("train", json_schema_extra=flags("--split", "--splits", several=True))
    """train, val, train_small, ...: plain names; several only with --dataset."""
    documents: str = "file"
    """What is a document in a text file: file, line, paragraph (blank lines are between), or a SEPARATOR such as
    `<|endoftext|>` or `\\n---\\n`."""
    val_fraction: float | None = Field(None, gt=0, lt=1)
    """Hold out about this share of the documents as a split `val`, chosen by a hash of their text."""
    val_documents: int | None = Field(None, ge=1, le=1_000_000)
    """Hold out this many different documents instead; reads the input once more."""
    tokenizer: str | None = Field(None, json_schema_extra=flags("--tokenizer", "--tokenizer_model"))
    """Folder, tokenizer.json or hub id, or train:SIZE to train one on the input; none keeps text as text."""
    concat_tokens: int = Field(2048, ge=1, le=1 << 28)
    """Tokens of one MDS sample."""
    bos_text: str = ""
    """Text before each document."""
    eos_text: str | None = None
    """Text after each document; empty means none. Default: the tokenizer's own end of document."""
    no_wrap: bool = False
    """Start each sample with a document; the rest of a document that does not fit is dropped."""
    drop_last: bool = False
    """Drop the last, shorter sample, as LLM Foundry does."""
    max_samples: int | None = Field(None, ge=1)
    """Stop after this many samples. Default: LLM Foundry's number for train_small and similar splits."""
    format: Literal["mds", "indexed"] = "mds"
    """MDS shards, or Megatron's .bin/.idx (the default with --output_prefix)."""
    compression: str | None = None
    """zstd or zstd:LEVEL, for MDS."""
    size_limit: Bytes = Field(1 << 26, ge=1 << 10, lt=1 << 32, json_schema_extra={"shown": "64MiB"})
    """Size of one MDS shard before compression: from 1 KiB to 4 GiB, since its offsets have 32 bits."""
    token_type: Literal["auto", "uint16", "uint32", "int32", "int64"] = "auto"
    """Integer type of the tokens; auto: the narrowest that holds the vocabulary."""
    json_keys: Names = Field(("text",), json_schema_extra=flags("--json_keys", "--jsonl_keys"))
    """Field or column that holds the text."""
    num_workers: int | None = Field(
        None, ge=0, le=500, json_schema_extra=flags("--num_workers", "--workers", "--processes")
    )
    """Worker processes; 0 does the work in this one. Default: one per core."""
    memory: Bytes = Field(1_500_000_000, json_schema_extra={"shown": "1.5GB"})
    """Memory that all processes together should stay below; limits the default number of workers."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do with a record that is not a document."""
    engine: Literal["auto", "gigatoken", "hf"] = "auto"
    """Tokenizer library; auto: the fastest one with the same ids as Hugging Face's."""
    reprocess: bool = False
    """Remove an earlier result of prepare and start again. A folder that prepare did not write is refused."""
    share: Share | None = None
    """K/N: do a share of the work as one of N processes, K from 0; a run without it, afterwards, does the rest."""
    max_document_bytes: int = Field(1 << 26, ge=1)
    """Longest line or text accepted as one document."""
    max_expansion: int = Field(200, ge=1)
    """How many times its size a compressed file may grow to."""

    @property
    def holds_out(self) -> bool:
        """Whether some documents become a split `val`."""
        return self.val_fraction is not None or self.val_documents is not None

    @property
    def folder(self) -> Path:
        """Folder of the dataset."""
        return self.out_root if self.out_root is not None else Path(self.output_prefix or ".").parent

    @property
    def key(self) -> str:
        """The field or column that holds the text, if there is only one."""
        return self.json_keys[0]

    @property
    def sample_limit(self) -> int | None:
        """Samples to stop after."""
        return self.max_samples if self.max_samples is not None else SPLIT_SAMPLES.get(self.split)

    @field_validator("split")
    @classmethod
    def _check_split(cls, value: str) -> str:
        if value == "tokenizer":
            raise ValueError("the tokenizer is saved in the folder of this name; choose another name")
        return plain_name(value)

    @field_validator("documents")
    @classmethod
    def _check_documents(cls, value: str) -> str:
        if value in _DOCUMENTS:
            return value
        if close := difflib.get_close_matches(value.lower(), _DOCUMENTS, 1, 0.6):
            raise ValueError(f"did you mean {close[0]}? A separator is text such as '<|endoftext|>' or '\\n---\\n'")
        if not value or len(value.encode(errors="replace")) > _LONGEST_SEPARATOR:
            raise ValueError(f"a separator has from 1 to {_LONGEST_SEPARATOR} bytes")
        return value

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, value: str | None) -> str | None:
        if value is not None and value.startswith(TRAIN) and not value.removeprefix(TRAIN).isdecimal():
            raise ValueError("to train a tokenizer, write train:SIZE with the number of tokens, such as train:32000")
        return value

    @field_validator("compression")
    @classmethod
    def _check_compression(cls, value: str | None) -> str | None:
        if value and not re.fullmatch("zstd(:([1-9]|1[0-9]|2[0-2]))?", value):
            raise ValueError("use zstd or zstd:LEVEL with a level from 1 to 22")
        return value or None

    @model_validator(mode="after")
    def _check_validation(self) -> "PrepareOptions":
        if not self.holds_out:
            return self
        name = "val_fraction" if self.val_fraction is not None else "val_documents"
        if self.val_fraction is not None and self.val_documents is not None:
            raise rule_error("val_documents", "contradicts val_fraction; give one")
        if self.split == "val":
            raise rule_error(name, "what it holds out becomes the split val; choose another name for the rest")
        if len(self.json_keys) > 1:
            raise rule_error(name, "works with one of json_keys: documents are divided by their text")
        if self.output_prefix:
            raise rule_error(
                name, "needs out_root; Megatron's files are divided when they are read: documents.split=99,1"
            )
        return self

    @model_validator(mode="after")
    def _check_together(self) -> "PrepareOptions":
        if self.share and self.reprocess:
            raise rule_error("reprocess", "each share would remove what the others did; remove the old result first")
        if self.format == "mds":
            if len(self.json_keys) > 1:
                raise rule_error("json_keys", "several need format=indexed: an MDS dataset here has one column")
            if self.output_prefix:
                raise rule_error("output_prefix", "names Megatron's files; use out_root with format=mds")
            return self
        if self.compression:
            raise rule_error("compression", "the indexed format is read in place and cannot be compressed")
        if self.tokenizer is None:
            raise rule_error("tokenizer", "is missing; the indexed format holds tokens, not text")
        if self.no_wrap:
            raise rule_error("no_wrap", "the indexed format keeps whole documents, nothing is wrapped")
        if self.token_type == "uint32":
            raise rule_error("token_type", "uint32 does not exist in the indexed format; use auto, int32 or int64")
        for name in self.json_keys:  # they name files
            try:
                plain_name(name)
            except ValueError as error:
                raise rule_error("json_keys", f"{name!r} {error}") from None
        return self


def check_options(values: dict[str, Any]) -> PrepareOptions:
    """Options from plain values; each problem becomes one sentence."""
    try:
        return PrepareOptions.model_validate(values)
    except ValidationError as error:
        raise DataError("\n".join(error_messages(error, PrepareOptions, Origins())[:8])) from None


def takes_options(function: F) -> F:
    """Show the options in the signature and the docstring of a function that takes them as `**options`."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    fields = {name: f for name, f in PrepareOptions.model_fields.items() if name not in signature.parameters}
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
        for name, field in fields.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
    lines = (f"{name}: {' '.join((field.description or '').split())}" for name, field in fields.items())
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", *lines])
    return function
