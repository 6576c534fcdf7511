"""Where tokens come from."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ingot.config.base import Section, rule_error
from ingot.config.names import plain_name
from ingot.storage.byte_sizes import parse_bytes

PARTS = ("train", "valid", "test")


class DocumentsConfig(Section):
    """A part of the documents of one PREFIX.bin and PREFIX.idx, cut as Megatron and GPT-NeoX cut them."""

    split: str
    """Shares of training, validation and test, such as 969,30,1, of the documents in the order of the file."""
    part: Literal["train", "valid", "test"]
    """The part to read."""
    rule: Literal["megatron", "neox"] = "megatron"
    """Whose rounding; they differ by a document at most."""

    @field_validator("split")
    @classmethod
    def _shares(cls, value: str) -> str:
        numbers = re.split(r"[,/]", value)
        if (
            len(numbers) > 3
            or not all(re.fullmatch(r"\s*\d*\.?\d+\.?\s*", n) for n in numbers)
            or not sum(map(float, numbers))
        ):
            raise ValueError("write up to three shares, such as 969,30,1")
        return value


class PlaceConfig(Section):
    """Where one data set lies."""

    path: str = ""
    """Folder of a prepared data set, with or without its splits below it, or PREFIX of PREFIX.bin and PREFIX.idx.
    With remote: the local cache."""
    split: str | None = None
    """Sub-folder of path (and of remote) to read, such as train or val: one plain name."""
    documents: DocumentsConfig | None = None
    """Read only a part of the documents (.bin and .idx)."""
    remote: str | None = Field(None, min_length=1)
    """Where the data is, if not in path: s3://, gs://, az://, http(s):// or another folder. Shards are fetched ahead of
    use, verified, and kept in path. Credentials come from the environment."""
    cache_limit: int | None = Field(None, gt=0)
    """Bytes of fetched or unpacked shards to keep in path, such as 100GB; the least recently used go first, and never
    a file that was there before. Default: no limit."""
    token_encoding_type: Literal["int64", "int32", "int16", "uint32", "uint16", "uint8"] = "int64"
    """Type of the tokens in MDS columns of encoding `bytes`, which do not say it themselves."""

    @field_validator("split")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        return value if value is None else plain_name(value)

    @field_validator("cache_limit", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value


class MixedSourceConfig(PlaceConfig):
    """One of several data sets that are mixed."""

    weight: float | None = Field(None, gt=0)
    """Share of the samples, relative to the other sources. Default, for all or none: the size of the data set."""

    @model_validator(mode="after")
    def _check(self) -> "MixedSourceConfig":
        if not self.path:
            raise rule_error("path", "is missing; name the folder of the data set")
        return self


class SourceConfig(PlaceConfig):
    """One data set, or a mixture of several."""

    shuffle: bool = True
    """Draw samples in a random order that is a pure function of the seed; off reads them as they stand."""
    shuffle_seed: int | None = None
    """Seed of the order. Default: the run's seed."""
    mix: dict[str, MixedSourceConfig] = Field(default_factory=dict)
    """Instead of path: several data sets by name, each with its path and weight. Sources may be added, and weights
    changed, when a run continues; no sample of the others is repeated or skipped."""
    mix_order: Literal["drawn", "greedy"] = "drawn"
    """Which source comes next: drawn at random, in exact shares; or the one furthest behind its share, the first of
    equals, as in Megatron and GPT-NeoX."""

    @model_validator(mode="after")
    def _check(self) -> "SourceConfig":
        if not self.path and not self.mix:
            raise rule_error("path", "is missing; name the folder of a prepared data set")
        if self.mix:
            for key in ("path", "split", "documents", "remote", "cache_limit"):
                if getattr(self, key):
                    raise rule_error(key, "says where one data set is, and mix where several are; set it inside mix")
            if len({source.weight is None for source in self.mix.values()}) > 1:
                raise rule_error("mix", "has sources with and without a weight; give all of them one, or none")
        return self


class DataConfig(Section):
    """What is trained on, and what is evaluated on. `data=FOLDER` is short for its train and val splits."""

    train: SourceConfig
    """Training data."""
    eval: SourceConfig | None = None
    """Validation data; none means no evaluation."""
    prefetch_batches: int = Field(4, ge=1)
    """Global batches prepared ahead of use by a thread."""
