"""Where the parts of a stored tensor are.

By rule: the axes of the mesh that cut the tensor, in the order of the cuts. An axis of size s cuts a dimension into s
parts of ceil(length / s), the last ones shorter or empty, as torch.chunk and DTensor do. With 8,192 ranks a rule takes
about 60 bytes, and the list of parts that format version 2 stored (still read) 200 kB.
"""

import math
from collections.abc import Iterator, Sequence

import msgspec

Chunk = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Part of a tensor: number of the file that holds it, offsets in the whole tensor, shape."""


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """An axis of the mesh that cuts a tensor."""

    size: int
    stride: int
    """How far apart the numbers of the ranks along this axis are."""
    dim: int
    """The dimension that is cut."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    first: int = 0
    """Number of the file that holds the first part."""
    axes: tuple[Axis, ...] = ()
    chunks: tuple[Chunk, ...] | None = None
    """The parts one by one, in place of the rule."""

    def parts(self) -> Iterator[Chunk]:
        """All parts that hold anything, and of a whole tensor that is empty the one that says so."""
        return self.overlapping([0] * len(self.shape), self.shape)

    def count(self) -> int:
        """How many parts there are."""
        return len(self.chunks) if self.chunks is not None else _count(self.axes, self.shape)

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Chunk]:
        """The parts that overlap with a box."""
        if self.chunks is None:
            yield from _descend(self.axes, self.first, [0] * len(self.shape), list(self.shape), offsets, sizes)
            return
        for chunk in self.chunks:
            box = zip(offsets, sizes, chunk[1], chunk[2], strict=True)
            if len(self.chunks) == 1 or all(max(a, b) < min(a + n, b + m) for a, n, b, m in box):
                yield chunk

    def part_of(self, coordinates: Sequence[int]) -> Chunk:
        """The part, perhaps empty, at a place on the mesh, given by its coordinates along `axes`."""
        number, begin, length = self.first, [0] * len(self.shape), list(self.shape)
        for axis, place in zip(self.axes, coordinates, strict=True):
            each = -(-length[axis.dim] // axis.size)
            skipped = min(place * each, length[axis.dim])
            begin[axis.dim] += skipped
            length[axis.dim] = min(each, length[axis.dim] - skipped)
            number += place * axis.stride
        return number, tuple(begin), tuple(length)

    def problem(self, parts: int) -> str | None:
        """What is impossible about this entry, if `parts` ranks have written it; each has one part of it at most."""
        if self.chunks is not None:
            return self._problem_of_chunks(parts)
        span = 0
        for axis in sorted(self.axes, key=lambda axis: axis.stride):
            if axis.size < 1 or axis.stride <= span or not 0 <= axis.dim < len(self.shape):
                return f"is cut by an impossible axis {[axis.size, axis.stride, axis.dim]}"
            span += (axis.size - 1) * axis.stride
        if self.first < 0 or self.first + span >= parts:
            return f"is in part {self.first + span}, which has no file"
        return None

    def _problem_of_chunks(self, parts: int) -> str | None:
        volume = 0
        for part, offsets, sizes in self.chunks or ():
            if not 0 <= part < parts:
                return f"is in part {part}, which has no file"
            if not len(offsets) == len(sizes) == len(self.shape):
                return "has a chunk of another number of dimensions"
            if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, self.shape, strict=True)):
                return f"of shape {list(self.shape)} has a chunk outside it"
            volume += math.prod(sizes)
        return "is not covered by its chunks" if volume != math.prod(self.shape) else None

    def writers(self) -> set[int]:
        """The numbers of the files that hold the parts."""
        if self.chunks is not None:
            return {chunk[0] for chunk in self.chunks}
        numbers = [self.first]
        for axis in self.axes:
            numbers = [number + place * axis.stride for number in numbers for place in range(axis.size)]
        return set(numbers)


def _count(axes: Sequence[Axis], shape: tuple[int, ...]) -> int:
    if not axes:
        return 1
    axis, *rest = axes
    each = -(-shape[axis.dim] // axis.size)
    full, last = divmod(shape[axis.dim], each or 1)

    def inner(length: int) -> int:
        return _count(rest, (*shape[: axis.dim], length, *shape[axis.dim + 1 :]))

    return (full * inner(each) if full else 0) + (inner(last) if last else 0)


def _descend(
    axes: Sequence[Axis],
    number: int,
    begin: list[int],
    length: list[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> Iterator[Chunk]:
    """Cut by one axis after another, following only the parts that overlap with the box."""
    if not axes:
        yield number, tuple(begin), tuple(length)
        return
    axis, *rest = axes
    start, count = begin[axis.dim], length[axis.dim]
    low, high = max(offsets[axis.dim], start), min(offsets[axis.dim] + sizes[axis.dim], start + count)
    if low >= high:
        return
    each = -(-count // axis.size)
    for place in range((low - start) // each, -(-(high - start) // each)):
        inner_begin, inner_length = list(begin), list(length)
        inner_begin[axis.dim] = start + place * each
        inner_length[axis.dim] = min(each, count - place * each)
        yield from _descend(rest, number + place * axis.stride, inner_begin, inner_length, offsets, sizes)
