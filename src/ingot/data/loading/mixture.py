"""Several datasets as one, in given shares, in an order that is again a pure function of the position.

Positions are grouped in blocks of 16,384. A block holds a fixed number of samples of each source, its share, in an
order given by a different Feistel permutation for each block. The n-th sample of a source in the mixture is the n-th
of the source's own order. Drawing the source of each position at random, the obvious way, would need a replay to know
how many samples of each source were used.

That is the rule `drawn`. Megatron and GPT-NeoX use another, `greedy`: each sample comes from the source that is
furthest behind its share. These counts can only be found by replay, so checkpoints store them.

Shares may change when a run resumes: a new stage then starts at that position and continues every source where it was.
No sample is repeated or skipped because a source was added or its weight changed.
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ingot.data.loading.order import U64, Order, mix, permute
from ingot.data.loading.token_dataset import Dataset
from ingot.errors import DataError

BLOCK = 1 << 14
ANNOUNCE_EVERY = 1024  # positions
SOURCE_SHIFT = 48  # a sample id of a mixture: the source above this bit, its own sample id below


@dataclass(frozen=True)
class MixtureStage:
    """A part of a run with constant shares."""

    start: int
    shares: dict[str, float]  # drawn: samples of each source in a block; greedy: weights that sum to 1
    taken: dict[str, int]  # samples of each source used before the stage
    rule: str = "drawn"
    counted: dict[str, int] = field(default_factory=dict)  # greedy: the counts that the rule started with

    def taken_at(self, position: int) -> dict[str, int]:
        """Samples taken from each source before a position."""
        return self.taken | {name: self.taken[name] + n for name, n in self._since_start(position).items()}

    def at(self, position: int) -> "MixtureStage":
        """The same stage, described so that nothing before the position needs a replay."""
        if self.rule == "drawn":
            return self
        counted = {name: self.counted.get(name, 0) + n for name, n in self._since_start(position).items()}
        return replace(self, start=position, taken=self.taken_at(position), counted=counted)

    def layout(self, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each slot of a block, the index of its source and the number of that source's samples before it in this
        stage; and the samples of each source before the block."""
        counted = tuple(self.counted.get(name, 0) for name in self.shares)
        return _layout(self.rule, tuple(self.shares.values()), self.start, counted, block)

    def _since_start(self, position: int) -> dict[str, int]:
        block, rest = divmod(position - self.start, BLOCK)
        source, _, before = self.layout(block)
        counts = before + np.bincount(source[:rest], minlength=len(before))
        return dict(zip(self.shares, counts.tolist(), strict=True))


