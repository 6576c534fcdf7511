"""Which rank writes what: each rank what it holds; of what several hold, the ranks with the least to write so far.

Every rank computes the plan of all ranks that hold the same tensors (all ranks, or those of a pipeline stage) from
layout and shapes, without communication. Rank 0 compares the hashes and gets the plan of each stage once, for the
manifest: from each of 8,192 ranks 32 bytes, where lists of all that they hold would be 1.2 GB.
"""

import math
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ingot.checkpoint.manifest import ITEM_BYTES, MODEL, RANK, file_name
from ingot.checkpoint.placement import Axis, Chunk, Entry
from ingot.checkpoint.safetensors_file import DTYPE_NAMES
from ingot.errors import CheckpointError
from ingot.parallel.coordinator import Coordinator
from ingot.parallel.dtensor import local, local_offsets, mesh_cuts

Tensors = dict[str, dict[str, Tensor]]  # by kind of tensor and name
Key = tuple[str, str]
"""Kind and name of a tensor."""
FAILED = "!"  # begins a message about a problem instead of a hash
LEADER, OTHER = "send your plan", "wait"  # where stages differ: the first rank of each, and the rest


@dataclass(frozen=True)
class SavePlan:
    """What this rank writes and, on rank 0, where everything is."""

    files: dict[str, list[Key]]
    """By name of the file, in the order of the file: the tensors of which this rank writes what it holds."""
    parts: int
    entries: dict[str, dict[str, Entry]]


