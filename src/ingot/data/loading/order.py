"""The order of samples as a pure function of (seed, epoch, position).

`rng.permutation(n)` per epoch takes 4 GB and a minute for 500 million samples, on every rank, and again at every
resume. Here a sample id is computed from its position alone.

    samples   0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 17      blocks of 4 (in practice: about a shard)
    blocks    permuted:   2  0 | 3  1  tail                            windows of 2 blocks, the tail joins the last
    samples   permuted within each window

Blocks keep the samples of a window in few shards, so remote shards are fetched in the order of use, once per epoch.
Both permutations are Feistel networks over Z_a x Z_b with a*b slightly above n (Black and Rogaway, 2002); the rare
values beyond n are permuted again until they fall inside.
"""

import math

import numpy as np

BLOCK_SAMPLES = 4096
WINDOW_SAMPLES = 131_072  # samples shuffled together, where blocks are smaller than that
ROUNDS = 6
U64 = np.uint64


class Order:
    """Maps positions to samples. Epoch e is positions e*n to (e+1)*n, each sample once."""

    def __init__(
        self, n: int, seed: int, shuffle: bool = True, block: int = BLOCK_SAMPLES, window_blocks: int | None = None
    ):
        if n < 1 or block < 1 or (window_blocks is not None and window_blocks < 1):
            raise ValueError("an order needs at least one sample, one sample per block and one block per window")
        self.n, self.seed, self.shuffle, self.block = n, seed, shuffle, block
        self.blocks = n // block  # complete ones; the rest is the tail
        self.window_blocks = window_blocks or max(1, math.ceil(WINDOW_SAMPLES / block))
        self.windows = max(1, self.blocks // self.window_blocks)  # evenly sized, each at least window_blocks

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Positions of any shape -> sample ids of the same shape, int64."""
        positions = np.asarray(positions, np.int64)
        epoch, index = np.divmod(positions, self.n)
        if not self.shuffle:
            return index
        window = self._window_of(index)
        first, size = self._window_span(window)  # first block, samples
        key = self._key(epoch)
        window_key = mix(key + window.astype(U64) + U64(1))
        inside = permute(index - first * self.block, size, window_key)
        slot, offset = np.divmod(inside, self.block)
        return self._block_at(first + slot, key) * self.block + offset

    def window_at(self, position: int) -> tuple[list[tuple[int, int]], int]:
        """The sample ids (first, last + 1) of each block in the window of a position, and the position where the window
        ends: what to fetch ahead."""
        epoch, index = divmod(position, self.n)
        first, size = (int(x[0]) for x in self._window_span(self._window_of(np.array([index]))))
        blocks = np.arange(first, first + math.ceil(size / self.block), dtype=np.int64)
        if self.shuffle:
            blocks = self._block_at(blocks, self._key(np.array([epoch])))
        spans = [(b * self.block, min((b + 1) * self.block, self.n)) for b in blocks.tolist()]
        return spans, epoch * self.n + first * self.block + size

    def _key(self, epoch: np.ndarray) -> np.ndarray:
        return mix(mix(np.array(self.seed, np.int64).astype(U64)) + epoch.astype(U64))

    def _block_at(self, slot: np.ndarray, key: np.ndarray) -> np.ndarray:
        """The block at each slot of the permuted sequence; the tail stays last."""
        if self.blocks == 0:
            return slot
        whole = np.minimum(slot, self.blocks - 1)
        return np.where(slot < self.blocks, permute(whole, np.array(self.blocks), mix(key)), self.blocks)

    def _window_of(self, index: np.ndarray) -> np.ndarray:
        if self.blocks == 0:
            return np.zeros_like(index)
        block = np.minimum(index // self.block, self.blocks - 1)
        return ((block + 1) * self.windows - 1) // self.blocks

    def _window_span(self, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first = window * self.blocks // self.windows
        end = (window + 1) * self.blocks // self.windows
        tail = np.where(window == self.windows - 1, self.n - self.blocks * self.block, 0)
        return first, (end - first) * self.block + tail


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which every input bit affects every output bit (splitmix64's finalizer)."""
    x = np.atleast_1d(x) + U64(0x9E3779B97F4A7C15)  # an array: numpy warns when a scalar overflows
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def permute(x: np.ndarray, n: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The image of each x in [0, n) under the permutation of [0, n) selected by its key."""
    shape = np.shape(x)
    x, n = np.ravel(x).astype(U64), np.ravel(np.broadcast_to(n, shape)).astype(U64)
    key = np.broadcast_to(np.ravel(key), x.shape)
    a = np.ceil(np.sqrt(n.astype(np.float64))).astype(U64)
    b = (n + a - U64(1)) // a  # a*b >= n > a*b - a: a value is outside with probability 1/sqrt(n)
    y = _feistel(x, a, b, key)
    outside = np.flatnonzero(y >= n)
    while outside.size:
        y[outside] = _feistel(y[outside], a[outside], b[outside], key[outside])
        outside = outside[y[outside] >= n[outside]]
    return y.astype(np.int64).reshape(shape)


def _feistel(x: np.ndarray, a: np.ndarray, b: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A permutation of [0, a*b): the two digits of x are shifted in turn by a hash of the other."""
    left, right = np.divmod(x, b)
    for r in range(ROUNDS):
        key = key + U64(0xD1342543DE82EF95)
        if r % 2:
            left = _shift(left, right, a, key)
        else:
            right = _shift(right, left, b, key)
    return left * b + right


def _shift(digit: np.ndarray, other: np.ndarray, base: np.ndarray, key: np.ndarray) -> np.ndarray:
    hashed = mix(other ^ key) >> U64(32)
    moved = digit + ((hashed * base) >> U64(32))  # base < 2**32, so the product scales the hash to [0, base)
    return moved - base * (moved >= base)
