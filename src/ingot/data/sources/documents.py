"""Documents from streams of jsonl, in blocks of bounded size.

A record that is not a document (a broken line, a missing field, invalid UTF-8) does not raise: its number and the
problem are part of its block, so that the caller can stop or skip it.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import numpy as np

from ingot.data.prepare.options import PrepareOptions
from ingot.data.sources.input_files import READ_BYTES, open_raw

BLOCK_BYTES = 8 << 20


@dataclass
class TextBlock:
    """Some documents, and the records that are not documents."""

    texts: list[bytes]  # UTF-8, as the fast engine needs it
    records: np.ndarray  # number of each text's line or row in its file, from 0
    bad: list[tuple[int, str]]  # (record, what is wrong)
    record_count: int  # lines or rows read, bad and blank ones included
    path: str
    ends: bool = True  # whether the last text ends its document


def cut_lines(stream: IO[bytes], options: PrepareOptions) -> Iterator[bytes]:
    """A stream in blocks of whole lines, of about BLOCK_BYTES each. Of a line that is too long only the first part is
    kept, enough to recognize it as such."""
    rest: list[bytes] = []
    size, limit = 0, options.max_document_bytes
    while data := stream.read(BLOCK_BYTES):
        end = data.rfind(b"\n") + 1
        if end:
            begin = data.find(b"\n") if size > limit else 0
            yield b"".join((*rest, memoryview(data)[begin:end]))  # one copy: the blocks are large
            rest, size = [data[end:]], len(data) - end
        elif size <= limit:
            rest.append(data)
            size += len(data)
    if size:
        yield b"".join(rest)


def newlines(data: bytes) -> int:
    """The number of newlines; `bytes.count` takes four times as long."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))


def count_lines(path: str, end: int) -> int:
    """Newlines in the first bytes of a file."""
    count = 0
    with open_raw(path) as file:
        while end > 0 and (data := file.read(min(end, READ_BYTES))):
            count += newlines(data)
            end -= len(data)
    return count


@functools.cache
def _line_decoder(key: str) -> Any:
    """A JSON decoder that builds nothing but the one field."""
    return msgspec.json.Decoder(msgspec.defstruct("Row", [("value", str)], rename={"value": key}))


def jsonl_block(data: bytes, first: int, path: str, options: PrepareOptions) -> TextBlock:
    lines = newlines(data) + (not data.endswith(b"\n"))
    if len(data) <= options.max_document_bytes:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            rows = _line_decoder(options.key).decode_lines(data)
            # decode_lines ignores where lines end, so its result counts only if there is one row per line
            if len(rows) == lines:
                return TextBlock([row.value.encode() for row in rows], np.arange(first, first + lines), [], lines, path)
    return _jsonl_slowly(data, first, path, options)


def _jsonl_slowly(data: bytes, first: int, path: str, options: PrepareOptions) -> TextBlock:
    """Line by line, to say what is wrong with each, and to accept what only Python's parser does (NaN, a BOM)."""
    decoder = _line_decoder(options.key)
    batch = TextBatch(path)
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, first):
        if not line.strip():
            continue
        if len(line) > options.max_document_bytes:
            batch.add(number, b"", too_long("line", options))
            continue
        try:
            batch.add(number, decoder.decode(line).value.encode())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            batch.add(number, *_parse_line(line, options.key))
    return TextBlock(batch.texts, np.array(batch.records, np.int64), batch.bad, len(lines), path)


def too_long(what: str, options: PrepareOptions) -> str:
    """What is wrong with a record of more than --max_document_bytes."""
    limit = f"max_document_bytes={options.max_document_bytes:,}"
    return f"a {what} of more than {limit}; raise it if this is really one document"


def _parse_line(line: bytes, key: str) -> tuple[bytes, str]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return b"", f"invalid UTF-8 at byte {error.start + 1} of the line"
    except (ValueError, RecursionError) as error:
        return b"", f"not valid JSON: {error}"
    return text_of(value, key)


def text_of(value: Any, key: str) -> tuple[bytes, str]:
    """The text of a record, or what is wrong with it."""
    if not isinstance(value, dict):
        return b"", f"a JSON {_json_type(value)} where an object with {key!r} is expected"
    if key not in value:
        names = ", ".join(repr(k) for k in list(value)[:6]) or "none"
        return b"", f"no field {key!r} (fields: {names})"
    text = value[key]
    if not isinstance(text, str):
        return b"", f"field {key!r} is a {_json_type(text)}, not text"
    try:
        return text.encode(), ""
    except UnicodeEncodeError:
        return b"", "half of a surrogate pair, which is not text"


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


class TextBatch:
    """Collects the texts of a block of bounded size."""

    def __init__(self, path: str):
        self.path, self.last = path, 0  # last: the record of the last text
        self._clear()

    def _clear(self) -> None:
        self.texts: list[bytes] = []
        self.records: list[int] = []
        self.bad: list[tuple[int, str]] = []
        self.size = 0

    def add(self, record: int, text: bytes, problem: str = "") -> None:
        """A record's text, or why it has none."""
        if problem:
            self.bad.append((record, problem))
            return
        self.texts.append(text)
        self.records.append(record)
        self.size += len(text)
        self.last = record

    @property
    def is_full(self) -> bool:
        return self.size >= BLOCK_BYTES or len(self.bad) >= 10_000

    def take(self) -> TextBlock:
        count = len(self.texts) + len(self.bad)
        block = TextBlock(self.texts, np.array(self.records, np.int64), self.bad, count, self.path)
        self._clear()
        return block
