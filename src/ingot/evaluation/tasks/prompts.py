"""Records to token ids, exactly as LLM Foundry builds them, so that scores can be compared.

A prompt is the few-shot examples, then the question's context, then the continuation that is scored. The three are
encoded separately and concatenated: a token never spans their borders. A prompt that is too long loses its beginning.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.config.evaluation import TaskConfig
from ingot.data.tokenizer import Tokenizer
from ingot.errors import DataError
from ingot.evaluation.tasks.records import Record

_COT_TOKENS = 10  # room that a chain of thought adds to the generated answer, as in LLM Foundry


@dataclass(frozen=True)
class PromptRow:
    """One sequence for the model: the scored continuation [C] follows its context [N]."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]  # empty where an answer is generated
    text: str  # the continuation, with its leading space
    is_cut: bool  # the context lost its beginning


@dataclass(frozen=True)
class Question:
    """A record with its rows: one, or one for each choice."""

    record: Record
    rows: tuple[PromptRow, ...]
    prompt: str
    max_new_tokens: int = 0


def build_questions(
    task: TaskConfig, shots: int, records: Sequence[Record], tokenizer: Tokenizer, row_length: int,
    first: int | None = None,
) -> list[Question]:  # fmt: skip
    """The questions of one category of a task with `shots` examples each, in rows of at most `row_length` tokens; only
    the `first` ones, whose examples come from all records."""
    drawn = draw_examples(len(records), shots, task.fewshot_random_seed)
    space = " " if len(tokenizer.encode(" a")) == 1 else ""  # sentencepiece adds a space of its own
    generates = task.icl_task_type == "generation_task_with_answers"
    limit = longest_answer(task, records, tokenizer) if generates else 0
    if generates and limit >= row_length:
        raise DataError(
            f"{task.label}: the longest answer needs {limit} tokens, which leaves no room for a prompt in rows of "
            f"{row_length}; raise max_seq_len"
        )
    questions = []
    for record, examples in list(zip(records, drawn, strict=True))[:first]:
        shown = _few_shot_text(task, [records[i] for i in examples])
        start = _without_end(tokenizer.encode(shown, special_tokens=True), tokenizer)
        rows = []
        for context, continuation in _pairs(task, record, bool(shown)):
            text = continuation if generates or continuation.startswith(" ") else space + continuation
            ids = () if generates else tuple(tokenizer.encode(text))
            if not ids and not generates:
                raise DataError(f"{record.where}: the answer {text!r} has no tokens in this tokenizer")
            rows.append(_row(start + tokenizer.encode(context), ids, text, row_length - limit, record))
        new_tokens = int(task.generation_kwargs.get("max_new_tokens", max(limit, 1)))
        contexts = [context for context, _ in _pairs(task, record, bool(shown))]
        questions.append(Question(record, tuple(rows), shown + contexts[0], new_tokens if generates else 0))
    return questions


def draw_examples(count: int, shots: int, seed: int) -> list[list[int]]:
    """For each of `count` records, the numbers of its examples, from one stream of random numbers.

    The order is that in which Python iterates over a set of small integers: part of LLM Foundry's results.
    """
    source, drawn = random.Random(seed), []
    for index in range(count):
        chosen = set(source.sample(range(count), min(count - 1, shots))) if shots else set()
        if index in chosen:
            chosen.remove(index)
            other = index
            while other == index or other in chosen:
                other = source.choice(range(count))
            chosen.add(other)
        drawn.append(list(chosen))
    return drawn


def longest_answer(task: TaskConfig, records: Sequence[Record], tokenizer: Tokenizer) -> int:
    """Tokens that the longest answer of the file needs, chains of thought included."""
    longest = 0
    for record in records:
        thought = record.chain_of_thought + task.cot_delimiter if record.chain_of_thought else ""
        for answer in (record.answer, *record.aliases):
            longest = max(longest, len(tokenizer.encode(thought + answer, special_tokens=True)))
    return longest + (_COT_TOKENS if task.cot_delimiter else 0)


def _few_shot_text(task: TaskConfig, examples: Sequence[Record]) -> str:
    text = task.prompt_string
    for example in examples:
        between = task.example_delimiter if text else ""
        answer = example.answer
        if example.chain_of_thought:
            answer = example.chain_of_thought + task.cot_delimiter + answer
        if task.icl_task_type == "schema":
            text += task.prelimiter + between + example.choices[example.gold] + task.continuation_delimiter + answer
        else:
            text += between + task.prelimiter + example.context + task.continuation_delimiter + answer
    return text


def _pairs(task: TaskConfig, record: Record, follows: bool) -> list[tuple[str, str]]:
    """Context and continuation of each row. `follows`: examples or a prompt string precede them."""
    between = task.example_delimiter if follows else ""
    if task.icl_task_type == "schema":
        delimiter = task.continuation_delimiter if follows else ""
        contexts = [task.prelimiter + between + option + delimiter for option in record.choices]
    else:
        contexts = [between + task.prelimiter + record.context + task.continuation_delimiter]
    if task.strip_dataset:
        contexts = [context.rstrip() for context in contexts]
    if task.icl_task_type == "multiple_choice":
        return [(contexts[0], choice) for choice in record.choices]
    return [(context, record.answer) for context in contexts]


def _row(context: list[int], continuation: tuple[int, ...], text: str, limit: int, record: Record) -> PromptRow:
    if not continuation and text.strip() and limit <= 0:
        raise DataError(f"{record.where}: the answer fills the row")
    room = limit - len(continuation)
    if room < 1 <= len(continuation):
        raise DataError(
            f"{record.where}: the answer has {len(continuation)} tokens, but rows hold {limit} with their context; "
            "raise max_seq_len"
        )
    if not context:
        raise DataError(f"{record.where}: the prompt has no tokens, so nothing precedes the first scored token")
    return PromptRow(tuple(context[-room:]), continuation, text, is_cut=len(context) > room)


def _without_end(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_id else ids
