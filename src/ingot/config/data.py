"""The config of the data: where tokens come from."""

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from ingot.config.base import Section, flat_choices, rule_error
from ingot.storage.byte_sizes import parse_bytes
from ingot.storage.names import plain_name

PARTS = ("train", "valid", "test")


class DocumentsConfig(Section):
    """A part of the documents of one PREFIX.bin and PREFIX.idx, split as in Megatron and GPT-NeoX."""

    split: str
    """Shares of training, validation and test documents, in file order, such as 969,30,1."""
    part: Literal["train", "valid", "test"]
    """The part to read."""
    rule: Literal["megatron", "neox"] = "megatron"
    """Whose rounding to use; they differ by at most one document."""

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


class DatasetConfig(Section):
    """Where one dataset is."""

    path: str = ""
    """Folder of a prepared dataset or of its splits, or PREFIX of PREFIX.bin and PREFIX.idx. With remote: the local
    cache."""
    split: str | None = None
    """Subfolder of path (and of remote) to read, such as train or val: one plain name."""
    documents: DocumentsConfig | None = None
    """Read only a part of the documents (.bin and .idx only)."""
    remote: str | None = Field(default=None, min_length=1)
    """Where the data is, if not in path: s3://, gs://, az://, http(s):// or another folder. Shards are prefetched,
    verified, and kept in path. Credentials come from the environment."""
    cache_limit: int | None = Field(default=None, gt=0)
    """Bytes of fetched or unpacked shards to keep in path, such as 100GB; the least recently used are deleted first;
    files that were already there are kept. Default: no limit."""
    token_encoding_type: Literal["int64", "int32", "int16", "uint32", "uint16", "uint8"] = "int64"
    """Type of the tokens in MDS columns of encoding `bytes`, which does not state it."""

    @field_validator("split")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        return value if value is None else plain_name(value)

    @field_validator("cache_limit", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value


class MixedSourceConfig(DatasetConfig):
    """One dataset of a mixture."""

    weight: float | None = Field(default=None, gt=0)
    """Share of the samples, relative to the other sources; set it for all of them or none. Default: the size of the
    dataset."""

    @model_validator(mode="after")
    def _check(self) -> "MixedSourceConfig":
        if not self.path:
            raise rule_error("path", "is missing; name the folder of the dataset")
        return self


class SourceConfig(DatasetConfig):
    """One dataset, or a mixture of several."""

    shuffle: bool = True
    """Draw samples in a random order, a pure function of the seed; false reads them in stored order."""
    shuffle_seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    """Seed of the sample order. Default: the run's seed."""
    mix: dict[str, MixedSourceConfig] = Field(default_factory=dict)
    """Instead of path: several datasets by name, each with its path and weight. A resumed run may add sources and
    change weights; no sample of the others is repeated or skipped."""
    mix_order: Literal["drawn", "greedy"] = "drawn"
    """Which source comes next: drawn at random, in exact shares; or greedy, the source furthest behind its share (the
    first one if several are), as in Megatron and GPT-NeoX."""

    @model_validator(mode="after")
    def _check(self) -> "SourceConfig":
        if not self.path and not self.mix:
            raise rule_error("path", "is missing; name the folder of a prepared dataset")
        if self.mix:
            for key in ("path", "split", "documents", "remote", "cache_limit"):
                if getattr(self, key):
                    raise rule_error(key, "does not apply to a mixture; set it for each source inside mix")
            if len({source.weight is None for source in self.mix.values()}) > 1:
                raise rule_error("mix", "has sources with and without a weight; set it for all of them or none")
        return self


def _kind_of_eval(value: Any) -> str:
    """Whether `data.eval` is one source, or a mapping of labels to sources."""
    labeled = isinstance(value, dict) and bool(value) and not set(value) & set(SourceConfig.model_fields)
    return "of-labels" if labeled and all(isinstance(v, dict | Section) for v in value.values()) else "of-source"


class DataConfig(Section):
    """Training and validation data. `data=FOLDER` is short for its train and val splits."""

    train: SourceConfig
    """Training data."""
    eval: (
        Annotated[
            Annotated[SourceConfig, Tag("of-source")] | Annotated[dict[str, SourceConfig], Tag("of-labels")],
            Discriminator(_kind_of_eval),
        ]
        | None
    ) = Field(default=None, json_schema_extra=flat_choices)
    """Validation data, one source or several by label; without it the run has no validation loss."""
    prefetch_batches: int = Field(default=4, ge=1)
    """Number of global batches that a thread prepares in advance."""

    @field_validator("eval", mode="before")
    @classmethod
    def _one_or_labeled(cls, value: Any) -> Any:
        if isinstance(value, dict):
            known = [key for key in value if key in SourceConfig.model_fields]
            labels = [key for key, part in value.items() if key not in known and isinstance(part, dict)]
            if known and labels:
                raise rule_error(
                    labels[0], f"data.eval is one source, whose {known[0]} is set, or a mapping of labels to sources, "
                    "not both; data.eval=null in front drops the one source",
                )  # fmt: skip
        return value

    @model_validator(mode="after")
    def _check_labels(self) -> "DataConfig":
        for label in self.eval_sources:
            if label and ("/" in label or not label.strip()):
                raise rule_error(
                    "eval", f"the label {label!r} must be a name without slashes: it is part of metrics' names"
                )
        return self

    @property
    def eval_sources(self) -> dict[str, SourceConfig]:
        """The validation sets by label; a single one has an empty label."""
        if self.eval is None:
            return {}
        return {"": self.eval} if isinstance(self.eval, SourceConfig) else self.eval
