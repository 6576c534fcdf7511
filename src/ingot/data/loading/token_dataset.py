"""A data set: one long sequence of tokens, cut into windows when training starts.

Window i is tokens[i*S : i*S + S + 1]: the first S are the input, the last S the labels, so neighbours share one token
and every token but the very first is predicted once. The sequence length is thus not baked into the files: samples
stored in any length are split or joined. The last window may be short: its rest is token 0, with labels IGNORE.
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

from ingot.data.formats.indexed_reader import IndexFile
from ingot.data.loading.order import Order
from ingot.errors import DataError

IGNORE = -100  # the label of a position without a next token
OPEN_SHARDS = 256  # memory maps kept open; each holds a file descriptor
MAX_BLOCK_SAMPLES = 1 << 16


class Shard(Protocol):
    """Tokens in one file."""

    tokens: int

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy the tokens from `start` on into all of `out`."""


@dataclass(frozen=True)
class Meta:
    """What `prepare` left in meta.json; all unknown for data of other tools."""

    bytes: int | None = None
    max_token: int | None = None
    eos_id: int | None = None
    shard_tokens: dict[str, int] = field(default_factory=dict)  # by file


class Dataset(Protocol):
    """Samples by number: what a loader reads from."""

    samples: int  # windows of seq_len tokens; the last may be short
    tokens: int
    seq_len: int
    tokenizer_folder: Path | None  # that of the tokenizer which made the data, where it came along
    bytes_per_token: float | None  # of text, where known

    def describe(self) -> str:
        """One line for the console."""

    def fingerprint(self) -> str:
        """A short hash of what the data is and how it is cut, the same on every machine."""

    def state(self, position: int | None = None) -> dict[str, Any]:
        """What a checkpoint at a position keeps of it, as plain values."""

    def resume(self, state: dict[str, Any], position: int) -> None:
        """Continue at a position of the run that kept this state; refuses to if the data is not the same."""

    def taken(self, position: int) -> dict[str, int]:
        """Samples taken from each of several sources before a position; of one source, nothing is to be said."""

    def order(self, seed: int, shuffle: bool) -> Order:
        """The order of its samples."""

    def announce(self, order: Order, position: int) -> None:
        """Say where reading stands, so that shards from elsewhere are fetched before they are needed."""

    def gather(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples by id [n] -> tokens and labels, int64 [n, S] each."""

    def document_starts(self, ids: np.ndarray) -> np.ndarray:
        """Where documents begin in the inputs of samples [n] -> bool [n, S]; each first position counts as one."""


@dataclass(eq=False, repr=False)
class TokenDataset(Dataset):
    """Windows of `seq_len` tokens over shards that are opened when first read."""

    kind: str
    where: str
    names: Sequence[str]  # of the shards
    shard_tokens: InitVar[Sequence[int]]
    open_shard: Callable[[int], Shard]
    seq_len: int
    vocab_size: int | None
    _: KW_ONLY
    dtype: np.dtype  # of the tokens in all shards, or one that holds them
    identity: Any  # what distinguishes this data from other data
    block_tokens: int  # about the tokens of a shard
    meta: Meta
    tokenizer_folder: Path | None = None
    index: IndexFile | None = None
    fetch_ahead: Callable[[list[int], list[int]], None] | None = None  # shards needed now and soon
    span: InitVar[tuple[int, int] | None] = None  # the tokens that belong to the data, where not all of the shards' do
    unscored: int | None = None  # what follows this token is not to be predicted

    def __post_init__(self, shard_tokens: Sequence[int], span: tuple[int, int] | None) -> None:
        stored = int(sum(shard_tokens))
        self._begin, self._end = span or (0, stored)
        self.tokens = self._end - self._begin
        if self.tokens < 2:
            raise DataError(
                f"{self.where} is empty: {self.tokens} tokens, and training needs at least 2; prepare it again"
            )
        self.samples = -(-(self.tokens - 1) // self.seq_len)
        self.bytes_per_token = self.meta.bytes / stored if self.meta.bytes else None
        self._first = np.concatenate([[0], np.cumsum(np.asarray(shard_tokens, np.int64))]).tolist()  # token of shard
        self._open: dict[int, Shard] = {}  # in the order of opening
        self._lock = threading.Lock()
        self._unsigned = np.dtype(f"u{self.dtype.itemsize}")
        self._announced = range(0)
        highest, size = self.meta.max_token, self.vocab_size
        if highest is not None and size is not None and highest >= size:
            raise DataError(
                f"{self.where} holds token ids up to {highest}, beyond the model's vocabulary of {size}; set "
                f"model.vocab_size to at least {highest + 1} or prepare it with the model's tokenizer"
            )

    def describe(self) -> str:
        shards = f"{len(self.names):,} shard{'s' * (len(self.names) != 1)}"
        return (
            f"{self.kind} {self.where}: {self.tokens:,} tokens in {shards}, {self.samples:,} samples of {self.seq_len}"
        )

    def fingerprint(self) -> str:
        text = json.dumps([self.kind, self.seq_len, self.identity], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def state(self, position: int | None = None) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint()}

    def resume(self, state: dict[str, Any], position: int) -> None:
        if state != self.state():
            raise DataError(f"the training data {self.where} is not what the checkpoint was trained on; put it back")

    def taken(self, position: int) -> dict[str, int]:
        return {}

    def order(self, seed: int, shuffle: bool) -> Order:
        # In blocks of about a shard.
        block = min(max(1, self.block_tokens // self.seq_len), MAX_BLOCK_SAMPLES)
        return Order(self.samples, seed, shuffle, block)

    def announce(self, order: Order, position: int) -> None:
        if self.fetch_ahead is None or position in self._announced:
            return
        spans, end = order.window_at(position)
        self._announced = range(position, end)
        now, soon = self._shards_of(spans), self._shards_of(order.window_at(end)[0])
        with self._lock:  # a map of an evicted file would still occupy the disk
            for number in set(self._open) - set(now) - set(soon):
                del self._open[number]
        self.fetch_ahead(now, [number for number in soon if number not in now])

    def _shards_of(self, spans: list[tuple[int, int]]) -> list[int]:
        """The shards that hold the samples [first, end) of each span, each once, in the order of the spans."""
        numbers: dict[int, None] = {}
        for first, end in spans:
            # a window ends with the first token of the next
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
        if self.vocab_size is not None and n and int(rows.view(self._unsigned).max()) >= self.vocab_size:
            self._refuse_token(ids, rows)
        tokens, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        for k, count in short:
            labels[k, count - 1 :] = IGNORE
        if self.unscored is not None:
            labels[tokens == self.unscored] = IGNORE
        return tokens, labels

    def document_starts(self, ids: np.ndarray) -> np.ndarray:
        starts = np.zeros((len(ids), self.seq_len), bool)
        starts[:, 0] = True
        if self.index is not None:
            for k, i in enumerate(ids.tolist()):
                first = self._begin + i * self.seq_len
                starts[k, self.index.starts_between(first, min(first + self.seq_len, self._end)) - first] = True
        elif self.meta.eos_id is not None:
            tokens, _ = self.gather(ids)
            starts[:, 1:] |= tokens[:, :-1] == self.meta.eos_id
        else:
            raise DataError(f"{self.where} does not say where documents end: its meta.json has no eos_id")
        return starts

    def _read_across(self, start: int, number: int, out: np.ndarray) -> int:
        """Copy tokens from a global position on, through shard `number` and the next; 0 where the data has ended."""
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

    def _shard(self, number: int) -> Shard:
        with self._lock:
            if number not in self._open:
                shard = self.open_shard(number)
                expected = self._first[number + 1] - self._first[number]
                if shard.tokens != expected:
                    raise DataError(
                        f"{self.where}: {self.names[number]} has {shard.tokens:,} tokens where {expected:,} were "
                        "counted before; prepare or copy the data again"
                    )
                self._open[number] = shard
                while len(self._open) > OPEN_SHARDS:  # the one opened longest ago; opening it again is cheap
                    del self._open[next(iter(self._open))]
            return self._open[number]

    def _refuse_token(self, ids: np.ndarray, rows: np.ndarray) -> None:
        k, column = np.argwhere((rows < 0) | (rows >= self.vocab_size))[0]
        place = self._begin + int(ids[k]) * self.seq_len + int(column)
        name = self.names[bisect_right(self._first, place) - 1]
        raise DataError(
            f"{self.where}: sample {ids[k]} holds token id {rows[k, column]} (in {name}), outside the model's "
            f"vocabulary of {self.vocab_size}; prepare the data with the model's tokenizer or set model.vocab_size"
        )
