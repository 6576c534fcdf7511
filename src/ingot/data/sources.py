"""Documents out of files: json, jsonl, txt, parquet, csv, plain or compressed, in bounded memory.

The input is divided into numbered pieces by a pure function of the file list and sizes, so that any number of workers,
and a second run after a crash, see the same pieces. A piece is what one worker reads on its own: a byte range of a
jsonl file, some row groups of a parquet file, a group of small files. A large compressed file has no such ranges: it is
read once, and handed out in blocks of whole lines (or of texts), each a piece of its own.
"""

import bz2
import codecs
import csv
import glob
import gzip
import io
import json
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from ingot.errors import DataError

PIECE_BYTES = 16 << 20
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".bz2": "bz2", ".zip": "zip"}
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
_READ_BYTES = 1 << 20
_BOMB_FREE = 1 << 26  # output below this is never called a bomb


@dataclass(frozen=True)
class ReadOptions:
    """How documents are taken out of files."""

    key: str = "text"  # field, column
    max_document_bytes: int = 1 << 26
    max_expansion: int = 200  # times its size that a compressed file may grow to


@dataclass(frozen=True)
class SourceFile:
    """One input file: where, how large, and what its name says about it."""

    path: str
    size: int
    mtime_ns: int
    format: str
    compression: str | None


@dataclass(frozen=True)
class Piece:
    """A part of the input that one worker turns into tokens. `how` says which of the other fields count."""

    how: str  # "range" of bytes, "groups" of rows, whole "files", a block of "lines" or of "texts" handed over
    files: tuple[SourceFile, ...]
    start: int = 0
    end: int = 0
    size: int = 0  # bytes on disk, for progress
    first_record: int = 0  # number of the first line or row of a block, from 0


@dataclass
class Block:
    """Some documents, and which records were no documents."""

    texts: list[str]
    records: np.ndarray | None  # record number of each text within the piece's file, or None: first_record + i
    first_record: int
    bad: list[tuple[int, str]]  # (record, what is wrong)
    record_count: int  # lines or rows read, bad and blank ones included
    path: str
    ends: bool = True  # whether the last text ends its document


