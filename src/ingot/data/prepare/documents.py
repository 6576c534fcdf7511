"""Documents out of a stream of bytes: jsonl, json, txt, csv, parquet, zip, in blocks of bounded size.

What is no document (a broken line, a missing field, invalid UTF-8) is not an exception here but an entry of its block,
with the number of its record, so that the caller decides between stopping and leaving it out.
"""

import codecs
import contextlib
import csv
import functools
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any

import msgspec
import numpy as np

from ingot.data.prepare.input_files import (
    READ_BYTES,
    Guarded,
    ReadOptions,
    SourceFile,
    expansion_limit,
    format_of,
    is_readable_member,
    is_url,
    open_file,
    open_raw,
    starts_with_line_of_json,
)
from ingot.errors import DataError

BLOCK_BYTES = 8 << 20

FindCut = Callable[[str, int, int], int | None]
"""Where a huge text may be cut between two places, if anywhere."""


@dataclass
class Block:
    """Some documents, and which records were no documents."""

    texts: list[bytes]  # UTF-8, which is what the fast engine takes
    records: np.ndarray | None  # record number of each text within the piece's file, or None: first_record + i
    first_record: int
    bad: list[tuple[int, str]]  # (record, what is wrong)
    record_count: int  # lines or rows read, bad and blank ones included
    path: str
    ends: bool = True  # whether the last text ends its document


def read_file(file: SourceFile, options: ReadOptions, find_cut: FindCut) -> Iterator[Block]:
    if file.format == "zip":
        yield from _read_zip(file, options, find_cut)
    elif file.format == "parquet" and file.compression is None:
        yield from read_batches(file.path, options)
    else:
        with open_file(file, options) as stream:
            yield from read_stream(stream, file.format, file.path, options, find_cut)


def read_stream(stream: IO[bytes], kind: str, path: str, options: ReadOptions, find_cut: FindCut) -> Iterator[Block]:
    if kind == "text":
        yield from _read_text(stream, path, options, find_cut)
    elif kind == "csv":
        yield from _read_csv(stream, path, options)
    elif kind == "parquet":
        raise DataError(f"{path}: parquet inside a compressed file cannot be read; unpack it first")
    else:
        head = stream.peek(READ_BYTES) if hasattr(stream, "peek") else b""
        if kind == "jsonl" or starts_with_line_of_json(head):
            first = 0
            for lines in cut_lines(stream, options):
                block = jsonl_block(lines, first, path, options)
                first += block.record_count
                yield block
        else:
            yield from _read_json_values(stream, path, options)


def _read_zip(file: SourceFile, options: ReadOptions, find_cut: FindCut) -> Iterator[Block]:
    try:
        archive = zipfile.ZipFile(open_raw(file.path))
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{file.path}: not a readable zip archive, perhaps cut short: {error}") from None
    limit = expansion_limit(file, options)
    with archive:
        members = sorted((m for m in archive.infolist() if not m.is_dir()), key=lambda m: m.filename)
        for member in members:
            kind = format_of(member.filename)
            if kind is None or not is_readable_member(member.filename):
                continue
            name = f"{file.path}:{member.filename}"
            try:
                raw = archive.open(member)
            except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError) as error:
                raise DataError(f"{name}: cannot be read from the archive: {error}") from None
            guarded = Guarded(raw, raw, name, limit)
            with io.BufferedReader(guarded, READ_BYTES) as stream:
                yield from read_stream(stream, kind[0], name, options, find_cut)
            limit -= guarded.done


def cut_lines(stream: IO[bytes], options: ReadOptions) -> Iterator[bytes]:
    """A stream in blocks of whole lines, of about BLOCK_BYTES each. Of an overlong line only so much is kept that it
    can be seen to be one."""
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


def read_to_newline(file: IO[bytes], limit: int) -> bytes:
    """What is left of a line, up to a number of bytes."""
    return file.readline(limit)


def newlines(data: bytes) -> int:
    """How many there are; `bytes.count` is four times slower."""
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


