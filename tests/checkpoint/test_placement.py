"""Rules say where every part of a tensor is, on all ranks the same, and as DTensor has it."""

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from together import Together, on_all_ranks
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ingot.checkpoint.manifest import MODEL, OPTIMIZER
from ingot.checkpoint.placement import Axis, Chunk, Entry
from ingot.checkpoint.save_plan import HeldTensor, SavePlan, Tensors, choose_writers, describe, part_of, plan_save
from ingot.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]
CASES = 120


def random_mesh(chance: random.Random) -> list[int]:
    return [chance.choice([1, 2, 3, 4, 5, 8]) for _ in range(chance.randint(1, 3))]


def random_placements(chance: random.Random, sizes: list[int], shape: list[int]) -> list[Any]:
    """As FSDP2 makes them from the placements of tensor parallelism: a strided shard where both cut one dimension."""
    dims = [chance.choice([None, *range(len(shape))]) for _ in sizes]
    placements: list[Any] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    if len(sizes) > 1 and dims[-1] is not None and dims[-2] == dims[-1] and chance.random() < 0.8:
        shape[dims[-1]] = sizes[-1] * chance.randint(1, 12)  # tensor parallelism divides evenly
        placements[-2] = _StridedShard(dims[-1], split_factor=sizes[-1])
        for axis in range(len(sizes) - 2):
            if dims[axis] == dims[-1]:
                placements[axis] = Replicate()
    return placements


def held(sizes: list[int], shape: list[int], placements: list[Any], first: int = 0) -> HeldTensor:
    ranks = torch.arange(first, first + math.prod(sizes)).view(sizes)
    mesh = SimpleNamespace(ndim=len(sizes), size=lambda axis: sizes[axis], mesh=ranks)
    tensor: Any = SimpleNamespace(dtype=torch.float32, shape=shape, placements=placements, device_mesh=mesh)
    return describe((MODEL, "x"), tensor)


def boxes(sizes: list[int], shape: list[int], placements: list[Any]) -> list[Box]:
    """What each rank holds, according to torch."""
    found = []
    for place in itertools.product(*map(range, sizes)):
        length, begin = _compute_local_shape_and_global_offset(shape, sizes, list(place), placements)
        found.append((tuple(begin), tuple(length)))
    return found


def random_case(seed: int) -> tuple[list[int], list[int], list[Any]]:
    chance = random.Random(seed)
    sizes, shape = random_mesh(chance), [chance.randint(1, 20) for _ in range(chance.randint(1, 3))]
    return sizes, shape, random_placements(chance, sizes, shape)


def test_a_rule_gives_each_rank_the_part_that_torch_gives_it() -> None:
    for seed in range(CASES):
        check_rule(seed, *random_case(seed))


def check_rule(seed: int, sizes: list[int], shape: list[int], placements: list[Any]) -> None:
    first = seed % 3 * math.prod(sizes)
    ranks = range(first, first + math.prod(sizes))
    entry = choose_writers([held(sizes, shape, placements, first)], ranks)[MODEL, "x"]
    assert entry.problem(ranks.stop) is None
    expected = boxes(sizes, shape, placements)
    for rank, (begin, length) in zip(ranks, expected, strict=True):
        part = part_of(rank - first, entry)
        assert part[2] == length and (part[1] == begin or not math.prod(length)), (sizes, shape, placements, rank)
        assert part[0] in ranks and expected[part[0] - first] == (begin, length)  # a writer of it holds it
    assert entry.count() == len(list(entry.parts()))
    by_rule = {part[1:] for part in entry.parts()}
    assert by_rule == {box for box in expected if math.prod(box[1])}
    count = np.zeros(shape, dtype=int)
    for _, begin, length in entry.parts():
        count[tuple(slice(b, b + n) for b, n in zip(begin, length, strict=True))] += 1
    assert (count == 1).all()


def test_parts_that_overlap_with_a_box_are_those_of_the_list() -> None:
    for seed in range(CASES):
        check_overlap(seed, *random_case(seed))


def check_overlap(seed: int, sizes: list[int], shape: list[int], placements: list[Any]) -> None:
    rule = choose_writers([held(sizes, shape, placements)], range(math.prod(sizes)))[MODEL, "x"]
    listed = Entry(rule.dtype, rule.shape, chunks=tuple(rule.parts()))
    assert listed.problem(math.prod(sizes)) is None and listed.writers() <= rule.writers()
    chance = random.Random(seed)
    begin = [chance.randint(0, n) for n in shape]
    length = [chance.randint(0, n - b) for b, n in zip(begin, shape, strict=True)]

    def overlap(parts: Any) -> set[Chunk]:
        return {part for part in parts if all(max(b, o) < min(b + n, o + m)
                for b, n, o, m in zip(begin, length, part[1], part[2], strict=True))}  # fmt: skip

    assert overlap(rule.overlapping(begin, length)) == overlap(listed.overlapping(begin, length))
    assert overlap(rule.parts()) == overlap(rule.overlapping(begin, length))


