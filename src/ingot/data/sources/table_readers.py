"""Documents from tables and JSON values: csv, json arrays and objects, parquet."""

import codecs
import csv
import io
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import IO, Any

import numpy as np

from ingot.data.prepare.options import PrepareOptions
from ingot.data.sources import documents
from ingot.data.sources.documents import TextBatch, TextBlock, text_of
from ingot.data.sources.input_files import READ_BYTES, open_raw
from ingot.errors import DataError
from ingot.storage.object_store import is_url


def read_csv(stream: IO[bytes], path: str, options: PrepareOptions) -> Iterator[TextBlock]:
    csv.field_size_limit(options.max_document_bytes)
    delimiter = "\t" if ".tsv" in path.lower() else ","
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="strict", newline="")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    batch = TextBatch(path)
    try:
        header = next(reader, None)
        if header is None:
            return
        if options.key not in header:
            columns = ", ".join(header[:8])
            batch.add(0, b"", f"no column {options.key!r} (columns: {columns}); --json_keys names another")
            yield batch.take()
            return
        column = header.index(options.key)
        for number, row in enumerate(reader, 1):
            if not row:
                continue
            problem = f"{len(row)} columns, but the header has {len(header)}" if len(row) != len(header) else ""
            batch.add(number, b"" if problem else row[column].encode(), problem)
            if batch.is_full:
                yield batch.take()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: row {batch.last + 1}: invalid UTF-8: {error.reason}") from None
    except csv.Error as error:
        raise DataError(f"{path}: row {batch.last + 1}: not valid CSV: {error}") from None
    finally:
        lines.detach()
    yield batch.take()


def read_json_values(stream: IO[bytes], path: str, options: PrepareOptions) -> Iterator[TextBlock]:
    """A JSON array of objects, or objects one after another, without ever holding more than one of them."""
    decoder = json.JSONDecoder()
    incoming = codecs.getincrementaldecoder("utf-8-sig")()
    buffer, at, number, more, needed = "", 0, 0, True, 1
    in_array = None
    batch = TextBatch(path)
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
            if in_array:
                raise DataError(f"{path}: the array does not end after record {number}; the file is truncated")
            break
        if in_array is None:
            in_array = buffer[at] == "["
            at += in_array
            continue
        if in_array and buffer[at] == "]":
            break
        try:
            value, at = decoder.raw_decode(buffer, at)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ValueError) and more and len(buffer) - at <= options.max_document_bytes:
                needed = 2 * (len(buffer) - at)
                continue
            if not number:  # the file is something else
                batch.add(0, b"", f"not valid JSON: {error}")
                break
            raise DataError(f"{path}: record {number + 1}: not valid JSON: {error}") from None
        needed = 1
        batch.add(number, *text_of(value, options.key))
        number += 1
        if batch.is_full:
            yield batch.take()
    yield batch.take()


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


def read_batches(
    path: str, options: PrepareOptions, groups: range | None = None, first: int = 0
) -> Iterator[TextBlock]:
    """The texts of a parquet column, or of some row groups of it; `first` is the number of their first row."""
    import pyarrow as pa

    table = open_parquet(path, options.key)
    wanted = groups if groups is not None else range(table.num_row_groups)
    size = sum(column_bytes(table, group, options.key) for group in wanted)
    rows = sum(table.metadata.row_group(group).num_rows for group in wanted)
    at_once = max(1, min(1 << 16, documents.BLOCK_BYTES * rows // max(size, 1)))
    try:
        for batch in table.iter_batches(at_once, row_groups=list(wanted), columns=[options.key], use_threads=False):
            column = batch.column(0)
            yield _column_block(column, first, path)
            first += len(column)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: damaged after row {first:,}: {error}") from None


def _column_block(column: Any, first: int, path: str) -> TextBlock:
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
    bad = [(first + row, wrong[row]) for row in sorted(wrong)]
    rows = np.setdiff1d(np.arange(len(texts)), list(wrong))
    return TextBlock([texts[row] for row in rows.tolist()], rows + first, bad, len(whole), path)


def column_bytes(table: Any, group: int, name: str) -> int:
    """Bytes of a column in a row group. Nested columns come first or last, so it is looked up by name."""
    row_group = table.metadata.row_group(group)
    for index in range(row_group.num_columns):
        if row_group.column(index).path_in_schema == name:
            return int(row_group.column(index).total_uncompressed_size)
    return int(row_group.total_byte_size)