def jsonl_block(data: bytes, first: int, path: str, options: ReadOptions) -> Block:
    lines = newlines(data) + (not data.endswith(b"\n"))
    if len(data) <= options.max_document_bytes:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            rows = _line_decoder(options.key).decode_lines(data)
            # decode_lines cares little about where lines end, so an equal count is required before it is believed
            if len(rows) == lines:
                return Block([row.value.encode() for row in rows], None, first, [], lines, path)
    return _jsonl_slowly(data, first, path, options)


def _jsonl_slowly(data: bytes, first: int, path: str, options: ReadOptions) -> Block:
    """Line by line, to say what is wrong with each, and to take what only Python's parser takes (NaN, a BOM)."""
    decoder = _line_decoder(options.key)
    batch = Batch(path)
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, first):
        if not line.strip():
            continue
        if len(line) > options.max_document_bytes:
            limit = f"max_document_bytes={options.max_document_bytes:,}"
            batch.add(number, b"", f"a line of more than {limit}; raise it if that is really one document")
            continue
        try:
            batch.add(number, decoder.decode(line).value.encode())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            batch.add(number, *_parse_line(line, options.key))
    return Block(batch.texts, np.array(batch.records, np.int64), first, batch.bad, len(lines), path)


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
        return b"", "half of a surrogate pair, which is no text"


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _read_text(stream: IO[bytes], path: str, options: ReadOptions, find_cut: FindCut) -> Iterator[Block]:
    """A text file is one document; a huge one comes in several blocks, cut where its tokens do not change."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""
    size = 0
    while True:
        data = stream.read(READ_BYTES)
        problem = "NUL bytes: is this a text file?" if b"\0" in data else ""
        try:
            text += decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            problem = f"invalid UTF-8 near byte {size + error.start + 1}"
        size += len(data)
        if data and not problem and len(text) >= BLOCK_BYTES:
            cut = find_cut(text, BLOCK_BYTES // 2, len(text) - 1)
            if cut is not None:
                yield Block([text[:cut].encode()], None, 0, [], 0, path, ends=False)
                text = text[cut:]
            elif size > options.max_document_bytes:
                problem = f"a document over max_document_bytes={options.max_document_bytes:,}"
        if problem:
            yield Block([], None, 0, [(0, problem)], 1, path)
            return
        if not data:
            break
    yield Block([text.encode()], None, 0, [], 1, path)


def _read_csv(stream: IO[bytes], path: str, options: ReadOptions) -> Iterator[Block]:
    csv.field_size_limit(options.max_document_bytes)
    delimiter = "\t" if ".tsv" in path.lower() else ","
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="strict", newline="")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    batch = Batch(path)
    try:
        header = next(reader, None)
        if header is None:
            return
        if options.key not in header:
            raise DataError(f"{path}: no column {options.key!r} (columns: {', '.join(header[:8])})")
        column = header.index(options.key)
        for number, row in enumerate(reader, 1):
            if not row:
                continue
            if column >= len(row):
                batch.add(number, b"", f"only {len(row)} columns")
            else:
                batch.add(number, row[column].encode())
            if batch.is_full:
                yield batch.take()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: row {batch.last + 1}: invalid UTF-8: {error.reason}") from None
    except csv.Error as error:
        raise DataError(f"{path}: row {batch.last + 1}: not valid CSV: {error}") from None
    finally:
        lines.detach()
    yield batch.take()


def _read_json_values(stream: IO[bytes], path: str, options: ReadOptions) -> Iterator[Block]:
    """A JSON array of objects, or objects one after another, without ever holding more than one of them."""
    decoder = json.JSONDecoder()
    incoming = codecs.getincrementaldecoder("utf-8-sig")()
    buffer, at, number, more, needed = "", 0, 0, True, 1
    in_array = None
    batch = Batch(path)
    while True:
        if more and len(buffer) - at < needed:
            data = stream.read(READ_BYTES)
            more = bool(data)
            try:
                buffer = buffer[at:] + incoming.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: invalid UTF-8 after record {number}: {error.reason}") from None
            at = 0
        while at < len(buffer) and (buffer[at] in " \t\r\n" or (buffer[at] == "," and in_array and number)):
            at += 1
        if at == len(buffer):
            if more:
                needed = 1
                continue
            break
        if in_array is None:
            in_array = buffer[at] == "["
            at += in_array
            continue
        if in_array and buffer[at] == "]":
            break
        try:
            value, at = decoder.raw_decode(buffer, at)
        except ValueError as error:
            if more and len(buffer) - at <= options.max_document_bytes:
                needed = 2 * (len(buffer) - at)
                continue
            raise DataError(f"{path}: record {number + 1}: not valid JSON: {error}") from None
        needed = 1
        batch.add(number, *text_of(value, options.key))
        number += 1
        if batch.is_full:
            yield batch.take()
    yield batch.take()


class Batch:
    """Collects texts to a block of bounded size."""

    def __init__(self, path: str):
        self.path, self.first, self.last = path, 0, 0  # last: the record of the last text
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

    def take(self) -> Block:
        count = len(self.texts) + len(self.bad)
        block = Block(self.texts, np.array(self.records, np.int64), self.first, self.bad, count, self.path)
        self.first += count
        self._clear()
        return block


def open_parquet(path: str, key: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(open_raw(path) if is_url(path) else path, memory_map=not is_url(path))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from None
    names = table.schema_arrow.names
    if key not in names:
        raise DataError(f"{path}: no column {key!r} (columns: {', '.join(names[:8])})")
    kind = table.schema_arrow.field(key).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)):
        raise DataError(f"{path}: column {key!r} holds {kind}, not text")
    return table


def read_batches(path: str, options: ReadOptions, groups: range | None = None, first: int = 0) -> Iterator[Block]:
    """The texts of a parquet column, or of some row groups of it; `first` is the number of their first row."""
    import pyarrow as pa

    table = open_parquet(path, options.key)
    wanted = groups if groups is not None else range(table.num_row_groups)
    size = sum(column_bytes(table, group, options.key) for group in wanted)
    rows = sum(table.metadata.row_group(group).num_rows for group in wanted)
    at_once = max(1, min(1 << 16, BLOCK_BYTES * rows // max(size, 1)))
    try:
        for batch in table.iter_batches(at_once, row_groups=list(wanted), columns=[options.key], use_threads=False):
            column = batch.column(0)
            yield _column_block(column, first, path)
            first += len(column)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: damaged after row {first:,}: {error}") from None


def _column_block(column: Any, first: int, path: str) -> Block:
    """Texts straight out of Arrow's memory: as Python strings they would be copied and encoded once more."""
    import pyarrow as pa

    whole = column.cast(pa.large_string())
    _, offsets, data = whole.buffers()
    ends = np.frombuffer(offsets, np.int64, len(whole) + 1, 8 * whole.offset)
    text = memoryview(data)[ends[0] : ends[-1]].tobytes() if data is not None else b""
    texts = [text[a:b] for a, b in pairwise((ends - ends[0]).tolist())]
    wrong: dict[int, str] = {}
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        for row, value in enumerate(texts):
            try:
                value.decode()
            except UnicodeDecodeError as error:
                wrong[row] = f"invalid UTF-8 at byte {error.start + 1}"
    if whole.null_count:
        wrong |= dict.fromkeys(np.flatnonzero(whole.is_null().to_numpy(False)).tolist(), "null, not text")
    if not wrong:
        return Block(texts, None, first, [], len(whole), path)
    right = [row for row in range(len(texts)) if row not in wrong]
    bad = [(first + row, wrong[row]) for row in sorted(wrong)]
    return Block([texts[row] for row in right], np.array(right, np.int64) + first, first, bad, len(whole), path)


def column_bytes(table: Any, group: int, name: str) -> int:
    """Bytes of a column in a row group. Nested columns come first or last, so it is looked up by name."""
    row_group = table.metadata.row_group(group)
    for index in range(row_group.num_columns):
        if row_group.column(index).path_in_schema == name:
            return int(row_group.column(index).total_uncompressed_size)
    return int(row_group.total_byte_size)
