"""Documents of plain text: a whole file, or its lines, paragraphs, or what is between separators (`--documents`).

A file that is divided is read in blocks that end with a document, so it is never held whole, and blocks depend on the
file alone. A file that is one document, however large, comes in blocks too, cut where its tokens do not change.
"""

import codecs
import functools
import re
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np

from ingot.data.prepare.options import PrepareOptions
from ingot.data.sources import documents
from ingot.data.sources.documents import TextBlock, too_long
from ingot.data.sources.input_files import READ_BYTES

FindCut = Callable[[str, int, int], int | None]
"""Finds where a huge text may be cut between two positions, if anywhere."""

_BLANK_LINES = rb"\n(?:[ \t\r\f\v]*\n)+"
_BLANK_BEGINNING = re.compile(rb"\A(?:[ \t\r\f\v]*\n)+")
_OVERLAP = 4096  # bytes before a block in which a separator may begin
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_UTF16_PROBLEM = "UTF-16; convert it first: iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE"
_BINARY_PROBLEM = "NUL bytes: is this a text file?"


def read_text(stream: IO[bytes], path: str, options: PrepareOptions, find_cut: FindCut) -> Iterator[TextBlock]:
    """The documents of a text file."""
    if options.documents == "file":
        yield from _read_whole(stream, path, options, find_cut)
        return
    first = 0
    for data in cut_documents(stream, options):
        block = text_block(data, first, path, options)
        first += block.record_count
        yield block


def cut_documents(stream: IO[bytes], options: PrepareOptions) -> Iterator[bytes]:
    """A stream in blocks that end after a separator. Of a document that is too long only the first part is kept,
    enough to recognize it as such."""
    pattern, limit = _separator(options.documents), options.max_document_bytes
    rest = b""
    while data := stream.read(documents.BLOCK_BYTES):
        fresh = max(0, len(rest) - _OVERLAP)
        rest += data
        if options.documents == "line":
            end = rest.rfind(b"\n", fresh) + 1
        else:  # a match at the very end may continue in the next block
            end = max((m.end() for m in pattern.finditer(rest, fresh) if m.end() < len(rest)), default=0)
        if end:
            yield rest[:end]
            rest = rest[end:]
        elif len(rest) > limit + _OVERLAP + documents.BLOCK_BYTES:
            rest = rest[: limit + 1] + rest[-_OVERLAP:]
    if rest:
        yield rest


def count_documents(data: bytes, options: PrepareOptions) -> int:
    """How many documents a block of whole ones holds, empty ones included."""
    parts = _separator(options.documents).split(data)
    return len(parts) - (not parts[-1])


def text_block(data: bytes, first: int, path: str, options: PrepareOptions) -> TextBlock:
    """The documents of a block of whole ones; `first` is the number of its first document in the file."""
    if first == 0 and data.startswith(_UTF16):
        return TextBlock([], np.zeros(0, np.int64), [(0, _UTF16_PROBLEM)], 1, path)
    if first == 0:
        data = data.removeprefix(codecs.BOM_UTF8)
    if options.documents == "paragraph":  # a block may begin within blank lines
        data = _BLANK_BEGINNING.sub(b"", data)
    parts = data.split(b"\n") if options.documents == "line" else _separator(options.documents).split(data)
    if not parts[-1]:
        parts.pop()
    bad = [] if _is_good(data) and max(map(len, parts), default=0) <= options.max_document_bytes else [
        (number, problem) for number, part in enumerate(parts, first) if (problem := _problem(part, options))
    ]  # fmt: skip
    for number, _ in bad:
        parts[number - first] = b""
    texts = [part.strip(b"\r\n") for part in parts]
    kept = [index for index, text in enumerate(texts) if text and not text.isspace()]
    records = np.array(kept, np.int64) + first
    return TextBlock([texts[index] for index in kept], records, bad, len(parts), path)


@functools.cache
def _separator(kind: str) -> re.Pattern[bytes]:
    """What is between two documents. A separator may spell line breaks and tabs as `\\n`, `\\r`, `\\t`, `\\f`."""
    if kind in ("line", "paragraph"):
        return re.compile(rb"\n" if kind == "line" else _BLANK_LINES)
    escapes = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\"}
    text = re.sub(r"\\([nrtf\\])", lambda match: escapes[match[1]], kind)
    return re.compile(re.escape(text.encode()))


def _is_good(data: bytes) -> bool:
    try:
        return b"\0" not in data and data.decode() is not None
    except UnicodeDecodeError:
        return False


def _problem(part: bytes, options: PrepareOptions) -> str:
    if len(part) > options.max_document_bytes:
        return too_long("document", options)
    if b"\0" in part:
        return _BINARY_PROBLEM
    try:
        part.decode()
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start + 1} of the document"
    return ""


def _read_whole(stream: IO[bytes], path: str, options: PrepareOptions, find_cut: FindCut) -> Iterator[TextBlock]:
    """A text file is one document; a huge one comes in several blocks, cut where its tokens do not change."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    only = np.zeros(1, np.int64)  # the number of the one document
    text = ""
    size = 0
    while True:
        data = stream.read(READ_BYTES)
        problem = _BINARY_PROBLEM if b"\0" in data else ""
        try:
            text += decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            problem = f"invalid UTF-8 near byte {size + error.start + 1}"
        if not size and data.startswith(_UTF16):
            problem = _UTF16_PROBLEM
        size += len(data)
        if data and not problem and len(text) >= documents.BLOCK_BYTES:
            cut = find_cut(text, documents.BLOCK_BYTES // 2, len(text) - 1)
            if cut is not None:
                yield TextBlock([text[:cut].encode()], only, [], 0, path, ends=False)
                text = text[cut:]
            elif size > options.max_document_bytes:
                problem = too_long("document", options)
        if problem:
            yield TextBlock([], only[:0], [(0, problem)], 1, path)
            return
        if not data:
            break
    yield TextBlock([text.encode()], only, [], 1, path)
