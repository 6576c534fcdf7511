"""Dropout whose masks depend on what is dropped, not on who drops it or when.

torch draws masks from a generator whose state moves with every call, so another microbatch size, layout or restart
draws other masks. Here a mask is a hash of a counter, as in JAX: a key is a 64-bit number, `fold_in` makes a new key
from a key and an index, and the path from the run's seed to an element names everything that the mask may depend on.

    run's seed, step  -->  row of the global batch  -->  site in the model  -->  token           -->  feature
                                                                            -->  head  -->  query -->  key token

Nothing in it is a rank, a microbatch or a call. A rank that holds a part of the features, heads or tokens folds in
their global indices and computes its part of the one mask; a block that is recomputed computes the same mask again.

The first folds are SplitMix64's finalizer: as good as a random number, and cheap because there are few rows. The last
step runs for each element, so it is as short as passes the tests: two multiplications in 32 bits, which start from one
half of the row's key and take in the other half midway. The compiler fuses it into the addition that follows.
Integers wrap around, the same on a CPU and a GPU.

Sites: 3 layer + 0 for attention weights, + 1 for the output of attention, + 2 for that of the MLP; -1 is the embedding.
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, library

GOLDEN_64, MIX_64 = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of SplitMix64, signed
GOLDEN_32, MIX_32 = -0x61C88647, (0x21F0AAAD, 0x735A2D97)  # of lowbias32 by its author's later search


class BlockKeys(NamedTuple):
    """The keys of one block's masks."""

    attention: Tensor
    """Of attention weights, [B]; heads and queries are folded in where they are known (`attention_keys`)."""
    attn_out: Tensor
    """Of the tokens of attention's output, [B, T]."""
    mlp_out: Tensor
    """Of the tokens of the MLP's output, [B, T]."""


class ModelKeys(NamedTuple):
    """The keys of the masks of one forward pass."""

    embedding: Tensor
    """Of the tokens of the first block's input, [B, T]."""
    blocks: list[BlockKeys]


def fold_in(keys: Tensor, indices: Tensor) -> Tensor:
    """New keys [..., n] from keys [...] and indices [n], all int64."""
    x = keys[..., None] + (indices + 1) * GOLDEN_64
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * MIX_64[0]  # the mask makes the shift a logical one
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * MIX_64[1]
    return x ^ (x >> 31 & (1 << 33) - 1)


def kept(keys: Tensor, columns: Tensor, p: float) -> Tensor:
    """Which elements of rows [...] stay: booleans [..., n], a share of 1 - p of them true. `columns` [n] are int32."""
    low, high = keys.to(torch.int32)[..., None], (keys >> 32).to(torch.int32)[..., None]
    x = columns * GOLDEN_32 + low
    x = (x ^ (x >> 16 & 0xFFFF)) * MIX_32[0]
    x = (x ^ (x >> 15 & 0x1FFFF) ^ high) * MIX_32[1]
    return x >= threshold(p)


def threshold(p: float) -> int:
    """The int32 that a share p of all int32 are below."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def dropout(x: Tensor, keys: Tensor | None, p: float) -> Tensor:
    """x [..., n] with a share p of its elements set to zero, the others divided by 1 - p; keys [...]."""
    if keys is None or p == 0:
        return x
    columns = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    return x * kept(keys, columns, p) * (1 / (1 - p))


def sequence_keys(seed: int, step: int, first: int, count: int, device: torch.device) -> Tensor:
    """The keys [count] of consecutive rows of a step's global batch."""
    digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()
    key = torch.full((), int.from_bytes(digest, "big", signed=True), device=device)
    return fold_in(key, torch.arange(first, first + count, device=device))


def model_keys(sequences: Tensor, layers: range, tokens: Tensor) -> ModelKeys:
    """The keys of all masks of some layers, from those of sequences [B], for tokens [T] by their place in the whole
    sequence."""
    sites, rows = _site_keys(sequences, tokens, 3 * layers.start - 1, 3 * len(layers) + 1)
    blocks = [BlockKeys(sites[i], rows[i + 1], rows[i + 2]) for i in range(1, len(sites), 3)]
    return ModelKeys(rows[0], blocks)


# An operator of its own, or the compiler copies these sums into each kernel and repeats them for every element.
@library.custom_op("ingot::dropout_site_keys", mutates_args=())
def _site_keys(sequences: Tensor, tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The keys of consecutive sites [N, B] and of their tokens [N, B, T]."""
    sites = fold_in(sequences, torch.arange(first, first + count, device=sequences.device)).t().contiguous()
    return sites, fold_in(sites, tokens)


@_site_keys.register_fake
def _(sequences: Tensor, tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    return sequences.new_empty(count, len(sequences)), sequences.new_empty(count, len(sequences), len(tokens))


@library.custom_op("ingot::dropout_attention_keys", mutates_args=())
def attention_keys(keys: Tensor, first_head: int, heads: int, first_query: int, queries: int) -> Tensor:
    """The keys [B, H, T] of rows of attention weights, from those [B] of a block's attention."""
    device = keys.device
    keys = fold_in(keys, torch.arange(first_head, first_head + heads, device=device))
    return fold_in(keys, torch.arange(first_query, first_query + queries, device=device))


@attention_keys.register_fake
def _(keys: Tensor, first_head: int, heads: int, first_query: int, queries: int) -> Tensor:
    return keys.new_empty(len(keys), heads, queries)
