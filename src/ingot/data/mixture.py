"""Several data sets as one, in given shares, in an order that is again a pure function of the position.

Positions come in blocks of 16,384. A block holds a fixed number of samples of each source, its share, in an order that
a Feistel permutation draws anew for each block; the n-th sample of a source is the n-th of that source's own order,
whatever stands between. Drawing the source of each position at random, the obvious way, would need a replay to know
how far each source has come.

Shares may change when a run continues: a new stage begins at that position, with each source where it then stands.
So no sample of a source is repeated or skipped because another one was added or weighted differently.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ingot.data.order import U64, Order, mix, permute
from ingot.data.windows import Dataset
from ingot.errors import DataError

BLOCK = 1 << 14
ANNOUNCE_EVERY = 1024  # positions
SOURCE_SHIFT = 48  # a mixture's sample id: the source above this bit, the sample within it below


@dataclass(frozen=True)
class Stage:
    """A stretch of a run with the same shares: where it starts, how far each source had come by then."""

    start: int
    shares: dict[str, int]  # samples of each source in a block
    taken: dict[str, int]

    def taken_at(self, position: int) -> dict[str, int]:
        """Samples taken from each source before a position."""
        block, rest = divmod(position - self.start, BLOCK)
        source, _ = self.layout(block)
        part = np.bincount(source[:rest], minlength=len(self.shares)).tolist()
        names = sorted(self.shares)
        return self.taken | {n: self.taken[n] + block * self.shares[n] + part[k] for k, n in enumerate(names)}

    def layout(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each place in a block: its source, by sorted name, and how many of that source stand before it."""
        return _layout(tuple(self.shares[name] for name in sorted(self.shares)), self.start, block)