@dataclass
class BadRecords:
    """Records that are no documents: how many, and the first few."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


def find_files(inputs: Sequence[str | Path]) -> list[SourceFile]:
    """Files, folders and globs to a list of files, in the order given, sorted within each."""
    found: list[SourceFile] = []
    for given in inputs:
        text = os.path.expanduser(str(given))
        if os.path.isdir(text):
            names = sorted(str(p) for p in Path(text).rglob("*") if p.is_file() and _format_of(p.name) is not None)
            if not names:
                raise DataError(f"{given}: no json, jsonl, txt, parquet or csv file in this folder")
        elif os.path.isfile(text):
            names = [text]
        else:
            names = sorted(n for n in glob.glob(text, recursive=True) if os.path.isfile(n))
            if not names:
                raise DataError(f"{given}: no such file")
        found += [_describe(name) for name in names]
    if not found:
        raise DataError("no input files were given")
    return found


def plan_pieces(files: Sequence[SourceFile], whole_files: bool, options: ReadOptions) -> Iterator[tuple[Piece, bytes]]:
    """The pieces of the input in order, each with the bytes handed over (empty if the worker reads by itself).

    whole_files: leave even large compressed files to one worker each, which is better when there are many of them.
    """
    small: list[SourceFile] = []
    weight = 0

    def flush() -> Iterator[tuple[Piece, bytes]]:
        nonlocal small, weight
        if small:
            yield Piece("files", tuple(small), size=sum(f.size for f in small)), b""
        small, weight = [], 0

    for file in files:
        expected = file.size * (4 if file.compression or file.format == "parquet" else 1)
        if expected <= PIECE_BYTES:
            if weight + expected > PIECE_BYTES:
                yield from flush()
            small.append(file)
            weight += expected
            continue
        yield from flush()
        if file.compression is None and file.format == "parquet":
            yield from _parquet_pieces(file, options)
        elif file.compression is None and _is_lines(file):
            for start in range(0, file.size, PIECE_BYTES):
                end = min(start + PIECE_BYTES, file.size)
                yield Piece("range", (file,), start, end, end - start), b""
        elif whole_files or file.format in ("text", "zip"):
            yield Piece("files", (file,), size=file.size), b""
        else:
            yield from _handed_over(file, options)
    yield from flush()


def read_piece(
    piece: Piece, handed: bytes, options: ReadOptions, find_cut: Callable[[str, int, int], int | None]
) -> Iterator[Block]:
    """The documents of a piece, in blocks of bounded size. `find_cut` says where a huge text may be cut."""
    if piece.how == "range":
        yield from _read_range(piece, options)
    elif piece.how == "lines":
        yield _jsonl_block(handed, piece.first_record, piece.files[0].path, options)
    elif piece.how == "texts":
        yield unpack_block(handed)
    elif piece.how == "groups":
        yield from _read_row_groups(piece, options)
    else:
        for file in piece.files:
            yield from _read_file(file, options, find_cut)


def pack_block(block: Block) -> bytes:
    """A block as bytes that travel to a worker: a JSON head, lengths, UTF-8."""
    encoded = [text.encode() for text in block.texts]
    head = json.dumps(
        {
            "records": None if block.records is None else block.records.tolist(),
            "first_record": block.first_record,
            "bad": block.bad,
            "record_count": block.record_count,
            "path": block.path,
        }
    ).encode()
    lengths = np.array([len(e) for e in encoded], dtype="<u4").tobytes()
    return struct.pack("<II", len(head), len(encoded)) + head + lengths + b"".join(encoded)


def unpack_block(data: bytes) -> Block:
    """The block of `pack_block`."""
    head_size, count = struct.unpack_from("<II", data)
    head = json.loads(data[8 : 8 + head_size])
    begin = 8 + head_size + 4 * count
    lengths = np.frombuffer(data, dtype="<u4", count=count, offset=8 + head_size)
    ends = (np.cumsum(lengths, dtype=np.int64) + begin).tolist()
    texts = [data[a:b].decode() for a, b in zip([begin, *ends[:-1]], ends, strict=True)] if count else []
    records = None if head["records"] is None else np.array(head["records"], dtype=np.int64)
    bad = [(int(r), str(why)) for r, why in head["bad"]]
    return Block(texts, records, head["first_record"], bad, head["record_count"], head["path"])


# ---- files ----------------------------------------------------------------------------------------------------------


def _format_of(name: str) -> tuple[str, str | None] | None:
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        inner = FORMATS.get(os.path.splitext(stem)[1])
        if inner is None and compression == "zip":
            inner = "zip"
        return (inner, compression) if inner else None
    known = FORMATS.get(suffix)
    return (known, None) if known else None


def _describe(name: str) -> SourceFile:
    stat = os.stat(name)
    # A file that was named and has no known ending is text: source code, markdown, a LICENSE.
    kind, compression = _format_of(name) or ("text", COMPRESSIONS.get(os.path.splitext(name.lower())[1]))
    if compression == "zip":
        kind = "zip"
    return SourceFile(os.path.abspath(name), stat.st_size, stat.st_mtime_ns, kind, compression)


def _is_lines(file: SourceFile) -> bool:
    """Whether a file holds one JSON object per line; `.json` may also be an array or one object over many lines."""
    if file.format != "json":
        return file.format == "jsonl"
    try:
        with _open(file, ReadOptions()) as stream:
            return _starts_with_line_of_json(stream.read(_READ_BYTES))
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read: {error.strerror or error}") from None


def _starts_with_line_of_json(head: bytes) -> bool:
    line = head.lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)[0]
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return len(line) >= _READ_BYTES // 2 or line.rstrip().endswith(b"}")  # one long line, or a broken one
    return True


class _Guarded(io.RawIOBase):
    """A decompressed stream that names its file in errors, and stops at a decompression bomb."""

    def __init__(self, stream: Any, source: Any, name: str, limit: int):
        self.stream, self.source, self.name, self.limit = stream, source, name, limit
        self.done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.stream.read(len(buffer))
        except (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.name}: damaged or cut short after {self.done:,} bytes of text: {error}") from None
        self.done += len(data)
        if self.done > self.limit:
            raise DataError(
                f"{self.name}: expands to more than {self.limit:,} bytes, which looks like a decompression bomb; "
                "if it is genuine, raise max_expansion"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
            self.source.close()
        super().close()


def _open(file: SourceFile, options: ReadOptions) -> IO[bytes]:
    """A file's bytes, decompressed."""
    try:
        if file.compression is None:
            return open(file.path, "rb")
        source: Any
        stream: Any
        if file.compression == "zstd":
            import pyarrow as pa  # unlike python-zstandard's reader, it notices a file that was cut short

            source = pa.OSFile(file.path, "rb")
            stream = pa.CompressedInputStream(source, "zstd")
        else:
            source = open(file.path, "rb")  # noqa: SIM115  # closed by _Guarded
            opener = {"gzip": gzip.open, "xz": lzma.open, "bz2": bz2.open}[file.compression]
            stream = opener(source, "rb")
    except (OSError, EOFError) as error:
        raise DataError(f"{file.path}: cannot be opened: {error}") from None
    limit = max(_BOMB_FREE, file.size * options.max_expansion)
    return io.BufferedReader(_Guarded(stream, source, file.path, limit), _READ_BYTES)  # type: ignore[type-var, return-value]


