"""Finds the input files, and opens them: plain or compressed, on a disk or in an object store."""

import bz2
import fnmatch
import glob
import io
import json
import lzma
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ingot.data.prepare.options import PrepareOptions
from ingot.data.sources.suffixes import COMPRESSIONS, count_by_suffix, format_of, is_readable_member, suffix_of
from ingot.errors import DataError
from ingot.plurals import count_of
from ingot.storage.object_store import Remote, RemoteFile, is_url

TEXT_UNITS = ("file", "line", "paragraph")
READ_BYTES = 1 << 20
HUB = "hf://"
_BOMB_FREE = 1 << 26  # output below this is never called a bomb


@dataclass(frozen=True)
class SourceFile:
    """One input file: where, how large, and what its name says about it."""

    path: str
    size: int
    mtime_ns: int
    format: str
    compression: str | None


def find_files(
    inputs: Sequence[str | Path], say: Callable[[str], None] | None = None, leave_out: Sequence[Path] = ()
) -> list[SourceFile]:
    """The files that paths, folders, globs and URLs name, in the order given, sorted within each. `say` receives a line
    about the files in folders and zip archives that are not read. `leave_out`: folders of output, below the input."""
    found: list[SourceFile] = []
    skipped: list[str] = []
    for given in inputs:
        text = os.path.expanduser(str(given))
        if text.startswith(HUB):
            found.append(SourceFile(text, 0, 0, "hub", None))
            continue
        if is_url(text):
            found += _find_remote(text, skipped)
            continue
        for name in _find_local(text, skipped, [path.absolute() for path in leave_out]):
            stat = os.stat(name)
            found.append(_source(os.path.abspath(name), stat.st_size, stat.st_mtime_ns))
    if not found:
        raise DataError("no input files were given")
    for file in (f for f in found if f.format == "zip" and not is_url(f.path)):
        with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(file.path) as archive:  # reported when it is read
            skipped += [m.filename for m in archive.infolist() if not m.is_dir() and not is_readable_member(m.filename)]
    if skipped and say:
        say(
            f"skipped {count_of(len(skipped), 'file')}: {count_by_suffix(skipped)} (no suffix of text, JSON, CSV or "
            "Parquet, or hidden); a file that is named, also by a glob such as 'DIR/*.log.1', is read as text"
        )
    return found


def _find_local(given: str, skipped: list[str], leave_out: Sequence[Path]) -> list[str]:
    """The files that a path or a glob names; adds those of a folder that are not read to `skipped`."""
    try:
        if os.path.isdir(given):
            there = sorted(_walk(given, leave_out))
            names = [name for name in there if not _is_hidden(name) and format_of(name) is not None]
            others = [name for name in there if _is_hidden(name) or format_of(name) is None]
            if not names:
                holds = f": it holds {count_by_suffix(others)}" if others else ", it is empty"
                advice = f"; a glob such as '{given}/*' reads any file as text" if others else ""
                raise DataError(f"{given}: no text, JSON, CSV or Parquet file in this folder{holds}{advice}")
            skipped += others
            return names
        if os.path.isfile(given):
            return [given]
        if os.path.exists(given):
            raise DataError(f"{given}: not a file but a pipe, socket or device; write its text to a file")
        # `**` follows links, and a link to a folder above it would yield each file many times
        once = {os.path.realpath(n): n for n in sorted(glob.glob(given, recursive=True), key=lambda name: -len(name))}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{given}: cannot be read: {reason}") from None
    names = sorted(name for name in once.values() if os.path.isfile(name))
    if not names:
        only = f"; it matches only {next(iter(once.values()))}" if once else ""
        raise DataError(f"{given}: no such file{only}")
    return names


def _walk(folder: str, leave_out: Sequence[Path]) -> Iterator[str]:
    """Every file below a folder, and hidden folders such as `.git/`, which are not entered. Nor are links to folders:
    they may lead back."""

    def fail(error: OSError) -> None:
        raise error

    for path, folders, names in os.walk(folder, onerror=fail):
        yield from (os.path.join(path, name, "") for name in folders if name.startswith("."))
        folders[:] = [n for n in folders if not n.startswith(".") and Path(path, n).absolute() not in leave_out]
        yield from (name for name in (os.path.join(path, n) for n in names) if os.path.isfile(name))


def _is_hidden(name: str) -> bool:
    return os.path.basename(name.rstrip("/")).startswith(".")


