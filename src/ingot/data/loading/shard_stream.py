"""The bytes of a shard on their way into the cache: compared with the index and decompressed, in bounded memory."""

import bz2
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import xxhash
import zstandard

from ingot.data.formats.mds_reader import ShardFile
from ingot.errors import DataError
from ingot.storage.object_store import CHUNK, Again, first_line

DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Any]] = {
    "zstd": lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
    "gz": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    "bz2": lambda file: bz2.BZ2File(file),
}


def verify_stream(chunks: Iterable[bytes], file: ShardFile) -> Iterator[bytes]:
    """Pass chunks through; raise `Again` if their size or a hash differs from the index."""
    digests = {name: _new_hash(name) for name in file.hashes}
    seen = 0
    for chunk in chunks:
        seen += len(chunk)
        if seen > file.bytes:
            raise Again(f"it has more than the {file.bytes:,} bytes of the index")
        for digest in digests.values():
            digest.update(chunk)
        yield chunk
    if seen != file.bytes:
        raise Again(f"it has {seen:,} bytes, but the index says {file.bytes:,}")
    for name, digest in digests.items():
        if digest.hexdigest() != file.hashes[name]:
            raise Again(f"its {name} is {digest.hexdigest()}, but the index says {file.hashes[name]}")


def verify_file(path: Path, file: ShardFile) -> None:
    """Compare a local file with the size and hashes of its index."""
    try:
        if path.stat().st_size != file.bytes:
            raise Again(f"it has {path.stat().st_size:,} bytes, but the index says {file.bytes:,}")
        with path.open("rb") as opened:
            for _ in verify_stream(iter(lambda: opened.read(CHUNK), b""), file):
                pass
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; copy or prepare the data again") from None
    except Again as error:
        raise DataError(f"{path} is damaged: {error}; copy or prepare the data again") from None


def _new_hash(name: str) -> Any:
    if name in xxhash.algorithms_available:
        return getattr(xxhash, name)()
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return hashlib.new(name)
    raise DataError(f"the index has hashes of the unknown type '{name}'; prepare the data again")


class _Chunks(io.RawIOBase):
    """A file object over an iterator of bytes."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def decompress(compression: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress in chunks of bounded size, whatever the ratio; consumes all of `chunks`."""
    if compression not in DECOMPRESSORS:
        raise DataError(f"shards compressed with '{compression}' are not supported; use {', '.join(DECOMPRESSORS)}")
    reader = DECOMPRESSORS[compression](io.BufferedReader(_Chunks(chunks), CHUNK))
    while True:
        try:
            chunk = reader.read(CHUNK)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise Again(f"it cannot be decompressed as {compression}: {first_line(error)}") from None
        if not chunk:
            break
        yield chunk
    if any(chunks):
        raise Again(f"it has extra bytes after its {compression} data")