@pytest.mark.parametrize("seed", range(20))
def test_what_several_ranks_hold_is_shared_among_them(seed: int) -> None:
    chance = random.Random(seed)
    tensors = [
        HeldTensor((MODEL, str(n)), "F32", (chance.randint(1, 4) * 64, 8), (Axis(4, 2, 0),) if n % 5 else ())
        for n in range(60)
    ]
    ranks = range(16, 48)  # 32 ranks: 8 copies of each tensor that is cut, 32 of the others
    load = dict.fromkeys(ranks, 0)
    for entry in choose_writers(tensors, ranks).values():
        for writer, _, shape in entry.parts():
            load[writer] += 4 * math.prod(shape)
    largest = max(4 * math.prod(t.shape) for t in tensors)
    assert max(load.values()) <= sum(load.values()) / len(load) + largest


def plans(states: list[Tensors], holders: list[range]) -> tuple[list[SavePlan | Exception], list[Together]]:
    coordinators = Together.ranks(len(states))

    def work(coordinator: Together) -> SavePlan | Exception:
        try:
            return plan_save(states[coordinator.rank], coordinator, holders[coordinator.rank])
        except CheckpointError as error:
            return error

    return on_all_ranks(coordinators, work), coordinators


def whole(*names: str) -> Tensors:
    return {MODEL: {n: torch.zeros(3) for n in names}, OPTIMIZER: {f"step/{n}": torch.zeros(()) for n in names}}


def test_ranks_of_one_stage_send_only_a_hash() -> None:
    names = [f"a-rather-long-name-{n}" for n in range(200)]
    found, coordinators = plans([whole(*names)] * 4, [range(4)] * 4)
    assert max(c.sent for c in coordinators) == 32
    first: Any = found[0]
    written = [key for plan in found for keys in plan.files.values() for key in keys]  # type: ignore[union-attr]
    assert len(written) == len(set(written)) == 400
    assert list(first.entries[MODEL]) == names and first.parts == 4
    assert [name for plan in found for name in plan.files] == [f"rank-0000{r}-of-00004.safetensors" for r in range(4)]  # type: ignore[union-attr]


def test_stages_of_a_pipeline_send_one_plan_each() -> None:
    found, coordinators = plans([whole("a")] * 2 + [whole("b")] * 2, [range(2), range(2), range(2, 4), range(2, 4)])
    assert [c.sent > 32 for c in coordinators] == [True, False, True, False]
    first: Any = found[0]
    assert sorted(first.entries[MODEL]) == ["a", "b"] and first.entries[MODEL]["b"].first in (2, 3)


@pytest.mark.parametrize(
    ("states", "holders", "words"),
    [
        ([whole("a"), whole("a", "b")], [range(2)] * 2, "ranks 0 and 1 should hold .* differ in model tensor b"),
        ([whole("a"), whole("a")], [range(1), range(1, 2)], "two stages hold model tensor a"),
        ([whole("a")] * 3, [range(3), range(3), range(1, 3)], "ranks 0 and 2 .* differ in which ranks hold"),
    ],
)
def test_ranks_that_differ_are_named_on_every_rank(states: list[Tensors], holders: list[range], words: str) -> None:
    found, _ = plans(states, holders)
    for error in found:
        assert isinstance(error, CheckpointError)
        with pytest.raises(CheckpointError, match=words):
            raise error


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (Entry("F32", (8,), first=2), "part 2, which has no file"),
        (Entry("F32", (8,), axes=(Axis(3, 1, 0),)), "part 2, which has no file"),
        (Entry("F32", (8,), axes=(Axis(2, 0, 0),)), "impossible axis"),
        (Entry("F32", (8, 8), axes=(Axis(2, 1, 0), Axis(2, 1, 1))), "impossible axis"),  # one file, two parts
        (Entry("F32", (8,), axes=(Axis(2, 1, 1),)), "impossible axis"),
        (Entry("F32", (8,), axes=(Axis(2, 1, -1),)), "impossible axis"),
        (Entry("F32", (8,), first=-1), "which has no file"),
        (Entry("F32", (8,), axes=(Axis(1 << 60, 1, 0),)), "which has no file"),
    ],
)
def test_an_impossible_rule_is_refused(entry: Entry, words: str) -> None:
    assert words in (entry.problem(2) or "")