def describe_documents(files: Sequence[SourceFile], options: PrepareOptions) -> str:
    """What a document is in each kind of file, and how to change it."""
    units = {"jsonl": "line", "json": "list element", "parquet": "row", "csv": "row", "hub": "row", "zip": "member"}
    found: dict[str, Counter[str]] = {}
    for file in files:
        unit = units.get(file.format) or (options.documents if options.documents in TEXT_UNITS else "separator")
        found.setdefault(unit, Counter())[suffix_of(file.path) if file.format != "hub" else "hub dataset"] += 1
    parts = []
    for unit, suffixes in found.items():
        names = ", ".join(f"{count:,} {name}" for name, count in suffixes.most_common(4))
        more = f" and {len(suffixes) - 4} more suffixes" if len(suffixes) > 4 else ""
        each = f"text between {options.documents!r}" if unit == "separator" else unit
        parts.append(f"each {each} of {names}{more}")
    advice = " (--documents line or paragraph divides text files)" if "file" in found else ""
    return f"documents: {'; '.join(parts)}{advice}"


def hub_source(dataset: str, subset: str | None, split: str) -> str:
    """A dataset of the Hugging Face hub as an input; `val` and the truncated splits have LLM Foundry's names."""
    folder = "validation" if split.startswith("val") else "train" if split.startswith("train") else split
    return f"{HUB}{dataset}?{subset or ''}#{folder}"


def _find_remote(url: str, skipped: list[str]) -> list[SourceFile]:
    """One object, or those directly in a folder that match a pattern or have a known suffix; adds the others there to
    `skipped`."""
    folder, _, name = url.rpartition("/")
    store = Remote(folder)
    if not any(c in name for c in "*?["):
        if name and (size := store.size(name)) is not None:
            return [_source(url, size, 0)]
        folder, name = url.rstrip("/"), ""
        store = Remote(folder)
    there = store.names()
    names = [n for n in there if (fnmatch.fnmatch(n, name) if name else format_of(n) is not None)]
    sizes = [(n, store.size(n)) for n in names]
    found = [_source(f"{folder}/{n}", size, 0) for n, size in sizes if size is not None]
    if not found:
        holds = f"; it holds {count_by_suffix(there)}" if there and not name else ""
        raise DataError(
            f"{url}: no such object, and no text, JSON, CSV or Parquet file in a folder of this name{holds}"
        )
    skipped += [] if name else [n for n in there if n not in names]
    return found


def open_raw(path: str) -> IO[bytes]:
    """A file's bytes as they are stored."""
    if is_url(path):
        return io.BufferedReader(RemoteFile(path), 8 << 20)
    return open(path, "rb")


def _source(path: str, size: int, mtime_ns: int) -> SourceFile:
    # A file that is named and has no known suffix is text: source code, markdown, a LICENSE.
    kind, compression = format_of(path) or ("text", COMPRESSIONS.get(os.path.splitext(path.lower())[1]))
    return SourceFile(path, size, mtime_ns, "zip" if compression == "zip" else kind, compression)


def is_lines(file: SourceFile) -> bool:
    """Whether a file holds one JSON object per line; `.json` may also be an array or one object over many lines."""
    if file.format != "json":
        return file.format == "jsonl"
    try:
        with open_file(file, PrepareOptions()) as stream:
            return starts_with_line_of_json(stream.read(READ_BYTES))
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read: {error.strerror or error}") from None


def starts_with_line_of_json(head: bytes) -> bool:
    line = head.lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)[0]
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return len(line) >= READ_BYTES // 2 or line.rstrip().endswith(b"}")  # one long line, or a broken one
    return True


class Guarded(io.RawIOBase):
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
            raise DataError(f"{self.name}: damaged or cut short after {self.done:,} bytes of text: {error}") from None
        self.done += len(data)
        if self.done > self.limit:
            raise DataError(
                f"{self.name}: expands to more than {self.limit:,} bytes, which looks like a decompression bomb; "
                "if it is genuine, raise --max_expansion"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
            self.source.close()
        super().close()


def open_file(file: SourceFile, options: PrepareOptions) -> IO[bytes]:
    """A file's bytes, decompressed."""
    try:
        source: Any = open_raw(file.path)
        if file.compression is None:
            return source
        if file.compression in ("zstd", "gzip"):
            # Unlike python-zstandard's reader it detects a truncated file; it is faster than the gzip module.
            import pyarrow as pa

            stream = pa.CompressedInputStream(pa.PythonFile(source, "r"), file.compression)
        else:
            opener: Any = {"xz": lzma.open, "bz2": bz2.open}[file.compression]
            stream = opener(source, "rb")
    except (OSError, EOFError) as error:
        raise DataError(f"{file.path}: cannot be opened: {error}") from None
    return io.BufferedReader(Guarded(stream, source, file.path, expansion_limit(file, options)), READ_BYTES)


def expansion_limit(file: SourceFile, options: PrepareOptions) -> int:
    """Bytes beyond which the contents of a compressed file are taken for a decompression bomb."""
    return max(_BOMB_FREE, file.size * options.max_expansion)