def _read_file(
    file: SourceFile, options: ReadOptions, find_cut: Callable[[str, int, int], int | None]
) -> Iterator[Block]:
    if file.format == "zip":
        yield from _read_zip(file, options, find_cut)
    elif file.format == "parquet":
        yield from _read_parquet(file, options)
    else:
        with _open(file, options) as stream:
            yield from _read_stream(stream, file.format, file.path, options, find_cut)


def _read_stream(
    stream: IO[bytes],
    kind: str,
    path: str,
    options: ReadOptions,
    find_cut: Callable[[str, int, int], int | None],
) -> Iterator[Block]:
    if kind == "text":
        yield from _read_text(stream, path, options, find_cut)
    elif kind == "csv":
        yield from _read_csv(stream, path, options)
    elif kind == "parquet":
        raise DataError(f"{path}: parquet inside a compressed file cannot be read; unpack it first")
    else:
        head = stream.peek(_READ_BYTES) if hasattr(stream, "peek") else b""
        if kind == "jsonl" or _starts_with_line_of_json(head):
            first = 0
            for lines in _cut_lines(stream, path, options):
                block = _jsonl_block(lines, first, path, options)
                first += block.record_count
                yield block
        else:
            yield from _read_json_values(stream, path, options)


def _read_zip(
    file: SourceFile, options: ReadOptions, find_cut: Callable[[str, int, int], int | None]
) -> Iterator[Block]:
    try:
        archive = zipfile.ZipFile(file.path)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{file.path}: not a readable zip archive, perhaps cut short: {error}") from None
    with archive:
        members = sorted((m for m in archive.infolist() if not m.is_dir()), key=lambda m: m.filename)
        limit = max(_BOMB_FREE, file.size * options.max_expansion)
        if sum(m.file_size for m in members) > limit:
            raise DataError(
                f"{file.path}: expands to more than {limit:,} bytes, which looks like a decompression bomb; "
                "if it is genuine, raise max_expansion"
            )
        for member in members:
            kind = _format_of(member.filename)
            if kind is None or kind[1] is not None:
                continue
            name = f"{file.path}:{member.filename}"
            try:
                raw = archive.open(member)
            except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError) as error:
                raise DataError(f"{name}: cannot be read from the archive: {error}") from None
            guarded = _Guarded(raw, raw, name, limit)
            with io.BufferedReader(guarded, _READ_BYTES) as stream:  # type: ignore[type-var]
                yield from _read_stream(stream, kind[0], name, options, find_cut)  # type: ignore[arg-type]


# ---- jsonl ----------------------------------------------------------------------------------------------------------