class Mixture(Dataset):
    """Several data sets that read like one."""

    def __init__(self, datasets: Mapping[str, Dataset], weights: dict[str, float] | None = None):
        self.names = sorted(datasets)  # so that the order does not depend on that in a file
        self._datasets = [datasets[name] for name in self.names]
        self.samples = sum(d.samples for d in self._datasets)
        self.tokens = sum(d.tokens for d in self._datasets)
        self.seq_len = self._datasets[0].seq_len
        self.shares = _shares([weights[n] if weights else datasets[n].samples for n in self.names])
        self.tokenizer_folder = next((d.tokenizer_folder for d in self._datasets if d.tokenizer_folder), None)
        weighted = [(d.bytes_per_token or 0.0) * n / BLOCK for d, n in zip(self._datasets, self.shares, strict=True)]
        self.bytes_per_token = sum(weighted) if all(weighted) else None
        self._announced = range(0)
        self.stage = Stage(0, self._by_name(self.shares), self._by_name([0] * len(self.names)))

    def describe(self) -> str:
        """A line for the console, and one for each source."""
        lines = [f"mixture of {len(self.names)}: {self.tokens:,} tokens, {self.samples:,} samples of {self.seq_len}"]
        for name, share, dataset in zip(self.names, self.shares, self._datasets, strict=True):
            lines.append(f"  {100 * share / BLOCK:5.2f}% {name}: {dataset.describe()}")
        return "\n".join(lines)

    def fingerprint(self) -> str:
        """A short hash of what the sources are; their shares may change within a run."""
        return hashlib.sha256(json.dumps(self._fingerprints()).encode()).hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """The sources, and the stage that the run is in."""
        return {"sources": self._fingerprints(), "stage": asdict(self.stage)}

    def resume(self, state: dict[str, Any], position: int) -> None:
        """Continue at a position. Sources may come and go, and shares that differ begin a new stage."""
        known = self._fingerprints()
        for name, fingerprint in state.get("sources", {"": None}).items():
            if known.get(name, fingerprint) != fingerprint or not name:
                raise DataError(f"the training data {name} is not what the checkpoint was trained on; put it back")
        stage = Stage(**state["stage"])
        shares = self._by_name(self.shares)
        if stage.shares != shares:
            taken = self._by_name([0] * len(self.names)) | stage.taken_at(position)  # one that left may return
            stage = Stage(position, shares, taken)
        self.stage = stage

    def taken(self, position: int) -> dict[str, int]:
        """Samples taken from each source before a position."""
        return self.stage.taken_at(position)

    def _fingerprints(self) -> dict[str, str]:
        return {name: d.fingerprint() for name, d in zip(self.names, self._datasets, strict=True)}

    def order(self, seed: int, shuffle: bool) -> "MixtureOrder":
        """The order of the mixture, over the orders of its sources."""
        # Seeds by name: a source keeps its order when others come, go or change places.
        seeds = [seed ^ int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little") for name in self.names]
        orders = [d.order(s, shuffle) for d, s in zip(self._datasets, seeds, strict=True)]
        return MixtureOrder(self.stage, self.names, orders)

    def announce(self, order: Order, position: int) -> None:
        """Tell each source where reading stands, for fetching ahead."""
        assert isinstance(order, MixtureOrder)
        if position in self._announced:
            return
        self._announced = range(position, position + ANNOUNCE_EVERY)
        taken = self.stage.taken_at(position)
        for name, dataset, source_order in zip(self.names, self._datasets, order.orders, strict=True):
            dataset.announce(source_order, taken[name])

    def gather(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples by id [n] -> tokens and labels, int64 [n, S] each."""
        tokens = np.empty((len(ids), self.seq_len), np.int64)
        labels = np.empty_like(tokens)
        source = ids >> SOURCE_SHIFT
        for k in np.unique(source).tolist():
            here = np.flatnonzero(source == k)
            tokens[here], labels[here] = self._datasets[k].gather(ids[here] & ((1 << SOURCE_SHIFT) - 1))
        return tokens, labels

    def document_starts(self, ids: np.ndarray) -> np.ndarray:
        """Where documents begin -> bool [n, S]; see Dataset."""
        starts = np.empty((len(ids), self.seq_len), bool)
        source = ids >> SOURCE_SHIFT
        for k in np.unique(source).tolist():
            here = np.flatnonzero(source == k)
            starts[here] = self._datasets[k].document_starts(ids[here] & ((1 << SOURCE_SHIFT) - 1))
        return starts

    def _by_name(self, values: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.names, values, strict=True))


class MixtureOrder(Order):
    """Positions to sample ids through the orders of the sources, from the start of a stage on."""

    def __init__(self, stage: Stage, names: list[str], orders: list[Order]):  # has none of its own to set up
        self.stage, self._names, self.orders = stage, names, orders

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Global positions, any shape -> sample ids of the same shape, int64."""
        place = np.ravel(positions).astype(np.int64) - self.stage.start
        if place.size and place.min() < 0:
            raise ValueError(f"positions before {self.stage.start} belong to a stage with other shares")
        block, slot = np.divmod(place, BLOCK)
        source, number = np.empty_like(place), np.empty_like(place)
        for b in np.unique(block).tolist():
            here = block == b
            sources, before = self.stage.layout(b)
            source[here], number[here] = sources[slot[here]], before[slot[here]]
        ids = np.empty_like(place)
        for k, (name, order) in enumerate(zip(self._names, self.orders, strict=True)):
            here = source == k
            turn = self.stage.taken[name] + block[here] * self.stage.shares[name] + number[here]
            ids[here] = order.take(turn) | (k << SOURCE_SHIFT)
        return ids.reshape(np.shape(positions))


@lru_cache(maxsize=8)
def _layout(shares: tuple[int, ...], start: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    key = mix(mix(np.array([start], U64)) + U64(block))
    drawn = permute(np.arange(BLOCK), np.array(BLOCK), key)
    source = np.searchsorted(np.cumsum(shares), drawn, side="right")
    before = np.empty(BLOCK, np.int64)
    for k, share in enumerate(shares):
        before[source == k] = np.arange(share)
    return source, before


def _shares(weights: Sequence[float]) -> list[int]:
    """Whole samples per block in proportion to the weights, at least one each, by largest remainder."""
    exact = np.asarray(weights, np.float64) / np.sum(weights) * BLOCK
    shares = np.maximum(1, np.floor(exact)).astype(np.int64)
    order = np.argsort(shares - exact, kind="stable")
    for i in range(BLOCK - int(shares.sum())):
        shares[order[i % len(order)]] += 1
    shares[np.argmax(shares)] += BLOCK - shares.sum()  # where many tiny weights were lifted to one
    if (shares < 1).any():
        raise DataError(f"a mixture can have at most {BLOCK} sources")
    return shares.tolist()
