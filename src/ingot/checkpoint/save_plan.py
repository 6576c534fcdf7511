"""Which rank writes what: each rank what it holds; of what several hold, the one with the least to write so far.

A plan depends on the layout alone, so it is made once, not at every save. Ranks exchange JSON, where torch's planner
would exchange pickles.
"""

import json
import math
from dataclasses import dataclass

import msgspec
from torch import Tensor

from ingot.checkpoint.manifest import ITEM_BYTES, Entry
from ingot.checkpoint.safetensors_file import DTYPE_NAMES
from ingot.parallel.coordinator import Coordinator
from ingot.parallel.dtensor import is_sharded, local, local_offsets

Tensors = dict[str, dict[str, Tensor]]  # by kind of file and name


class TensorSlice(msgspec.Struct, frozen=True, array_like=True):
    """The part of a tensor that a rank holds."""

    kind: str
    name: str
    dtype: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class SavePlan:
    """What this rank writes and, on rank 0, where everything is."""

    own: list[tuple[str, str]]
    """Kind of file and name of the tensors of which this rank writes its slice."""
    parts: int
    entries: dict[str, dict[str, Entry]]


def plan_save(tensors: Tensors, coordinator: Coordinator) -> SavePlan:
    """Divide a state among the ranks."""
    slices: list[TensorSlice] = []
    for kind, content in tensors.items():
        for name, tensor in content.items():
            part = local(tensor)
            if part.numel() or not is_sharded(tensor):
                where = tuple(tensor.shape), tuple(local_offsets(tensor)), tuple(part.shape)
                slices.append(TensorSlice(kind, name, DTYPE_NAMES[tensor.dtype], *where))
    entries: dict[str, dict[str, Entry]] = {kind: {} for kind in tensors}

    def decide(texts: list[str]) -> list[str]:
        return _assign([msgspec.json.decode(text, type=list[TensorSlice]) for text in texts], entries)

    answer = coordinator.gather_and_decide(msgspec.json.encode(slices).decode(), decide)
    return SavePlan(msgspec.json.decode(answer, type=list[tuple[str, str]]), coordinator.world_size, entries)


def _assign(held: list[list[TensorSlice]], entries: dict[str, dict[str, Entry]]) -> list[str]:
    """What each rank writes, given what each holds. Fills `entries` with where everything will be."""
    holders: dict[TensorSlice, list[int]] = {}
    for rank, slices in enumerate(held):
        for part in slices:
            holders.setdefault(part, []).append(rank)
    load, own = [0] * len(held), [list[tuple[str, str]]() for _ in held]
    for part, ranks in holders.items():
        writer = min(ranks, key=load.__getitem__)
        load[writer] += part.bytes
        own[writer].append((part.kind, part.name))
        entry = entries.setdefault(part.kind, {}).setdefault(part.name, Entry(part.dtype, part.full_shape, []))
        entry.chunks.append((writer, part.offsets, part.shape))
    return [json.dumps(names) for names in own]