def _cut_lines(stream: IO[bytes], path: str, options: ReadOptions) -> Iterator[bytes]:
    """A stream in blocks of whole lines, of about PIECE_BYTES each."""
    rest = b""
    while data := stream.read(PIECE_BYTES):
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end] if rest else data[:end]
            rest = data[end:]
        else:
            rest += data
            if len(rest) > options.max_document_bytes + PIECE_BYTES:
                raise DataError(_too_long(path, options))
    if rest:
        yield rest


def _read_range(piece: Piece, options: ReadOptions) -> Iterator[Block]:
    """The lines that start within a byte range."""
    path = piece.files[0].path
    try:
        with open(path, "rb") as file:
            start = piece.start
            if start:
                file.seek(start - 1)
                start += len(_read_to_newline(file, path, options)) - 1
            if start >= piece.end:
                return
            data = file.read(piece.end - start)
            if len(data) < piece.end - start:
                raise DataError(f"{path}: became shorter while it was read")
            if not data.endswith(b"\n"):
                data += _read_to_newline(file, path, options)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    block = _jsonl_block(data, 0, path, options)
    if block.bad and start:  # only now is it worth knowing on which line the range begins
        block = _jsonl_block(data, _count_lines(path, start), path, options)
    yield block


def _read_to_newline(file: IO[bytes], path: str, options: ReadOptions) -> bytes:
    parts: list[bytes] = []
    size = 0
    while line := file.readline(_READ_BYTES):
        parts.append(line)
        size += len(line)
        if line.endswith(b"\n"):
            break
        if size > options.max_document_bytes + PIECE_BYTES:
            raise DataError(_too_long(path, options))
    return b"".join(parts)


