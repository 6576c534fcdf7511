"""Which process writes what: DCP's planner cuts and deduplicates, and its plan travels as JSON, not as pickles.

A plan depends on the layout alone, so it is made once, not at every save. One process writes everything and needs no
planner (whose import takes half a second).
"""

import json
import math
from dataclasses import dataclass

from torch import Tensor

from ingot.checkpoint.manifest import Entry
from ingot.checkpoint.ranks import Ranks
from ingot.checkpoint.shard import DTYPE_NAMES, DTYPES

Tensors = dict[str, dict[str, Tensor]]
"""By kind of file and name."""


@dataclass(frozen=True)
class Plan:
    """What this process writes, and, on the first, where everything is."""

    own: list[tuple[str, str]]
    """Kind of file and name of the tensors of which this process writes its chunk."""
    parts: int
    entries: dict[str, dict[str, Entry]]


def plan_save(tensors: Tensors, ranks: Ranks, full: bool) -> Plan:
    """Divide a state among the processes; with `full`, the first has it whole and writes it all."""
    if ranks.count == 1 or full:
        own = [(section, name) for section, content in tensors.items() for name in content]
        return Plan(own, 1, {kind: {n: _whole(t) for n, t in content.items()} for kind, content in tensors.items()})
    from torch.distributed.checkpoint import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    flat = {f"{section}/{name}": tensor for section, content in tensors.items() for name, tensor in content.items()}
    planner.set_up_planner(flat, is_coordinator=ranks.first)
    found = []
    for item in planner.create_local_plan().items:
        data, tensor = item.tensor_data, flat[item.index.fqn]
        assert data is not None
        if math.prod(data.chunk.sizes):
            chunk = (list(data.chunk.offsets), list(data.chunk.sizes))
            found.append((item.index.fqn, DTYPE_NAMES[tensor.dtype], list(tensor.shape), *chunk))
    entries: dict[str, dict[str, Entry]] = {}
    answer = ranks.ask(json.dumps(found), lambda said: _assign([json.loads(text) for text in said], entries))
    own = [(section, name) for section, name in json.loads(answer)]
    return Plan(own, ranks.count, entries)


def _assign(found: list[list], entries: dict[str, dict[str, Entry]]) -> list[str]:
    """What each process shall write of what each has; fills `entries` with where everything will be."""
    from torch import Size
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    plans = []
    for items in found:
        plans.append(SavePlan([
            WriteItem(
                MetadataIndex(name, Size(offsets)), WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(Size(offsets), Size(sizes)), TensorProperties(DTYPES[dtype]), Size(shape)
                ),
            )
            for name, dtype, shape, offsets, sizes in items
        ]))  # fmt: skip
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    divided, _ = planner.create_global_plan(plans)
    answers = []
    for part, plan in enumerate(divided):
        own = []
        for item in plan.items:
            section, _, name = item.index.fqn.partition("/")
            data = item.tensor_data
            assert data is not None
            chunk = (part, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            entry = Entry(DTYPE_NAMES[data.properties.dtype], tuple(data.size), [])
            entries.setdefault(section, {}).setdefault(name, entry).chunks.append(chunk)
            own.append((section, name))
        answers.append(json.dumps(own))
    return answers


def _whole(tensor: Tensor) -> Entry:
    shape = tuple(tensor.shape)
    return Entry(DTYPE_NAMES[tensor.dtype], shape, [(0, (0,) * len(shape), shape)])
