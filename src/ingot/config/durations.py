"""Durations as strings: `4800ba`, `2.5Btok`, `1ep`, `10000sp`, `0.1dur`, `30min`.

A duration is a number, an optional multiplier (K, M, B, T for thousand to trillion) and a unit. Inside a run every
unit but wall-clock time is a fixed number of batches, so `BatchClock` converts it once, and the training loop only
counts batches.
"""

import math
import re
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

# batches (optimizer steps), epochs, samples (sequences), tokens, fraction of max_duration, wall-clock time
UNITS = ("ba", "ep", "sp", "tok", "dur", "sec", "min", "h")
SECONDS = {"sec": 1.0, "min": 60.0, "h": 3600.0}
MULTIPLIERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
LONGEST = 1e18  # of any unit: batches are counted in 64 bits
PATTERN = rf"([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([KMBT]?)({'|'.join(UNITS)})"


class WrittenAsText(ABC):
    """A value of a config that is written as one string, which `str` returns."""

    @classmethod
    @abstractmethod
    def parse(cls, text: Any) -> Self:
        """The value that a text stands for; ValueError if there is none."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


@dataclass(frozen=True)
class Duration(WrittenAsText):
    """A value and its unit."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: Any) -> Self:
        if isinstance(text, cls):
            return text
        match = re.fullmatch(PATTERN, str(text).strip())
        if match is None:
            problem, examples = "is not a duration", "4800ba, 1ep, 2.5Btok"
            with suppress(ValueError):
                float(str(text))
                problem, examples = "has no unit", ", ".join(f"{text}{u}" for u in ("ba", "ep", "tok"))
            raise ValueError(f"{text!r} {problem}; write for example {examples} (units: {', '.join(UNITS)})")
        number, multiplier, unit = match.groups()
        value = float(number.replace("_", "")) * MULTIPLIERS[multiplier]
        if value > LONGEST:
            raise ValueError(f"{text!r} is too long; the longest duration is {LONGEST:g}{unit}")
        return cls(value, unit)

    @property
    def is_wall_clock(self) -> bool:
        return self.unit in SECONDS

    @property
    def seconds(self) -> float:
        return self.value * SECONDS[self.unit]

    def __str__(self) -> str:
        return f"{self.value:.15g}{self.unit}"

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict:
        return {
            "type": "string",
            "pattern": f"^{PATTERN}$",
            "examples": ["4800ba", "1ep", "2.5Btok", "0.1dur", "30min"],
        }


@dataclass(frozen=True)
class StepRange(WrittenAsText):
    """Consecutive steps, written as `10-13`, or as `10` for one."""

    first: int
    last: int

    MOST = 20
    PATTERN = r"([0-9]{1,18})(?:-([0-9]{1,18}))?"

    @classmethod
    def parse(cls, text: Any) -> Self:
        if isinstance(text, cls):
            return text
        match = re.fullmatch(cls.PATTERN, str(text).strip())
        if match is None:
            raise ValueError(f"{text!r} is not a range of steps; write for example 10-13")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last:
            raise ValueError(f"{text!r} is not a range of steps: the first step is 1, and the range must not be empty")
        if last - first >= cls.MOST:
            raise ValueError(
                f"{text!r} has {last - first + 1:,} steps; use at most {cls.MOST}, so that a trace stays small"
            )
        return cls(first, last)

    def numbers(self) -> range:
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict:
        return {"type": ["string", "integer"], "pattern": f"^{cls.PATTERN}$", "examples": ["10-13"]}


@dataclass(frozen=True)
class BatchClock:
    """Converts durations to batches, for a run with known batch and dataset sizes."""

    batch_samples: int
    sample_tokens: int
    epoch_samples: int
    max_duration: Duration

    def batches(self, duration: Duration) -> float:
        """The number of batches in a duration, which may be a fraction."""
        in_a_batch = {"ba": 1, "sp": self.batch_samples, "tok": self.batch_samples * self.sample_tokens}
        if duration.unit in in_a_batch:
            return duration.value / in_a_batch[duration.unit]
        if duration.unit == "ep":
            return duration.value * self.epoch_samples / self.batch_samples
        if duration.unit == "dur":
            return duration.value * self.batches(self.max_duration)
        raise ValueError(f"{duration} is wall-clock time and has no fixed number of batches")

    @property
    def total_batches(self) -> int:
        return math.ceil(self.batches(self.max_duration) - 1e-9)

    def interval(self, duration: Duration) -> int:
        """The number of batches between two events; 0 for never."""
        return max(1, round(self.batches(duration))) if duration.value > 0 else 0

    def events_after(self, interval: Duration, batch: int) -> int:
        """How many events follow a batch: at multiples of an interval (none for 0), and after the last batch."""
        every, total = self.interval(interval), self.total_batches
        regular = total // every - batch // every if every else 0
        return regular + (batch < total and not (every and total % every == 0))
