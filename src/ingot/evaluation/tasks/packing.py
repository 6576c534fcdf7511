"""Packs questions into rows of tokens with little padding.

A unit is the common beginning of some rows of a question and the rest of each as a branch (`model/branch_attention`).
Units with branches fill rows first-fit, the longest first, so that short questions share a row. A row of its own needs
no mask, so that attention runs at full speed, and is batched with rows of about its length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.evaluation.tasks.prompts import PromptRow
from ingot.model.branch_attention import PADDING

_SHORTEST = 256  # rows are filled up to at least this many tokens
_OPEN = 64  # rows that may still be filled; looking at more gains nothing
_ROUND, _ROUND_ALONE = 64, 8  # lengths are multiples of this
_SIMILAR = 0.75  # a row this much shorter than the longest of a batch still joins it
_WORTH_SHARING = 0.5  # rows share their common beginning if it is at least this part of the shorter one


@dataclass(frozen=True)
class RowShapes:
    """What shapes a model takes."""

    batch_tokens: int
    context: int  # rows are not padded beyond this
    shares: bool = True  # rows may hold branches and several questions
    alone: bool = True  # a row without branches is a row of its own
    fixed: bool = False  # few lengths, each with one number of rows: what a compiled model wants

    def length(self, tokens: int, shared: bool) -> int:
        """The length of rows that these tokens go into."""
        if self.fixed:
            power = 1 << (tokens - 1).bit_length()
            length = 3 * power // 4 if tokens <= 3 * power // 4 and power >= 128 else max(power, 64)
        else:
            multiple = _ROUND if shared else _ROUND_ALONE
            length = -(-tokens // multiple) * multiple
        return max(tokens, min(length, self.context))

    def rows(self, length: int) -> int:
        """The most rows of a batch."""
        return max(1, self.batch_tokens // length)


@dataclass(frozen=True)
class Unit:
    """Rows of one question, by their numbers in the list of all rows."""

    rows: tuple[int, ...]
    shared: tuple[int, ...]  # tokens that all rows begin with
    branches: tuple[tuple[int, ...], ...]  # the rest of each row but its last token, which predicts nothing

    @property
    def tokens(self) -> int:
        return len(self.shared) + sum(map(len, self.branches))


@dataclass
class PackedBatch:
    """Arrays [B, T] of rows, and the P tokens in them that are scored."""

    tokens: np.ndarray
    question: np.ndarray
    branch: np.ndarray
    position: np.ndarray
    line: np.ndarray  # the row that each scored token is in, [P]
    column: np.ndarray  # the column that predicts it, [P]
    targets: np.ndarray  # the scored tokens, [P]
    owners: np.ndarray  # the number of the PromptRow that each belongs to, [P]; tokens of one follow each other
    has_branches: bool  # otherwise each row is one sequence


def make_units(questions: Sequence[Sequence[PromptRow]], shares: bool) -> list[Unit]:
    """The units of all questions: if `shares`, neighbors that begin alike for long enough share their beginning."""
    units, first = [], 0
    for question in questions:
        group: list[int] = []
        common = 0  # tokens that all rows of the group begin with
        for number, row in enumerate(question):
            shared = min(common, _common_beginning(question[group[0]], row)) if group else len(row.context)
            shortest = min(len(question[n].context) + len(question[n].continuation) for n in (*group, number))
            if group and (not shares or shared < _WORTH_SHARING * shortest):
                units.append(_unit(question, group, common, first))
                group, shared = [], len(row.context)
            group.append(number)
            common = shared
        if group:
            units.append(_unit(question, group, common, first))
        first += len(question)
    return units


def pack(units: Sequence[Unit], rows: Sequence[PromptRow], shapes: RowShapes) -> Iterator[PackedBatch]:
    """Batches of about `batch_tokens` tokens, the longest rows first: what does not fit in memory fails at once."""
    ordered = sorted(units, key=lambda unit: (-unit.tokens, unit.rows))
    alone = [unit for unit in ordered if not shapes.shares or (shapes.alone and len(unit.rows) == 1)]
    together = [unit for unit in ordered if shapes.shares and not (shapes.alone and len(unit.rows) == 1)]
    lines = [(shapes.length(unit.tokens, shared=False), False, [unit]) for unit in alone]
    lines += [(length, True, held) for length, held in _fill(together, shapes)]
    lines.sort(key=lambda line: (-line[0], line[1]))
    start = 0
    while start < len(lines):
        length, shared, _ = lines[start]
        end = start + 1
        while end < len(lines) and end - start < shapes.rows(length) and _joins(lines[end], length, shared, shapes):
            end += 1
        count = shapes.rows(length) if shapes.fixed else end - start
        yield _lay_out([held for _, _, held in lines[start:end]], (count, length), rows, shared)
        start = end


def _common_beginning(one: PromptRow, other: PromptRow) -> int:
    """How many tokens two rows begin with alike, within the contexts of both."""
    if one.context == other.context:
        return len(one.context)
    pairs = zip(one.context, other.context, strict=False)
    most = min(len(one.context), len(other.context))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), most)


def _unit(question: Sequence[PromptRow], group: Sequence[int], common: int, first: int) -> Unit:
    full = [question[number].context + question[number].continuation for number in group]
    return Unit(tuple(first + n for n in group), full[0][:common], tuple(tokens[common:-1] for tokens in full))


def _fill(units: Sequence[Unit], shapes: RowShapes) -> list[tuple[int, list[Unit]]]:
    """Rows, by length and what they hold; `units` are sorted, the longest first."""
    full: list[tuple[int, list[Unit]]] = []
    rooms: list[tuple[int, int]] = []  # (index in `full`, tokens left) of rows that may still be filled
    for unit in units:
        fitting = next((i for i, (_, left) in enumerate(rooms) if left >= unit.tokens), None)
        if fitting is not None:
            index, left = rooms[fitting]
            full[index][1].append(unit)
            rooms[fitting] = (index, left - unit.tokens)
            continue
        length = shapes.length(max(unit.tokens, _SHORTEST), shared=True)
        full.append((length, [unit]))
        rooms = [*rooms[-_OPEN + 1 :], (len(full) - 1, length - unit.tokens)]
    return full


def _joins(line: tuple[int, bool, list[Unit]], length: int, shared: bool, shapes: RowShapes) -> bool:
    least = length if shapes.fixed else _SIMILAR * length
    return line[0] >= least and line[1] == shared


def _lay_out(
    held: Sequence[Sequence[Unit]], shape: tuple[int, int], rows: Sequence[PromptRow], has_branches: bool
) -> PackedBatch:
    tokens, branch, position = (np.zeros(shape, np.int64) for _ in range(3))
    question = np.full(shape, PADDING, np.int64)
    lines, columns, targets, owners = ([np.zeros(0, np.int64)] for _ in range(4))
    for line, units in enumerate(held):
        column = 0
        for number, unit in enumerate(units):
            begin, shared = column, len(unit.shared)
            tokens[line, begin : begin + shared] = unit.shared
            position[line, begin : begin + shared] = np.arange(shared)
            column += shared
            for which, (owner, rest) in enumerate(zip(unit.rows, unit.branches, strict=True), 1):
                after = column + len(rest)
                tokens[line, column:after] = rest
                branch[line, column:after] = which
                position[line, column:after] = np.arange(shared, shared + len(rest))
                row = rows[owner]
                at = np.arange(len(row.continuation)) + len(row.context) - 1  # the positions that predict its tokens
                columns.append(np.where(at < shared, begin + at, column + at - shared))
                lines.append(np.full(len(at), line))
                targets.append(np.array(row.continuation, np.int64))
                owners.append(np.full(len(at), owner))
                column = after
            question[line, begin:column] = number
    line_at, column_at, target, owner_of = (np.concatenate(parts) for parts in (lines, columns, targets, owners))
    return PackedBatch(
        tokens, question, branch, position, line_at, column_at, target, owner_of, has_branches=has_branches
    )  # fmt: skip
