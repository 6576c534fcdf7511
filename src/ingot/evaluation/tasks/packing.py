"""Packs questions into rows of tokens with little padding.

A unit is the common beginning of a question's rows and the rest of each as a branch (`attention`). Sorted by length,
units fill rows first-fit, so that short questions share a row; rows of equal length form a batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ingot.evaluation.tasks.prompts import PromptRow
from ingot.model.branch_attention import PADDING

_ROUND = 64  # row lengths are multiples of this: few shapes, which compilers and allocators like
_SHORTEST = 256  # rows are filled up to at least this many tokens
_OPEN = 64  # rows that may still be filled; looking at more gains nothing


@dataclass(frozen=True)
class Unit:
    """The rows of one question, by their numbers in the list of all rows."""

    rows: tuple[int, ...]
    shared: tuple[int, ...]  # tokens that all rows begin with
    branches: tuple[tuple[int, ...], ...]  # the rest of each row but its last token, which predicts nothing
    scored: tuple[int, ...]  # how many tokens at the end of each row are scored

    @property
    def tokens(self) -> int:
        return len(self.shared) + sum(map(len, self.branches))


@dataclass
class PackedBatch:
    """Arrays [B, T] of rows of equal length, and where each scored token is predicted [P]."""

    tokens: np.ndarray
    question: np.ndarray
    branch: np.ndarray
    position: np.ndarray
    at: list[tuple[int, int]] = field(default_factory=list)  # (row, column) that predicts a scored token
    targets: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)  # the number of the PromptRow that each scored token belongs to


def make_unit(numbers: Sequence[int], rows: Sequence[PromptRow]) -> Unit:
    """One unit of the rows of a question."""
    full = [row.context + row.continuation for row in rows]
    most = min(len(row.context) for row in rows)
    shared = 0
    while shared < most and all(tokens[shared] == full[0][shared] for tokens in full):
        shared += 1
    return Unit(
        tuple(numbers), full[0][:shared], tuple(tokens[shared:-1] for tokens in full),
        tuple(len(row.continuation) for row in rows),
    )  # fmt: skip


def pack(
    units: Sequence[Unit], rows: Sequence[PromptRow], batch_tokens: int, packs: bool = True
) -> Iterator[PackedBatch]:
    """Batches of about `batch_tokens` tokens, the longest rows first: what does not fit in memory fails at once."""
    full: list[tuple[int, list[Unit]]] = []
    rooms: list[tuple[int, int]] = []  # (index in `full`, tokens left) of rows that may still be filled
    for unit in sorted(units, key=lambda u: (-u.tokens, u.rows)):
        place = next((i for i, (_, left) in enumerate(rooms) if left >= unit.tokens), None)
        if packs and place is not None:
            index, left = rooms[place]
            full[index][1].append(unit)
            rooms[place] = (index, left - unit.tokens)
            continue
        length = -(-max(unit.tokens, _SHORTEST if packs else 1) // _ROUND) * _ROUND if packs else unit.tokens
        full.append((length, [unit]))
        rooms = [*rooms[-_OPEN + 1 :], (len(full) - 1, length - unit.tokens)]
    start = 0
    while start < len(full):
        length = full[start][0]
        end = start
        while end < len(full) and full[end][0] == length and (end - start + 1) * length <= max(batch_tokens, length):
            end += 1
        yield _lay_out([held for _, held in full[start:end]], length, rows)
        start = end


def _lay_out(held: Sequence[Sequence[Unit]], length: int, rows: Sequence[PromptRow]) -> PackedBatch:
    shape = (len(held), length)
    tokens, branch, position = (np.zeros(shape, np.int64) for _ in range(3))
    batch = PackedBatch(tokens, np.full(shape, PADDING, np.int64), branch, position)
    for line, units in enumerate(held):
        column = 0
        for number, unit in enumerate(units):
            begin, shared = column, len(unit.shared)
            batch.tokens[line, begin : begin + shared] = unit.shared
            batch.position[line, begin : begin + shared] = np.arange(shared)
            column += shared
            for which, rest in enumerate(unit.branches, 1):
                after = column + len(rest)
                batch.tokens[line, column:after] = rest
                batch.branch[line, column:after] = which
                batch.position[line, column:after] = np.arange(shared, shared + len(rest))
                row, scored = rows[unit.rows[which - 1]], unit.scored[which - 1]
                first = len(row.context) - 1  # the position that predicts the first scored token
                for offset in range(scored):
                    at = first + offset
                    batch.at.append((line, begin + at if at < shared else column + at - shared))
                batch.targets += row.continuation
                batch.owners += [unit.rows[which - 1]] * scored
                column = after
            batch.question[line, begin:column] = number
    return batch