@dataclass(frozen=True)
class HeldTensor:
    """A tensor, and how the ranks that hold it share it."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[Axis, ...] = ()
    """Along all other axes of the mesh, the ranks hold the same."""


class StagePlan(msgspec.Struct, frozen=True):
    """Where the tensors of a stage are: the same on all ranks of the stage."""

    first: int
    end: int
    entries: list[tuple[Key, Entry]]


def plan_save(tensors: Tensors, coordinator: Coordinator, holders: range | None = None) -> SavePlan:
    """Divide a state among the ranks. `holders` are the ranks that hold the same tensors as this one; default: all."""
    rank, world = coordinator.rank, coordinator.world_size
    ranks = holders or range(world)
    held = [describe((kind, name), tensor) for kind, content in tensors.items() for name, tensor in content.items()]
    chosen = choose_writers(held, ranks)
    own, offsets, problem = list[Key](), dict[object, tuple[int, ...]](), ""
    if world > 1 and len({name for _, name in chosen}) < len(chosen):
        problem = "a weight and a tensor of the training state have the same name"
    for item in held:
        kind, name = item.key
        tensor, part = tensors[kind][name], part_of(rank - ranks.start, chosen[item.key])
        here, sharing = local(tensor), (item.shape, item.cuts)
        if sharing not in offsets:  # torch takes a while for it
            offsets[sharing] = tuple(local_offsets(tensor))
        if here.numel() and part[1:] != (offsets[sharing], tuple(here.shape)):
            problem = problem or f"rank {rank} holds another part of {name} than the layout says"
        if part[0] == rank and (here.numel() or not item.cuts):
            own.append(item.key)
    entries = _agree(StagePlan(ranks.start, ranks.stop, list(chosen.items())), problem, coordinator)
    return SavePlan(_files(own, tensors, rank, world), world, entries)


def describe(key: Key, tensor: Tensor) -> HeldTensor:
    """How the ranks share a tensor."""
    cuts = tuple(Axis(*cut) for cut in mesh_cuts(tensor))
    return HeldTensor(key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), cuts)


def choose_writers(held: list[HeldTensor], ranks: range) -> dict[Key, Entry]:
    """Where each tensor will be. Of equal copies of a tensor, held by different ranks, one is written: where the most
    burdened rank has the least to write, the large tensors first."""
    load = np.zeros(len(ranks), dtype=np.int64)
    grid, sizes = cache(_grid), cache(_part_sizes)
    chosen: dict[Key, Entry] = {}
    for item in sorted(held, key=lambda item: -ITEM_BYTES[item.dtype] * math.prod(item.shape)):
        copies = grid(item.cuts, len(ranks))  # [copies, parts]
        added = ITEM_BYTES[item.dtype] * sizes(item.cuts, item.shape)
        copy = int((load[copies] + added).max(axis=1).argmin())
        load[copies[copy]] += added
        chosen[item.key] = Entry(item.dtype, item.shape, ranks.start + int(copies[copy, 0]), item.cuts)
    return {item.key: chosen[item.key] for item in held}


def part_of(place: int, entry: Entry) -> Chunk:
    """The part of a tensor that a rank holds, given its number among those that hold the tensor. The first number is
    that of the rank that writes it."""
    return entry.part_of([place // axis.stride % axis.size for axis in entry.axes])


def _grid(cuts: tuple[Axis, ...], ranks: int) -> NDArray[np.int64]:
    """The numbers of the ranks that hold a tensor, [copies, parts]."""
    numbers, span = np.zeros((1, 1), dtype=np.int64), 1
    for axis in [*sorted(cuts, key=lambda axis: axis.stride), Axis(1, ranks, 0)]:
        if axis.stride % span:
            raise CheckpointError(f"{ranks} ranks do not form a mesh with an axis of stride {axis.stride}")
        missing = np.arange(axis.stride // span, dtype=np.int64) * span  # along an axis that cuts nothing
        numbers = (missing[:, None, None] + numbers).reshape(-1, numbers.shape[1])
        span = axis.stride * axis.size
    for axis in cuts:  # the last one varies fastest, as in _part_sizes
        along = np.arange(axis.size, dtype=np.int64) * axis.stride
        numbers = (numbers[:, :, None] + along).reshape(len(numbers), -1)
    return numbers


def _part_sizes(cuts: tuple[Axis, ...], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Elements of each part of a tensor."""
    lengths = [np.full((1,) * len(cuts), length, dtype=np.int64) for length in shape]
    for number, axis in enumerate(cuts):
        place = np.arange(axis.size).reshape([-1 if n == number else 1 for n in range(len(cuts))])
        each = -(-lengths[axis.dim] // axis.size)
        lengths[axis.dim] = np.clip(lengths[axis.dim] - place * each, 0, each)
    volume = np.ones([axis.size for axis in cuts], dtype=np.int64)
    for length in lengths:
        volume = volume * length
    return volume.reshape(-1)


def _agree(plan: StagePlan, problem: str, coordinator: Coordinator) -> dict[str, dict[str, Entry]]:
    """Compare the plans of all ranks, and return on rank 0 where everything is."""
    hashes: list[str] = []
    entries: dict[str, dict[str, Entry]] = {}
    text = msgspec.json.encode(plan)

    def compare(texts: list[str]) -> list[str]:
        if found := next((text for text in texts if text.startswith(FAILED)), ""):
            raise CheckpointError(found.removeprefix(FAILED))
        hashes[:] = texts
        leaders = {text: rank for rank, text in reversed(list(enumerate(texts)))}
        return [
            "" if len(leaders) == 1 else LEADER if rank in leaders.values() else OTHER for rank in range(len(texts))
        ]

    def merge(texts: list[str]) -> list[str]:
        plans = {rank: msgspec.json.decode(text, type=StagePlan) for rank, text in enumerate(texts) if text}
        for rank, stage in sorted(plans.items()):
            stranger = next((r for r in range(stage.first, stage.end) if hashes[r] != hashes[stage.first]), None)
            if stranger is not None or rank != stage.first:
                raise CheckpointError(_difference(plans, hashes, stage.first, rank if stranger is None else stranger))
            _add(stage, entries)
        return [""] * len(texts)

    answer = coordinator.gather_and_decide(FAILED + problem if problem else xxhash.xxh3_128_hexdigest(text), compare)
    if answer:
        coordinator.gather_and_decide(text.decode() if answer == LEADER else "", merge)
    elif coordinator.is_first:
        _add(plan, entries)
    return entries


def _add(stage: StagePlan, entries: dict[str, dict[str, Entry]]) -> None:
    for (kind, name), entry in stage.entries:
        if name in entries.setdefault(kind, {}):
            raise CheckpointError(f"two stages hold {kind} tensor {name}")
        entries[kind][name] = entry


def _difference(plans: dict[int, StagePlan], hashes: list[str], one: int, two: int) -> str:
    """Why two ranks that should hold the same tensors have different plans."""
    first, second = (dict(plans[hashes.index(hashes[rank])].entries) for rank in (one, two))
    meaning = [{key: (e.dtype, e.shape, e.axes) for key, e in entries.items()} for entries in (first, second)]
    missing = [*(first.keys() ^ second.keys()), *(key for key in first if meaning[0][key] != meaning[1].get(key))]
    what = "{} tensor {}".format(*sorted(missing)[0]) if missing else "which ranks hold the same tensors"
    return f"ranks {one} and {two} should hold shards of the same tensors, and differ in {what}"


def _files(own: list[Key], tensors: Tensors, rank: int, world: int) -> dict[str, list[Key]]:
    """The files that a rank writes."""
    ordered = file_order(own, tensors)
    if world > 1:
        return {file_name(RANK, rank, world): ordered}
    kinds = dict.fromkeys(kind for kind, _ in ordered)
    return {file_name(kind, 0, 1): [key for key in ordered if key[0] == kind] for kind in kinds}


def file_order(keys: list[Key], tensors: Tensors) -> list[Key]:
    """Weights first, and wide types first within each kind, so that each tensor is aligned to its type without gaps."""
    return sorted(keys, key=lambda key: (key[0] != MODEL, key[0], -tensors[key[0]][key[1]].element_size()))
