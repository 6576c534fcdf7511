"""Where tokens come from."""

from typing import Literal

from pydantic import Field

from ingot.config.schema import Section


class SourceConfig(Section):
    """One data set."""

    path: str = Field(min_length=1)
    """Folder of a prepared data set, with or without its splits below it."""
    split: str | None = None
    """Sub-folder of path to read, such as train or val."""
    shuffle: bool = True
    """Draw samples in a random order that is a pure function of the seed; off reads them as they stand."""
    shuffle_seed: int | None = None
    """Seed of the order. Default: the run's seed."""
    token_encoding_type: Literal["int64", "int32", "int16", "uint16", "uint32", "uint8"] = "int64"
    """Type of the tokens in MDS columns of encoding `bytes`, which do not say it themselves."""


class DataConfig(Section):
    """What is trained on, and what is evaluated on. `data=FOLDER` is short for its train and val splits."""

    train: SourceConfig
    """Training data."""
    eval: SourceConfig | None = None
    """Validation data; none means no evaluation."""
    prefetch_batches: int = Field(4, ge=1)
    """Global batches prepared ahead of use by a thread."""
