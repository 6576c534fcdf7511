"""Divides the input into pieces, and reads a piece: json, jsonl, txt, parquet, csv, plain or compressed.

Pieces are a pure function of the file list and sizes, so any number of workers, and a second run after a crash, see the
same ones. A piece is what one worker reads by itself: a byte range of a jsonl file, some row groups of a parquet file,
a group of small files. A large compressed file cannot be divided like that: it is read by the caller, and each block of
whole lines (or of texts) is a piece that carries its content.
"""

import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from ingot.data.prepare.options import PrepareOptions
from ingot.data.sources import documents, plain_text
from ingot.data.sources.documents import TextBlock
from ingot.data.sources.hub import read_hub
from ingot.data.sources.input_files import (
    READ_BYTES,
    Guarded,
    SourceFile,
    expansion_limit,
    is_lines,
    open_file,
    open_raw,
    starts_with_line_of_json,
)
from ingot.data.sources.suffixes import format_of, is_readable_member
from ingot.data.sources.table_readers import column_bytes, open_parquet, read_batches, read_csv, read_json_values
from ingot.errors import DataError

PIECE_BYTES = documents.BLOCK_BYTES
_COUNTED_BYTES = 1 << 30  # skipped bad lines beyond this get no line number: counting lines means reading them


@dataclass(frozen=True)
class Piece:
    """A part of the input that one worker turns into tokens. `how` says which of the other fields count."""

    how: str  # "range" of bytes, "groups" of rows, whole "files", or a block of "lines" or "texts"
    files: tuple[SourceFile, ...]
    start: int = 0
    end: int = 0
    size: int = 0  # bytes on disk, for progress
    first_record: int = 0  # number of the first line or row of a block, from 0
    lines: bytes = b""  # or whole documents of a text file
    texts: TextBlock | None = None


def plan_pieces(files: Sequence[SourceFile], whole_files: bool, options: PrepareOptions) -> Iterator[Piece]:
    """The pieces of the input, in order.

    whole_files: leave even large compressed files to one worker each, which is better when there are many of them.
    """
    small: list[SourceFile] = []  # files that become one piece
    small_bytes = 0
    for file in files:
        expected = file.size * (4 if file.compression or file.format == "parquet" else 1)
        is_small = expected <= PIECE_BYTES and file.format != "hub"
        if small and (not is_small or small_bytes + expected > PIECE_BYTES):
            yield _files_piece(small)
            small, small_bytes = [], 0
        if is_small:
            small.append(file)
            small_bytes += expected
        elif file.format == "hub":
            for block in read_hub(file.path, options):
                yield Piece("texts", (file,), texts=block)
        elif file.compression is None and file.format == "parquet":
            yield from _parquet_pieces(file, options)
        elif file.compression is None and (is_lines(file) or (file.format == "text" and options.documents == "line")):
            for start in range(0, file.size, PIECE_BYTES):
                end = min(start + PIECE_BYTES, file.size)
                yield Piece("range", (file,), start, end, end - start)
        elif whole_files or file.format == "zip" or (file.format == "text" and options.documents == "file"):
            yield _files_piece([file])
        else:
            yield from _read_here(file, options)
    if small:
        yield _files_piece(small)


def _files_piece(files: list[SourceFile]) -> Piece:
    return Piece("files", tuple(files), size=sum(f.size for f in files))


def read_piece(piece: Piece, options: PrepareOptions, find_cut: plain_text.FindCut) -> Iterator[TextBlock]:
    """The documents of a piece, in blocks of bounded size. `find_cut` says where a huge text may be cut."""
    path = piece.files[0].path
    if piece.how == "range":
        yield from _read_range(piece, options)
    elif piece.how == "lines":
        yield _block_reader(piece.files[0])(piece.lines, piece.first_record, path, options)
    elif piece.texts:
        yield piece.texts
    elif piece.how == "groups":
        yield from read_batches(path, options, range(piece.start, piece.end), piece.first_record)
    else:
        for file in piece.files:
            yield from read_file(file, options, find_cut)


def read_file(file: SourceFile, options: PrepareOptions, find_cut: plain_text.FindCut) -> Iterator[TextBlock]:
    if file.format == "zip":
        yield from _read_zip(file, options, find_cut)
    elif file.format == "parquet" and file.compression is None:
        yield from read_batches(file.path, options)
    else:
        with open_file(file, options) as stream:
            yield from _read_stream(stream, file.format, file.path, options, find_cut)


