"""Records to token ids, as nanochat builds them for CORE.

Examples are separated by a blank line, every row starts with BOS, and each question draws its examples from all other
records of the shuffled file with a seed of its own. A row is encoded as one text, and what is scored follows from the
tokens: in multiple choice what comes after the common beginning of all choices, in schema the common end.
"""

import random
from collections.abc import Sequence

from ingot.config.evaluation import TaskConfig
from ingot.data.tokenizer import Tokenizer
from ingot.errors import DataError
from ingot.evaluation.tasks.prompts import PromptRow, Question
from ingot.evaluation.tasks.records import Record

_SHUFFLE, _EXAMPLES = 1337, 1234  # seeds


def shuffled(records: Sequence[Record], most: int | None) -> list[Record]:
    """The records in the order of CORE, and only the first of them, from which examples are then drawn as well."""
    found = list(records)
    random.Random(_SHUFFLE).shuffle(found)
    return found[:most]


def core_questions(
    task: TaskConfig, shots: int, records: Sequence[Record], tokenizer: Tokenizer, row_length: int
) -> list[Question]:
    """The questions of a task in rows of at most `row_length` tokens."""
    if shots and len(records) <= shots:
        raise DataError(
            f"task {task.label}: {shots} examples come from the other records, and there are {len(records)} in all; "
            f"score at least {shots + 1}"
        )
    bos = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if bos is None:
        raise DataError("CORE starts every row with BOS, and this tokenizer has neither BOS nor EOS")
    questions = []
    for index, record in enumerate(records):
        others = [i for i in range(len(records)) if i != index]
        drawn = random.Random(_EXAMPLES + index).sample(others, shots) if shots else []
        shown = "".join(_example(task, records[i]) for i in drawn)
        texts = _texts(task, record, shown)
        encoded = [[bos, *tokenizer.encode(text)] for text in texts]
        starts = _starts(task, encoded)
        shared = tuple(encoded[0][: starts[0]])  # one object for all choices: with examples they are long
        rows = [
            _row(tuple(tokens[:start]), shared, tuple(tokens[start:]), row_length, record, tokenizer)
            for tokens, start in zip(encoded, starts, strict=True)
        ]
        if task.icl_task_type == "language_modeling":
            rows = rows[1:]
            if not rows[0].continuation:
                raise DataError(f"{record.where}: the continuation adds no token to its context")
        questions.append(Question(record, tuple(rows), texts[0]))
    return questions


def _example(task: TaskConfig, record: Record) -> str:
    between = task.continuation_delimiter
    if task.icl_task_type == "schema":
        return f"{record.choices[record.gold]}{between}{record.answer}\n\n"
    context = record.context.strip() if task.icl_task_type == "language_modeling" else record.context
    return f"{context}{between}{record.answer}\n\n"


def _texts(task: TaskConfig, record: Record, shown: str) -> list[str]:
    """The row of each choice; for language modeling the row without its continuation and the one with it."""
    between = task.continuation_delimiter
    if task.icl_task_type == "multiple_choice":
        return [f"{shown}{record.context}{between}{choice}" for choice in record.choices]
    if task.icl_task_type == "schema":
        return [f"{shown}{option}{between}{record.answer}" for option in record.choices]
    start = f"{shown}{record.context.strip()}{between}"
    return [start.strip(), start + record.answer]


def _starts(task: TaskConfig, encoded: Sequence[Sequence[int]]) -> list[int]:
    """The first scored token of each row; BOS never is."""
    if task.icl_task_type == "schema":
        common = _common([row[::-1] for row in encoded])
        return [max(len(row) - common, 1) for row in encoded]
    return [_common(encoded)] * len(encoded)


def _common(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens all rows begin with."""
    columns = list(zip(*rows, strict=False))
    return next((at for at, column in enumerate(columns) if len(set(column)) > 1), len(columns))


def _row(
    context: tuple[int, ...], shared: tuple[int, ...], scored: tuple[int, ...], limit: int, record: Record,
    tokenizer: Tokenizer,
) -> PromptRow:  # fmt: skip
    """The last `limit` tokens, of which `scored` are scored."""
    room = limit - len(scored)
    if room < 1:
        raise DataError(f"{record.where}: {len(scored)} tokens are scored, but rows hold {limit} with their context")
    context = shared if context == shared else context
    return PromptRow(context[-room:], scored, tokenizer.decode(scored), is_cut=len(context) > room)
