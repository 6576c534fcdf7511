"""Shards from elsewhere: fetched ahead of use, verified, kept in a folder that any number of processes may share.

Processes agree through files alone. A shard is written to `.ingot/NAME.part` in the cache folder, and whoever holds the
lock on that file fetches it; the kernel drops the lock with its process, so a dead owner never blocks anyone, and what
it left is swept up by the next start. An owner that lives but hangs (stopped, or stuck in a dead file system) loses its
file after LEASE_SECONDS without a byte: whoever waits removes the name and starts a file of its own. When size and hash
are right, the file is renamed to its place, unless it was lost in the meantime. `.ingot/NAME.own` remembers that it is
ours: only such files are ever evicted. It also names the boots of machines that have seen it whole: a download is not
forced to the disk, which would cost a third of its speed, so after a crash of the machine it is verified anew. The
usual way, states in shared memory, survives a SIGKILL in the wrong state
and then blocks the next run.

Compressed shards of a local data set go the same way, from the folder into itself.
"""

import atexit
import bz2
import fcntl
import gzip
import hashlib
import io
import json
import os
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote, unquote

import xxhash
import zstandard

from ingot.data.formats.mds_reader import ShardFile
from ingot.errors import DataError, DiskError, IngotError
from ingot.storage.object_store import CHUNK, Again, NotThere, Remote, first_line

THREADS = 8  # downloads at a time
OPEN_ATTEMPTS = 20
POLL_SECONDS = 0.02  # how often to look whether another process has finished
LEASE_SECONDS = 120.0  # more than the timeout of a silent connection and the longest pause before a new attempt

try:
    BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
except OSError:  # not Linux: every file is forced to the disk instead
    BOOT = ""

T = TypeVar("T")

DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Any]] = {
    "zstd": lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
    "gz": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    "bz2": lambda file: bz2.BZ2File(file),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file that must lie in the cache, and what it is made from."""

    target: ShardFile
    source: ShardFile  # the target itself, or its compressed form
    compression: str | None = None
    begin: int | None = None  # the target is the part of the source from this byte on


class Cache:
    """A folder with files of a remote, fetched when asked for or announced."""

    def __init__(self, folder: Path, remote: Remote, limit: int | None = None, threads: int = THREADS):
        self.folder, self.remote, self.limit = folder, remote, limit
        self._state = folder / ".ingot"
        self._threads = threads
        self._changed = threading.Condition()
        self._queue: deque[Wanted] = deque()
        self._keep: frozenset[str] = frozenset()  # names that announced reading still needs
        self._running = 0
        self._closed = threading.Event()
        try:
            self._state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"cannot keep unpacked or fetched shards in {folder}: {error.strerror}; set path to a folder that can "
                "be written, and remote to where the data is"
            ) from None
        self._sweep()
        atexit.register(_close_if_alive, weakref.ref(self))

    def ensure(self, wanted: Wanted) -> Path:
        """The path of a file, which is fetched first if it is not there."""
        path, part = self.folder / wanted.target.basename, self._part(wanted.target.basename)
        seen, since = None, time.monotonic()
        while not self._try(wanted, may_evict_kept=True):  # another thread or process is at it
            with self._changed:
                self._changed.wait(POLL_SECONDS)  # a thread of ours says when it is done; other processes do not
            if self._closed.is_set():
                raise DataError(f"{path} was being fetched when the cache was closed")
            if (found := _stamp(part)) != seen:
                seen, since = found, time.monotonic()
            elif seen is not None and time.monotonic() - since > LEASE_SECONDS:
                self._remove_part(part, seen)
        return path

    def open(self, wanted: Wanted, opener: Callable[[Path], T]) -> T:
        """What `opener` makes of a file, which is fetched first if it is not there."""
        for _ in range(OPEN_ATTEMPTS):
            path = self.ensure(wanted)
            try:
                return opener(path)
            except DataError:
                if path.exists():
                    raise  # else evicted by another process right after we had it
        raise DataError(f"{path} is evicted as soon as it is fetched; raise cache_limit")

    def announce(self, now: list[Wanted], soon: list[Wanted]) -> None:
        """Fetch what reading needs now and soon, in this order, in the background; what is needed now stays."""
        with self._changed:
            self._keep = frozenset(w.target.basename for w in now)
            self._queue = deque(w for w in (*now, *soon) if not (self.folder / w.target.basename).exists())
            while self._running < min(self._threads, len(self._queue)) and not self._closed.is_set():
                self._running += 1
                threading.Thread(target=self._work, name="ingot-fetch", daemon=True).start()

    def close(self) -> None:
        """Stop fetching; files in the making are removed."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            self._queue.clear()
            self._changed.wait_for(lambda: not self._running, timeout=5)  # a stuck connection must not hold an exit

    def _work(self) -> None:
        try:
            while not self._closed.is_set():
                with self._changed:
                    if not self._queue:
                        return
                    wanted = self._queue.popleft()
                # A failure here is not reported: whoever needs the file meets it again, and reports it.
                with suppress(IngotError):
                    self._try(wanted, may_evict_kept=False)
                with self._changed:
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _try(self, wanted: Wanted, may_evict_kept: bool) -> bool:
        """Is the file there, or could it be fetched now? False: someone else is at it, or there is no room."""
        name, need = wanted.target.basename, wanted.target.bytes
        path, part = self.folder / name, self._part(name)
        try:
            if path.exists() and self._survived(path, wanted.target):
                if (found := path.stat().st_size) != need:
                    raise DataError(f"{path} has {found:,} bytes where {need:,} are right; delete it")
                with suppress(FileNotFoundError):
                    os.utime(self._own(name))  # the time of last use
                return True
            with _open_locked(part) as file:
                if file is None:
                    return False
                try:
                    if path.exists():  # finished by another between the look and the lock
                        return True
                    if not self._make_room(file, need, may_evict_kept):
                        return False
                    self.remote.retry(wanted.source.basename, lambda: self._fetch(wanted, file), self._closed)
                    return self._commit(file, part, path, self._own(name), forced=not wanted.target.hashes)
                finally:
                    self._remove_part(part, _stamp(file.fileno()))
        except NotThere:
            raise DataError(
                f"{self.remote.url}/{wanted.source.basename} does not exist, though the index names it; copy it again"
            ) from None
        except OSError as error:
            raise _disk_error(path, error) from None

    def _commit(self, file: IO[bytes], part: Path, path: Path, own: Path | None = None, forced: bool = True) -> bool:
        """Put a complete file in its place; False if it was taken for that of a hanging process."""
        file.flush()
        if forced or not BOOT:
            os.fsync(file.fileno())
        path.parent.mkdir(parents=True, exist_ok=True)
        made = os.fstat(file.fileno())
        with self._lock():
            if _stamp(part) != _stamp(file.fileno()):
                return False
            if own is not None:  # before the rename, or a kill in between would leave a file that is never evicted
                mark = {"inode": made.st_ino, "mtime": made.st_mtime_ns, "bytes": made.st_size, "boots": [BOOT]}
                own.write_text(json.dumps({"name": path.relative_to(self.folder).as_posix(), **mark}))
            part.rename(path)
        return True

    def _survived(self, path: Path, target: ShardFile) -> bool:
        """False, and removed, if a file of ours was damaged by a crash of the machine since it was fetched."""
        own = self._own(target.basename)
        try:
            mark = json.loads(own.read_bytes())
            if BOOT in mark["boots"] or not target.hashes or path.stat().st_ino != mark["inode"]:
                return True
        except (OSError, ValueError, KeyError):
            return True  # not ours: its size is looked at, and its content by `ingot inspect`
        try:
            verify_file(path, target)
        except DataError:
            with self._lock():
                path.unlink(missing_ok=True)
                own.unlink(missing_ok=True)
            return False
        with self._lock():
            if own.exists():  # else evicted by another
                own.write_text(json.dumps({**mark, "boots": [*mark["boots"][-63:], BOOT]}))
        return True

    def _remove_part(self, part: Path, stamp: tuple[int, int] | None) -> None:
        """Remove a file in the making, if it is still this one and as it was seen."""
        with self._lock():
            if stamp is not None and _stamp(part) == stamp:
                part.unlink()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """The one moment in which files change hands; held for a few system calls, never while waiting for anything."""
        with (self._state / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def put(self, name: str, content: bytes) -> Path:
        """Write a small file, such as an index, that belongs to the data and is never evicted."""
        path, part = self.folder / name, self._part(f"{name}.{os.getpid()}.{threading.get_ident()}")
        try:
            while True:  # once, unless a process that starts sweeps it up before it is locked
                with _open_locked(part) as file:
                    if file is not None:
                        file.write(content)
                        self._commit(file, part, path)
                        return path
        except OSError as error:
            raise _disk_error(path, error) from None

    def _fetch(self, wanted: Wanted, file: IO[bytes]) -> None:
        """One attempt: stream, unpack, and compare with what the index promises."""
        source, target = wanted.source, wanted.target
        file.seek(0)
        os.utime(file.fileno())  # a new attempt is a sign of life
        chunks = _checked(self.remote.stream(source.basename, wanted.begin, target.bytes), source)
        if wanted.compression:
            if wanted.compression not in DECOMPRESSORS:
                known = ", ".join(DECOMPRESSORS)
                raise DataError(f"{source.basename} is compressed with '{wanted.compression}'; only {known} are read")
            chunks = _checked(_unpack(wanted.compression, chunks), target)
        for chunk in chunks:
            if self._closed.is_set():
                raise DataError("the cache was closed during a download")
            file.write(chunk)

    def _make_room(self, file: IO[bytes], need: int, may_evict_kept: bool) -> bool:
        """Evict what was used longest ago, of our own files only, until this file fits within the limit too."""
        with self._lock():
            file.truncate(need)  # a part has its full size from the start, so that others count it
            if self.limit is None:
                return True
            ours: list[tuple[float, int, Path, Path]] = []
            room = self.limit
            for own in self._state.glob("*.own"):
                path, size = self._owned(own)
                with suppress(FileNotFoundError):  # others may be at work, but only this lock's holder evicts
                    if path is not None:
                        ours.append((own.stat().st_mtime, size, path, own))
                        room -= size
            for part in self._state.glob("*.part"):
                with suppress(FileNotFoundError):
                    room -= part.stat().st_size
            for _, size, path, own in sorted(ours):
                if room >= 0:
                    break
                if may_evict_kept or path.relative_to(self.folder).as_posix() not in self._keep:
                    path.unlink(missing_ok=True)
                    own.unlink(missing_ok=True)
                    room += size
            return room >= 0 or may_evict_kept

    def _owned(self, own: Path) -> tuple[Path | None, int]:
        """The file that a mark stands for, if it is still the one that we wrote."""
        with suppress(OSError, ValueError, KeyError):
            mark = json.loads(own.read_bytes())
            path = self.folder / mark["name"]
            found = path.stat()
            if (found.st_ino, found.st_mtime_ns) == (mark["inode"], mark["mtime"]):
                return path, mark["bytes"]
        return None, 0

    def _own(self, name: str) -> Path:
        return self._state / f"{quote(name, safe='')}.own"

    def _part(self, name: str) -> Path:
        return self._state / f"{quote(name, safe='')}.part"

    def _sweep(self) -> None:
        """Remove what killed processes left: parts that no living process holds, marks without their file."""
        for part in self._state.glob("*.part"):
            with _open_locked(part) as file:
                if file is not None:
                    part.unlink(missing_ok=True)  # gone already where another process took it for a hanging one's
        for own in self._state.glob("*.own"):
            if self._owned(own)[0] is not None:
                continue
            with self._lock(), suppress(FileNotFoundError):  # another process that starts may have removed it
                if self._owned(own)[0] is None:  # marks are written under the lock: no living process is at it
                    if not own.read_bytes().endswith(b"}"):  # lost in a crash of the machine, as its file may be
                        (self.folder / unquote(own.stem)).unlink(missing_ok=True)
                    own.unlink()


def _close_if_alive(reference: "weakref.ref[Cache]") -> None:
    if cache := reference():
        cache.close()


def _stamp(file: Path | int) -> tuple[int, int] | None:
    """Which file it is, and when it was last written to; None if there is none."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def _open_locked(part: Path) -> Iterator[IO[bytes] | None]:
    """The file if its lock could be had, else None. The lock ends with the file, or with the process."""
    with open(part, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o644)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(file.fileno()), part.stat())  # else renamed or removed before our lock
        except (BlockingIOError, FileNotFoundError):
            mine = False
        yield file if mine else None


def _checked(chunks: Iterable[bytes], file: ShardFile) -> Iterator[bytes]:
    """Bytes that pass, compared with the size and hashes of the index."""
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
        raise Again(f"{seen:,} bytes came where the index says {file.bytes:,}")
    for name, digest in digests.items():
        if digest.hexdigest() != file.hashes[name]:
            raise Again(f"its {name} is {digest.hexdigest()} where the index says {file.hashes[name]}")


def verify_file(path: Path, file: ShardFile) -> None:
    """Compare a local file with the size and hashes of its index."""
    try:
        if path.stat().st_size != file.bytes:
            raise Again(f"it has {path.stat().st_size:,} bytes where the index says {file.bytes:,}")
        with path.open("rb") as opened:
            for _ in _checked(iter(lambda: opened.read(CHUNK), b""), file):
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
    raise DataError(f"the index has hashes of the unknown kind '{name}'")


class _Chunks(io.RawIOBase):
    """An iterator of bytes as a file."""

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


def _unpack(compression: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Decompressed bytes in chunks of bounded size, whatever the ratio; all of `chunks` is consumed."""
    reader = DECOMPRESSORS[compression](io.BufferedReader(_Chunks(chunks), CHUNK))
    while True:
        try:
            chunk = reader.read(CHUNK)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise Again(f"it cannot be unpacked as {compression}: {first_line(error)}") from None
        if not chunk:
            break
        yield chunk
    if any(chunks):
        raise Again(f"bytes follow its {compression} data")


def _disk_error(path: Path, error: OSError) -> DiskError:
    return DiskError(f"cannot write {path}: {error.strerror or error}; free some space, or set a cache_limit")