def _read_stream(
    stream: IO[bytes], kind: str, path: str, options: PrepareOptions, find_cut: plain_text.FindCut
) -> Iterator[TextBlock]:
    if kind == "text":
        yield from plain_text.read_text(stream, path, options, find_cut)
    elif kind == "csv":
        yield from read_csv(stream, path, options)
    elif kind == "parquet":
        raise DataError(f"{path}: parquet inside a compressed file cannot be read; unpack it first")
    else:
        head = stream.peek(READ_BYTES) if hasattr(stream, "peek") else b""
        if kind == "jsonl" or starts_with_line_of_json(head):
            first = 0
            for lines in documents.cut_lines(stream, options):
                block = documents.jsonl_block(lines, first, path, options)
                first += block.record_count
                yield block
        else:
            yield from read_json_values(stream, path, options)


def _read_zip(file: SourceFile, options: PrepareOptions, find_cut: plain_text.FindCut) -> Iterator[TextBlock]:
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
                yield from _read_stream(stream, kind[0], name, options, find_cut)
            limit -= guarded.done


def _block_reader(file: SourceFile) -> Callable[[bytes, int, str, PrepareOptions], TextBlock]:
    """Turns whole lines, or whole documents of a text file, into texts."""
    return plain_text.text_block if file.format == "text" else documents.jsonl_block


def _read_range(piece: Piece, options: PrepareOptions) -> Iterator[TextBlock]:
    """The lines that start within a byte range."""
    path, read_block = piece.files[0].path, _block_reader(piece.files[0])
    try:
        with open_raw(path) as file:
            start = piece.start
            if start:
                file.seek(start - 1)
                start += len(file.readline(piece.end - start + 1)) - 1
            if start >= piece.end:  # all of it belongs to a line that starts before
                return
            data = file.read(piece.end - start)
            if len(data) < piece.end - start:
                raise DataError(f"{path}: became shorter while it was read")
            if not data.endswith(b"\n"):
                data += file.readline(options.max_document_bytes + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    block = read_block(data, 0, path, options)
    if block.bad and start:  # only now is it worth knowing on which line the range begins
        if start < _COUNTED_BYTES or options.on_error != "skip":
            block = read_block(data, documents.count_lines(path, start), path, options)
        else:
            block.path = f"{path} (from byte {start:,})"
    yield block


def _parquet_pieces(file: SourceFile, options: PrepareOptions) -> Iterator[Piece]:
    """Row groups, several small ones together; a file of one huge row group is read here."""
    table = open_parquet(file.path, options.key)
    sizes = [column_bytes(table, group, options.key) for group in range(table.num_row_groups)]
    if max(sizes, default=0) > 4 * PIECE_BYTES:
        yield from _read_here(file, options)
        return
    start, weight = 0, 0
    total = sum(sizes) or 1
    for group, size in enumerate(sizes):
        weight += size
        if weight >= PIECE_BYTES or group == len(sizes) - 1:
            first = sum(table.metadata.row_group(g).num_rows for g in range(start))
            yield Piece("groups", (file,), start, group + 1, file.size * weight // total, first)
            start, weight = group + 1, 0


def _read_here(file: SourceFile, options: PrepareOptions) -> Iterator[Piece]:
    """Blocks of a file that only one process can read. Lines are left to the workers to parse."""
    if file.format == "parquet":
        for block in read_batches(file.path, options):
            yield Piece("texts", (file,), size=sum(map(len, block.texts)) // 2, texts=block)
        return
    first = done = 0
    with open_file(file, options) as stream:
        if file.format == "text" or is_lines(file):
            cut = plain_text.cut_documents if file.format == "text" else documents.cut_lines
            for lines in cut(stream, options):
                before, done = done, _position(stream)
                yield Piece("lines", (file,), size=done - before, first_record=first, lines=lines)
                if file.format != "text" or options.documents == "line":
                    first += documents.newlines(lines)
                else:
                    first += plain_text.count_documents(lines, options)
        else:
            for block in _read_stream(stream, file.format, file.path, options, lambda text, low, high: None):
                before, done = done, _position(stream)
                yield Piece("texts", (file,), size=done - before, texts=block)


def _position(stream: IO[bytes]) -> int:
    """How much of the file on disk has been read."""
    raw = getattr(stream, "raw", None)
    return int(raw.source.tell()) if isinstance(raw, Guarded) else int(stream.tell())