def _count_lines(path: str, end: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (data := file.read(min(end, _READ_BYTES))):
            count += data.count(b"\n")
            end -= len(data)
    return count


_decoders: dict[str, Any] = {}


def _line_decoder(key: str) -> Any:
    """A JSON decoder that builds nothing but the one field."""
    if key not in _decoders:
        row = msgspec.defstruct("Row", [("value", str)], rename={"value": key})
        _decoders[key] = msgspec.json.Decoder(row)
    return _decoders[key]


def _jsonl_block(data: bytes, first: int, path: str, options: ReadOptions) -> Block:
    decoder = _line_decoder(options.key)
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    try:
        rows = decoder.decode_lines(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        rows = None
    # decode_lines cares little about where lines end, so an equal count is required before it is believed
    if rows is not None and len(rows) == lines:
        texts = [row.value for row in rows]
        if len(data) <= options.max_document_bytes:
            return Block(texts, None, first, [], lines, path)
    return _jsonl_slowly(data, first, path, options)


def _jsonl_slowly(data: bytes, first: int, path: str, options: ReadOptions) -> Block:
    """Line by line, to say what is wrong with each, and to take what only Python's parser takes (NaN, a BOM)."""
    decoder = _line_decoder(options.key)
    texts: list[str] = []
    records: list[int] = []
    bad: list[tuple[int, str]] = []
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        if len(line) > options.max_document_bytes:
            bad.append((first + number, f"a line of {len(line):,} bytes is over max_document_bytes"))
            continue
        try:
            texts.append(decoder.decode(line).value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            value, problem = _parse_line(line, options.key)
            if problem:
                bad.append((first + number, problem))
                continue
            texts.append(value)
        records.append(first + number)
    return Block(texts, np.array(records, dtype=np.int64), first, bad, len(lines), path)


def _parse_line(line: bytes, key: str) -> tuple[str, str]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return "", f"invalid UTF-8 at byte {error.start + 1} of the line"
    except (ValueError, RecursionError) as error:
        return "", f"not valid JSON: {error}"
    return _text_of(value, key)


def _text_of(value: Any, key: str) -> tuple[str, str]:
    """The text of a record, or what is wrong with it."""
    if not isinstance(value, dict):
        return "", f"a JSON {_json_type(value)} where an object with {key!r} is expected"
    if key not in value:
        names = ", ".join(repr(k) for k in list(value)[:6]) or "none"
        return "", f"no field {key!r} (fields: {names})"
    text = value[key]
    if not isinstance(text, str):
        return "", f"field {key!r} is a {_json_type(text)}, not text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "", "half of a surrogate pair, which is no text"
    return text, ""


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _too_long(path: str, options: ReadOptions) -> str:
    return (
        f"{path}: a line is longer than max_document_bytes={options.max_document_bytes:,}; "
        "raise it if that is really one document"
    )


# ---- other formats --------------------------------------------------------------------------------------------------


def _read_text(
    stream: IO[bytes], path: str, options: ReadOptions, find_cut: Callable[[str, int, int], int | None]
) -> Iterator[Block]:
    """A text file is one document; a huge one comes in several blocks, cut where its tokens do not change."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""
    size = 0
    while True:
        data = stream.read(_READ_BYTES)
        problem = "NUL bytes: is this a text file?" if b"\0" in data else ""
        try:
            text += decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            problem = f"invalid UTF-8 near byte {size + error.start + 1}"
        if problem:
            yield Block([], None, 0, [(0, problem)], 1, path)
            return
        size += len(data)
        if not data:
            break
        if len(text) >= PIECE_BYTES:
            cut = find_cut(text, PIECE_BYTES // 2, len(text) - 1)
            if cut is not None:
                yield Block([text[:cut]], None, 0, [], 0, path, ends=False)
                text = text[cut:]
            elif size > options.max_document_bytes:
                yield Block(
                    [], None, 0, [(0, f"a document over max_document_bytes={options.max_document_bytes:,}")], 1, path
                )
                return
    yield Block([text], None, 0, [], 1, path)


def _read_csv(stream: IO[bytes], path: str, options: ReadOptions) -> Iterator[Block]:
    csv.field_size_limit(options.max_document_bytes)
    delimiter = "\t" if ".tsv" in path.lower() else ","
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="strict", newline="")  # type: ignore[type-var]
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    batch = _Batch(path)
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
                batch.bad.append((number, f"only {len(row)} columns"))
            else:
                batch.add(row[column], number)
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
    batch = _Batch(path)
    while True:
        if more and len(buffer) - at < needed:
            data = stream.read(_READ_BYTES)
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
        text, problem = _text_of(value, options.key)
        if problem:
            batch.bad.append((number, problem))
        else:
            batch.add(text, number)
        number += 1
        if batch.is_full:
            yield batch.take()
    yield batch.take()


class _Batch:
    """Collects texts to a block of bounded size."""

    def __init__(self, path: str):
        self.path, self.first, self.last = path, 0, 0
        self._clear()

    def _clear(self) -> None:
        self.texts: list[str] = []
        self.records: list[int] = []
        self.bad: list[tuple[int, str]] = []
        self.size = 0

    def add(self, text: str, record: int) -> None:
        self.texts.append(text)
        self.records.append(record)
        self.size += len(text)
        self.last = record

    @property
    def is_full(self) -> bool:
        return self.size >= PIECE_BYTES or len(self.bad) >= 10_000

    def take(self) -> Block:
        count = len(self.texts) + len(self.bad)
        block = Block(self.texts, np.array(self.records, np.int64), self.first, self.bad, count, self.path)
        self.first += count
        self._clear()
        return block


# ---- parquet --------------------------------------------------------------------------------------------------------


def _open_parquet(path: str, key: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path, memory_map=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from None
    names = table.schema_arrow.names
    if key not in names:
        raise DataError(f"{path}: no column {key!r} (columns: {', '.join(names[:8])})")
    kind = table.schema_arrow.field(key).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)):
        raise DataError(f"{path}: column {key!r} holds {kind}, not text")
    return table


def _parquet_pieces(file: SourceFile, options: ReadOptions) -> Iterator[tuple[Piece, bytes]]:
    """Row groups, several small ones together; a file of one huge row group is handed over in blocks."""
    table = _open_parquet(file.path, options.key)
    column = table.schema_arrow.names.index(options.key)
    sizes = [_column_bytes(table, group, column) for group in range(table.num_row_groups)]
    if max(sizes, default=0) > 4 * PIECE_BYTES:
        yield from _handed_over(file, options)
        return
    start, weight = 0, 0
    total = sum(sizes) or 1
    for group, size in enumerate(sizes):
        weight += size
        if weight >= PIECE_BYTES or group == len(sizes) - 1:
            first = sum(table.metadata.row_group(g).num_rows for g in range(start))
            yield Piece("groups", (file,), start, group + 1, file.size * weight // total, first), b""
            start, weight = group + 1, 0


def _column_bytes(table: Any, group: int, column: int) -> int:
    # schema_arrow lists top-level fields; nested ones shift the physical columns, so look the name up there
    name = table.schema_arrow.names[column]
    row_group = table.metadata.row_group(group)
    for index in range(row_group.num_columns):
        if row_group.column(index).path_in_schema == name:
            return int(row_group.column(index).total_uncompressed_size)
    return int(row_group.total_byte_size)


def _read_row_groups(piece: Piece, options: ReadOptions) -> Iterator[Block]:
    path = piece.files[0].path
    yield from _read_batches(path, options, range(piece.start, piece.end), piece.first_record)


def _read_parquet(file: SourceFile, options: ReadOptions) -> Iterator[Block]:
    yield from _read_batches(file.path, options, None, 0)


def _read_batches(path: str, options: ReadOptions, groups: range | None, first: int) -> Iterator[Block]:
    import pyarrow as pa

    table = _open_parquet(path, options.key)
    try:
        rows = 4096
        wanted = list(groups) if groups is not None else None
        for batch in table.iter_batches(batch_size=rows, row_groups=wanted, columns=[options.key], use_threads=False):
            column = batch.column(0)
            try:
                texts = column.to_pylist()
                bad: list[tuple[int, str]] = []
                records = None
            except UnicodeDecodeError:
                texts, bad = _decode_rows(column, first)
            if None in texts:
                bad += [
                    (first + i, "null, not text")
                    for i, t in enumerate(texts)
                    if t is None and (first + i) not in dict(bad)
                ]
            if bad:
                records = np.array([first + i for i, t in enumerate(texts) if t is not None], dtype=np.int64)
                texts = [t for t in texts if t is not None]
            yield Block(texts, records, first, sorted(bad), len(column), path)
            first += len(column)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: damaged after row {first:,}: {error}") from None


def _decode_rows(column: Any, first: int) -> tuple[list[str | None], list[tuple[int, str]]]:
    import pyarrow as pa

    texts: list[str | None] = []
    bad: list[tuple[int, str]] = []
    for index, value in enumerate(column.cast(pa.large_binary()).to_pylist()):
        try:
            texts.append(None if value is None else value.decode())
        except UnicodeDecodeError as error:
            texts.append(None)
            bad.append((first + index, f"invalid UTF-8 at byte {error.start + 1}"))
    return texts, bad


# ---- blocks that are handed over ------------------------------------------------------------------------------------


def _handed_over(file: SourceFile, options: ReadOptions) -> Iterator[tuple[Piece, bytes]]:
    """Blocks of a file that only one process can read, cut without looking into them where lines allow it."""
    done = 0
    if file.format == "parquet":
        for block in _read_parquet(file, options):
            yield Piece("texts", (file,), size=sum(map(len, block.texts)) // 2), pack_block(block)
    elif _is_lines(file):
        first = 0
        with _open(file, options) as stream:
            for lines in _cut_lines(stream, file.path, options):
                before, done = done, _position(stream)
                yield Piece("lines", (file,), size=done - before, first_record=first), lines
                first += lines.count(b"\n")
    else:
        with _open(file, options) as stream:
            for block in _read_stream(stream, file.format, file.path, options, lambda text, low, high: None):
                before, done = done, _position(stream)
                yield Piece("texts", (file,), size=done - before), pack_block(block)


def _position(stream: IO[bytes]) -> int:
    """How much of the file on disk has been read."""
    raw = getattr(stream, "raw", None)
    return int(raw.source.tell()) if isinstance(raw, _Guarded) else int(stream.tell())
