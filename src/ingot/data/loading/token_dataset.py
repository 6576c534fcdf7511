"""A dataset: one long sequence of tokens, cut into samples of `seq_len` when training starts.

Sample i is tokens[i*S : i*S + S + 1]: the first S are the input, the last S the labels. Neighbors share one token, and
every token but the very first is predicted once. The sequence length is not baked into the files: stored samples of
any length are split or joined. The last sample may be short; it is filled up with token 0 and labels IGNORE.
"""

import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ingot.data.loading.order import Order
from ingot.errors import DataError
from ingot.plurals import count_of

IGNORE = -100  # the label of a position without a next token
OPEN_SHARDS = 256  # memory maps kept open; each holds a file descriptor
MAX_BLOCK_SAMPLES = 1 << 16


class TokenShard(Protocol):
    """The tokens of one file."""

    tokens: int

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens from `start` on."""


@dataclass(frozen=True)
class Meta:
    """What `prepare` wrote to meta.json; unknown for data from other tools."""

    bytes: int | None = None
    max_token: int | None = None
    shard_tokens: dict[str, int] = field(default_factory=dict)  # by file


@dataclass(frozen=True)
class SampleSpec:
    """How tokens become samples."""

    seq_len: int
    vocab_size: int | None = None  # a token id beyond it is an error
    no_loss_after_token: int | None = None  # the position after this token has no label


class Dataset(Protocol):
    """Samples by id: what a loader reads from."""

    samples: int
    tokens: int
    seq_len: int
    tokenizer_folder: Path | None  # the tokenizer that made the data, if it is stored with it
    bytes_per_token: float | None  # bytes of text, if known
    padding_share: float  # of the positions of an epoch: the last sample may be short

    def describe(self) -> str:
        """One line for the console."""

    def fingerprint(self) -> str:
        """A short hash of the data and the sequence length, the same on every machine."""

    def state(self, position: int | None = None) -> dict[str, Any]:
        """What a checkpoint at a position stores, as plain values."""

    def resume(self, state: dict[str, Any], position: int) -> None:
        """Continue the run that saved this state at a position; an error if the data has changed."""

    def taken(self, position: int) -> dict[str, int]:
        """Samples taken from each source of a mixture before a position; empty for a single dataset."""

    def order(self, seed: int, shuffle: bool) -> Order:
        """The order in which training reads the samples."""

    def announce(self, order: Order, position: int) -> None:
        """Tell the reading position, so that remote shards are fetched before they are needed."""

    def gather(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples by id [n] -> tokens and labels, int64 [n, S] each."""


