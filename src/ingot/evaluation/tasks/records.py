"""The records of a task: JSON Lines, checked before any model is loaded."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ingot.config.evaluation import TaskConfig
from ingot.data.sources.input_files import open_raw
from ingot.errors import DataError
from ingot.storage.object_store import is_url


@dataclass(frozen=True)
class Record:
    """One question as the file has it."""

    where: str  # FILE:LINE, for messages
    context: str  # empty for schema
    answer: str  # the continuation; for multiple_choice the right choice
    choices: tuple[str, ...]  # choices, or the contexts to choose from (schema)
    gold: int  # the right one
    aliases: tuple[str, ...]  # other right answers
    chain_of_thought: str
    category: str


@dataclass(frozen=True)
class RecordFile:
    """All records of a task."""

    records: list[Record]
    sha256: str


def read_records(task: TaskConfig) -> RecordFile:
    """Read and check a task's records; the first thing wrong is named with its file and line."""
    found, digest = [], sha256()
    for file in _files(task.dataset_uri):
        try:
            with open_raw(file) as stream:
                data = stream.read()
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
        digest.update(data)
        found += [_record(values, f"{file}:{line}", task) for line, values in _lines(data, file)]
    if not found:
        raise DataError(f"{task.dataset_uri}: holds no records; task {task.label} needs at least one")
    sizes = {len(record.choices) for record in found}
    if len(sizes) > 1:
        odd = next(record for record in found if len(record.choices) != len(found[0].choices))
        raise DataError(f"{odd.where}: has {len(odd.choices)} choices, the first record {len(found[0].choices)}")
    return RecordFile(found, digest.hexdigest())


def by_category(records: list[Record], task: TaskConfig) -> Iterator[tuple[str, list[Record]]]:
    """The records of each category in order of name, or all of them under an empty name."""
    if not task.has_categories:
        yield "", records
        return
    if missing := next((record for record in records if not record.category), None):
        raise DataError(f"{missing.where}: has no field 'category', which has_categories=true needs")
    for name in sorted({record.category for record in records}):
        yield name, [record for record in records if record.category == name]


def _files(uri: str) -> list[str]:
    if is_url(uri):
        if uri.startswith("hf://"):
            raise DataError(f"{uri}: hub datasets are not read as tasks; save it as a .jsonl file and give its path")
        return [uri]
    path = Path(uri)
    if path.is_dir():
        files = sorted(map(str, path.glob("*.jsonl")))
        if not files:
            raise DataError(f"{uri}: no .jsonl file in this folder")
        return files
    return [uri]


def _lines(data: bytes, file: str) -> Iterable[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(data.decode("utf-8-sig", errors="replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}:{number}: not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise DataError(f"{file}:{number}: a record must be a JSON object")
        yield number, values


def _record(values: dict[str, Any], where: str, task: TaskConfig) -> Record:
    if task.strip_dataset:
        values = {key: value.strip() if isinstance(value, str) else value for key, value in values.items()}
    context_key, answer_key, choices_key = task.keys
    context = _field(values, context_key, str, where, task) if context_key else ""
    answer = _field(values, answer_key, str, where, task) if answer_key else ""
    choices: tuple[str, ...] = ()
    gold = 0
    if choices_key:
        choices = tuple(_field(values, choices_key, list, where, task))
        gold = _field(values, "gold", int, where, task)
        if not choices or not all(isinstance(choice, str) for choice in choices):
            raise DataError(f"{where}: {choices_key} must be a list of texts")
        if not 0 <= gold < len(choices):
            raise DataError(f"{where}: gold is {gold}, but the choices are numbered 0 to {len(choices) - 1}")
        answer = answer or choices[gold]
    aliases = values.get("aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise DataError(f"{where}: aliases must be a list of texts, not {json.dumps(aliases)[:40]}")
    return Record(
        where, context, answer, choices, gold, tuple(aliases),
        str(values.get("chain_of_thought") or ""), str(values.get("category") or ""),
    )  # fmt: skip


def _field(values: dict[str, Any], key: str, kind: type, where: str, task: TaskConfig) -> Any:
    if key not in values:
        names = ", ".join(list(values)[:8]) or "none"
        raise DataError(f"{where}: a {task.icl_task_type} record needs the field '{key}'; its fields are {names}")
    if not isinstance(values[key], kind) or isinstance(values[key], bool):
        wanted = {str: "text", list: "a list", int: "a whole number"}[kind]
        raise DataError(f"{where}: {key} must be {wanted}, not {json.dumps(values[key])[:40]}")
    return values[key]
