"""Which process writes what: each what it holds, and of what several hold alike the one with the least to write.

A plan depends on the layout alone, so it is made once, not at every save. The processes talk about it in JSON, not in
pickles as torch's own planner would have it, whose import takes half a second besides.
"""

import json
import math
from dataclasses import dataclass

import msgspec
from torch import Tensor

from ingot.checkpoint.coordinator import Coordinator
from ingot.checkpoint.manifest import ITEM_BYTES, Entry
from ingot.checkpoint.safetensors_file import DTYPE_NAMES
from ingot.parallel.dtensor import is_spread, local, local_offsets

Tensors = dict[str, dict[str, Tensor]]  # by kind of file and name
Piece = tuple[str, str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""What a process holds of a tensor: kind of file, name, type, the whole's shape, where in it this begins, its shape."""


@dataclass(frozen=True)
class SavePlan:
    """What this process writes, and, on the first, where everything is."""

    own: list[tuple[str, str]]
    """Kind of file and name of the tensors of which this process writes its chunk."""
    parts: int
    entries: dict[str, dict[str, Entry]]


def plan_save(tensors: Tensors, ranks: Coordinator, full: bool) -> SavePlan:
    """Divide a state among the processes; with `full`, the first has it whole and writes it all."""
    if full:
        ranks = Coordinator()
    pieces: list[Piece] = []
    for section, content in tensors.items():
        for name, tensor in content.items():
            part = local(tensor)
            if part.numel() or not is_spread(tensor):
                place = (tuple(tensor.shape), tuple(local_offsets(tensor)), tuple(part.shape))
                pieces.append((section, name, DTYPE_NAMES[tensor.dtype], *place))
    entries: dict[str, dict[str, Entry]] = {section: {} for section in tensors}

    def decide(said: list[str]) -> list[str]:
        return _assign([msgspec.json.decode(text, type=list[Piece]) for text in said], entries)

    answer = ranks.ask(msgspec.json.encode(pieces).decode(), decide)
    return SavePlan(msgspec.json.decode(answer, type=list[tuple[str, str]]), ranks.count, entries)


def _assign(found: list[list[Piece]], entries: dict[str, dict[str, Entry]]) -> list[str]:
    """What each process shall write of what each has; fills `entries` with where everything will be."""
    holders: dict[Piece, list[int]] = {}
    for rank, pieces in enumerate(found):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)
    load, writers = [0] * len(found), {}
    for piece, ranks in holders.items():
        writers[piece] = min(ranks, key=load.__getitem__)
        load[writers[piece]] += ITEM_BYTES[piece[2]] * math.prod(piece[3])
    for rank, pieces in enumerate(found):
        pieces[:] = [piece for piece in pieces if writers[piece] == rank]
        for section, name, dtype, shape, offsets, sizes in pieces:
            entry = entries.setdefault(section, {}).setdefault(name, Entry(dtype, shape, []))
            entry.chunks.append((rank, offsets, sizes))
    return [json.dumps([piece[:2] for piece in pieces]) for pieces in found]