@dataclass(eq=False, repr=False)
class TokenDataset(Dataset):
    """Samples of `seq_len` tokens from shards that are opened on first use."""

    kind: str
    where: str
    names: Sequence[str]  # of the shards
    shard_tokens: InitVar[Sequence[int]]
    open_shard: Callable[[int], TokenShard]
    spec: SampleSpec
    _: KW_ONLY
    dtype: np.dtype  # holds the tokens of all shards
    identity: Any  # what tells this data from other data
    block_tokens: int  # about as many as a shard has
    meta: Meta
    tokenizer_folder: Path | None = None
    fetch_ahead: Callable[[list[int], list[int]], None] | None = None  # shards needed now and soon
    span: InitVar[tuple[int, int] | None] = None  # first token and end, if the shards hold more than this dataset

    def __post_init__(self, shard_tokens: Sequence[int], span: tuple[int, int] | None) -> None:
        self.seq_len = self.spec.seq_len
        stored = int(sum(shard_tokens))
        self._begin, self._end = span or (0, stored)
        self.tokens = self._end - self._begin
        if self.tokens < 2:
            raise DataError(
                f"{self.where} is empty: {self.tokens} tokens, and training needs at least 2; prepare it again"
            )
        self.samples = -(-(self.tokens - 1) // self.seq_len)
        self.padding_share = 1 - (self.tokens - 1) / (self.samples * self.seq_len)
        self.bytes_per_token = self.meta.bytes / stored if self.meta.bytes else None
        self._first = np.concatenate([[0], np.cumsum(np.asarray(shard_tokens, np.int64))]).tolist()  # token of shard
        self._open: dict[int, TokenShard] = {}  # in the order of opening
        self._lock = threading.Lock()
        self._unsigned = np.dtype(f"u{self.dtype.itemsize}")
        self._announced = range(0)
        check_vocabulary(self.where, self.meta.max_token, self.spec.vocab_size)

    def describe(self) -> str:
        shards, samples = count_of(len(self.names), "shard"), count_of(self.samples, "sample")
        return f"{self.kind} {self.where}: {self.tokens:,} tokens in {shards}, {samples} of {self.seq_len}"

    def fingerprint(self) -> str:
        text = json.dumps([self.kind, self.seq_len, self.identity], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def state(self, position: int | None = None) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint()}

    def resume(self, state: dict[str, Any], position: int) -> None:
        if state != self.state():
            raise DataError(f"the training data {self.where} has changed since the checkpoint; restore it")

    def taken(self, position: int) -> dict[str, int]:
        return {}

    def order(self, seed: int, shuffle: bool) -> Order:
        block = min(max(1, self.block_tokens // self.seq_len), MAX_BLOCK_SAMPLES)  # about a shard
        return Order(self.samples, seed, shuffle, block)

    def announce(self, order: Order, position: int) -> None:
        if self.fetch_ahead is None or position in self._announced:
            return
        spans, end = order.window_at(position)
        self._announced = range(position, end)
        now, soon = self._shards_of(spans), self._shards_of(order.window_at(end)[0])
        with self._lock:  # an evicted file that is still mapped keeps occupying the disk
            for number in set(self._open) - set(now) - set(soon):
                del self._open[number]
        self.fetch_ahead(now, [number for number in soon if number not in now])

    def _shards_of(self, spans: list[tuple[int, int]]) -> list[int]:
        """The shards that hold the samples [first, end) of each span, without repetition, in the order of the spans."""
        numbers: dict[int, None] = {}
        for first, end in spans:
            # the last label of a sample is the first token of the next one
            last = min(self._begin + end * self.seq_len, self._end - 1)
            begin = bisect_right(self._first, self._begin + first * self.seq_len) - 1
            numbers |= dict.fromkeys(range(begin, bisect_right(self._first, last)))
        return list(numbers)

    def gather(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n, length = len(ids), self.seq_len
        rows = np.empty((n, length + 1), self.dtype)  # [n, S+1]
        short: list[tuple[int, int]] = []
        numbers = ids.tolist()
        if n and not 0 <= min(numbers) <= max(numbers) < self.samples:
            raise IndexError(f"samples {min(numbers)} to {max(numbers)} of {self.samples}")
        first, opened, begin, end = self._first, self._open, self._begin, self._end
        for k, i in enumerate(numbers):
            start = begin + i * length
            number = bisect_right(first, start) - 1
            if start + length < first[number + 1] and start + length < end:
                (opened.get(number) or self._shard(number)).read(start - first[number], rows[k])
            else:
                count = self._read_across(start, number, rows[k])
                if count <= length:
                    short.append((k, count))
        if (size := self.spec.vocab_size) is not None and n and int(rows.view(self._unsigned).max()) >= size:
            self._refuse_token(ids, rows, size)
        tokens, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        for k, count in short:
            labels[k, count - 1 :] = IGNORE
        if self.spec.no_loss_after_token is not None:
            labels[tokens == self.spec.no_loss_after_token] = IGNORE
        return tokens, labels

    def _read_across(self, start: int, number: int, out: np.ndarray) -> int:
        """Copy tokens from a position on, from shard `number` and the ones after it; 0 beyond the end of the data."""
        count = min(len(out), self._end - start)
        done = 0
        while done < count:
            inside = start + done - self._first[number]
            taken = min(self._first[number + 1] - self._first[number] - inside, count - done)
            if taken:
                self._shard(number).read(inside, out[done : done + taken])
            done, number = done + taken, number + 1
        out[count:] = 0
        return count

    def _shard(self, number: int) -> TokenShard:
        with self._lock:
            if number not in self._open:
                shard = self.open_shard(number)
                expected = self._first[number + 1] - self._first[number]
                if shard.tokens != expected:
                    raise DataError(
                        f"{self.where}: {self.names[number]} has {shard.tokens:,} tokens, but {expected:,} "
                        "were expected; prepare or copy the data again"
                    )
                self._open[number] = shard
                while len(self._open) > OPEN_SHARDS:  # close the oldest; reopening is cheap
                    del self._open[next(iter(self._open))]
            return self._open[number]

    def _refuse_token(self, ids: np.ndarray, rows: np.ndarray, vocab_size: int) -> None:
        k, column = np.argwhere((rows < 0) | (rows >= vocab_size))[0]
        position = self._begin + int(ids[k]) * self.seq_len + int(column)
        name = self.names[bisect_right(self._first, position) - 1]
        raise DataError(
            f"{self.where}: sample {ids[k]} holds token id {rows[k, column]} (in {name}), outside the model's "
            f"vocabulary of {vocab_size}; prepare the data with the model's tokenizer or set model.vocab_size"
        )


def check_vocabulary(where: str, highest: int | None, size: int | None) -> None:
    """Refuse data with token ids beyond the model's vocabulary, as far as both are known."""
    if highest is not None and size is not None and highest >= size:
        raise DataError(
            f"{where} holds token ids up to {highest}, beyond the model's vocabulary of {size}; set "
            f"model.vocab_size to at least {highest + 1} or prepare it with the model's tokenizer"
        )