class Mixture(Dataset):
    """Several datasets that read like one."""

    def __init__(self, datasets: Mapping[str, Dataset], weights: dict[str, float] | None = None, rule: str = "drawn"):
        # Drawn: independent of the order in the config file. Greedy: the first of equals wins, so the order matters.
        self.names, self.rule = sorted(datasets) if rule == "drawn" else list(datasets), rule
        self._datasets = [datasets[name] for name in self.names]
        self.samples = sum(d.samples for d in self._datasets)
        self.tokens = sum(d.tokens for d in self._datasets)
        self.seq_len = self._datasets[0].seq_len
        # Without weights, Megatron and GPT-NeoX weight by size and count full samples only.
        sizes = {n: d.samples if rule == "drawn" else max(1, (d.tokens - 1) // d.seq_len) for n, d in datasets.items()}
        relative = [(weights or sizes)[n] for n in self.names]
        self.shares: Sequence[float] = _shares(relative) if rule == "drawn" else _normalized(relative)
        self.tokenizer_folder = next((d.tokenizer_folder for d in self._datasets if d.tokenizer_folder), None)
        total = sum(self.shares)
        weighted = [(d.bytes_per_token or 0.0) * n / total for d, n in zip(self._datasets, self.shares, strict=True)]
        self.bytes_per_token = sum(weighted) if all(weighted) else None
        self.padding_share = sum(d.padding_share * n for d, n in zip(self._datasets, self.shares, strict=True)) / total
        self._announced = range(0)
        shares = dict(zip(self.names, self.shares, strict=True))
        self.stage = MixtureStage(0, shares, dict.fromkeys(self.names, 0), rule)

    def describe(self) -> str:
        lines = [f"mixture of {len(self.names)}: {self.tokens:,} tokens, {self.samples:,} samples of {self.seq_len}"]
        for name, share, dataset in zip(self.names, self.shares, self._datasets, strict=True):
            lines.append(f"  {100 * share / sum(self.shares):5.2f}% {name}: {dataset.describe()}")
        return "\n".join(lines)

    def fingerprint(self) -> str:
        """A short hash of the sources; their shares may change within a run."""
        return hashlib.sha256(json.dumps(self._fingerprints()).encode()).hexdigest()[:16]

    def state(self, position: int | None = None) -> dict[str, Any]:
        stage = self.stage if position is None else self.stage.at(position)
        return {"sources": self._fingerprints(), "stage": asdict(stage)}

    def resume(self, state: dict[str, Any], position: int) -> None:
        """Continue at a position. Sources may be added or removed; other shares start a new stage."""
        known = self._fingerprints()
        if "sources" not in state:
            raise DataError("the checkpoint was trained on a single dataset, not on a mixture; restore data.train")
        for name, fingerprint in state["sources"].items():
            if known.get(name, fingerprint) != fingerprint:
                raise DataError(f"the training data {name} has changed since the checkpoint; restore it")
        stage = MixtureStage(**state["stage"])
        shares = dict(zip(self.names, self.shares, strict=True))
        if (stage.shares, stage.rule) == (shares, self.rule):
            self.stage = replace(stage, shares=shares)  # in the order of this config
        else:
            taken = dict.fromkeys(self.names, 0) | stage.taken_at(position)  # a removed source may return
            self.stage = MixtureStage(position, shares, taken, self.rule)

    def taken(self, position: int) -> dict[str, int]:
        return self.stage.taken_at(position)

    def _fingerprints(self) -> dict[str, str]:
        return {name: d.fingerprint() for name, d in zip(self.names, self._datasets, strict=True)}

    def order(self, seed: int, shuffle: bool) -> "MixtureOrder":
        # Seeded by name: a source keeps its order when others are added, removed or reordered.
        seeds = [seed ^ int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little") for name in self.names]
        orders = [d.order(s, shuffle) for d, s in zip(self._datasets, seeds, strict=True)]
        return MixtureOrder(self.stage, self.names, orders)

    def announce(self, order: Order, position: int) -> None:
        assert isinstance(order, MixtureOrder)
        if position in self._announced:
            return
        self._announced = range(position, position + ANNOUNCE_EVERY)
        taken = self.stage.taken_at(position)
        for name, dataset, source_order in zip(self.names, self._datasets, order.orders, strict=True):
            dataset.announce(source_order, taken[name])

    def gather(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.empty((len(ids), self.seq_len), np.int64)
        labels = np.empty_like(tokens)
        source = ids >> SOURCE_SHIFT
        for k in np.unique(source).tolist():
            here = source == k
            tokens[here], labels[here] = self._datasets[k].gather(ids[here] & ((1 << SOURCE_SHIFT) - 1))
        return tokens, labels


class MixtureOrder(Order):
    """Maps positions from the start of a stage on to sample ids, through the orders of the sources."""

    def __init__(self, stage: MixtureStage, names: list[str], orders: list[Order]):  # no super(): nothing to set up
        self.stage, self._names, self.orders = stage, names, orders

    def take(self, positions: np.ndarray) -> np.ndarray:
        offset = np.ravel(positions).astype(np.int64) - self.stage.start
        if offset.size and offset.min() < 0:
            raise ValueError(f"positions before {self.stage.start} belong to a stage with other shares")
        block, slot = np.divmod(offset, BLOCK)
        source, number = np.empty_like(offset), np.empty_like(offset)
        for b in np.unique(block).tolist():
            here = block == b
            sources, numbers, _ = self.stage.layout(b)
            source[here], number[here] = sources[slot[here]], numbers[slot[here]]
        ids = np.empty_like(offset)
        for k, (name, order) in enumerate(zip(self._names, self.orders, strict=True)):
            here = source == k
            ids[here] = order.take(self.stage.taken[name] + number[here]) | (k << SOURCE_SHIFT)
        return ids.reshape(np.shape(positions))


@lru_cache(maxsize=8)
def _layout(
    rule: str, shares: tuple[float, ...], start: int, counted: tuple[int, ...], block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if rule == "greedy":
        source, before = _replay(shares, counted).block(block)
    else:
        key = mix(mix(np.array([start], U64)) + U64(block))
        drawn = permute(np.arange(BLOCK), np.array(BLOCK), key)
        source, before = np.searchsorted(np.cumsum(shares), drawn, side="right"), block * np.array(shares, np.int64)
    number = np.empty(BLOCK, np.int64)
    for k, first in enumerate(before.tolist()):
        slots = np.flatnonzero(source == k)
        number[slots] = np.arange(first, first + len(slots))
    return source, number, before


class _Replay:
    """Replays the greedy rule block by block from given counts: once, about 1 s for a million samples."""

    def __init__(self, weights: tuple[float, ...], counted: tuple[int, ...]):
        self._weights, self._begin = weights, np.array(counted, np.int64)
        self._counts = [list(counted)]  # before each block
        self._lock = threading.Lock()  # the loader reads ahead while the trainer saves its state

    def block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each slot of a block, and the samples of each source before the block."""
        with self._lock:
            while len(self._counts) <= block:
                self._counts.append(self._walk(len(self._counts) - 1)[1])
            sources, after = self._walk(block)
            if len(self._counts) == block + 1:
                self._counts.append(after)
            return sources, np.array(self._counts[block], np.int64) - self._begin

    def _walk(self, block: int) -> tuple[np.ndarray, list[int]]:
        counts = list(self._counts[block])
        first = sum(counts)
        sources = []
        for i in range(first, first + BLOCK):
            at = max(i, 1)
            behind = [weight * at - count for weight, count in zip(self._weights, counts, strict=True)]
            source = behind.index(max(behind))  # the first of equals
            counts[source] += 1
            sources.append(source)
        return np.array(sources, np.int64), counts


_replay = lru_cache(maxsize=4)(_Replay)


def _normalized(weights: Sequence[float]) -> list[float]:
    """Divide by the sum twice, as Megatron and GPT-NeoX do: the last bit decides between equals."""
    exact = np.asarray(weights, np.float64)
    exact = exact / np.sum(exact)
    return (exact / np.sum(exact)).tolist()


def _shares(weights: Sequence[float]) -> list[int]:
    """Samples per block in proportion to the weights, at least one each, by largest remainder."""
    exact = np.asarray(weights, np.float64) / np.sum(weights) * BLOCK
    shares = np.maximum(1, np.floor(exact)).astype(np.int64)
    order = np.argsort(shares - exact, kind="stable")
    for i in range(BLOCK - int(shares.sum())):
        shares[order[i % len(order)]] += 1
    shares[np.argmax(shares)] += BLOCK - shares.sum()  # many tiny weights were rounded up to one
    if (shares < 1).any():
        raise DataError(f"a mixture can have at most {BLOCK} sources")
    return shares.tolist()
