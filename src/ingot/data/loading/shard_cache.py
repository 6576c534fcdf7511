"""A folder of remote or compressed shards: fetched ahead of use, verified, shared by any number of processes.

Processes coordinate through files in `.ingot/` of the cache folder, and through nothing else:

    NAME.part   a file being written. The process that holds its lock (flock) fetches it. The kernel releases the lock
                when the process dies, so a dead process never blocks another; the next start removes its file.
    NAME.own    the cache wrote NAME and may evict it. Holds inode, mtime and size, so a file that the user replaced is
                never evicted, and the boot ids of machines (below).
    lock        held for a few system calls while a file is committed, removed or evicted.

Lease: a process that holds the lock but is stuck (stopped, or in a dead file system) loses its .part file when the file
has not changed for LEASE_SECONDS: a waiting process removes the name and starts its own file. When the first wakes up,
its file no longer has the name, and its commit fails. A file with the right size and hashes is renamed to NAME.

Boot ids: downloads are not forced to disk, which would take a third of their speed, so a crash of the machine may lose
parts of them. NAME.own lists the boots (BOOT) during which NAME is known to be complete; after a reboot it is verified
once more. States in shared memory, the usual way, would survive a SIGKILL in the wrong state and block the next run.

Compressed shards of a local dataset take the same path, from their folder into itself.
"""

import atexit
import fcntl
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import quote, unquote

from ingot.data.formats.mds_reader import ShardFile
from ingot.data.loading.shard_stream import decompress, verify_file, verify_stream
from ingot.errors import DataError, DiskError, IngotError
from ingot.storage.object_store import NotThere, Remote

THREADS = 8  # simultaneous downloads
OPEN_ATTEMPTS = 20
POLL_SECONDS = 0.02  # between checks whether another process has finished
LEASE_SECONDS = 120.0  # longer than the timeout of a silent connection and the longest pause before a retry

try:
    BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
except OSError:  # not Linux: every file is forced to disk instead
    BOOT = ""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of the cache, and the remote file it is made from."""

    target: ShardFile
    source: ShardFile  # the target itself, or its compressed form
    compression: str | None = None
    begin: int | None = None  # set if the target is the part of the source from this byte on


class ShardCache:
    """A folder with remote files, fetched when they are requested or announced."""

    def __init__(self, folder: Path, remote: Remote, limit: int | None = None, threads: int = THREADS):
        self.folder, self.remote, self.limit = folder, remote, limit
        self._state = folder / ".ingot"
        self._threads = threads
        self._changed = threading.Condition()
        self._queue: deque[CachedFile] = deque()
        self._keep: frozenset[str] = frozenset()  # names of shards that are needed now
        self._running = 0
        self._closed = threading.Event()
        try:
            self._state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"cannot write fetched or decompressed shards to {folder}: {error.strerror}; set path to a writable "
                "folder, and remote to the place of the data"
            ) from None
        self._sweep()
        atexit.register(_close_if_alive, weakref.ref(self))

    def ensure(self, file: CachedFile) -> Path:
        """The path of a file, which is fetched if it is missing."""
        path, part = self.folder / file.target.basename, self._part(file.target.basename)
        seen, since = None, time.monotonic()
        while not self._try(file, may_evict_kept=True):  # another thread or process is fetching it
            with self._changed:
                self._changed.wait(POLL_SECONDS)  # our own threads notify; other processes cannot
            if self._closed.is_set():
                raise DataError(f"{path} was being fetched when the cache was closed")
            if (found := _stamp(part)) != seen:
                seen, since = found, time.monotonic()
            elif seen is not None and time.monotonic() - since > LEASE_SECONDS:
                self._remove_part(part, seen)
        return path

    def open(self, file: CachedFile, opener: Callable[[Path], T]) -> T:
        """The result of `opener` for a file, which is fetched if it is missing."""
        for _ in range(OPEN_ATTEMPTS):
            path = self.ensure(file)
            try:
                return opener(path)
            except DataError:
                if path.exists():
                    raise  # otherwise another process has just evicted it
        raise DataError(f"{path} is evicted as soon as it is fetched; increase cache_limit")

    def announce(self, now: list[CachedFile], soon: list[CachedFile]) -> None:
        """Fetch what is needed now and soon, in this order, in the background; keep what is needed now."""
        with self._changed:
            self._keep = frozenset(w.target.basename for w in now)
            self._queue = deque(w for w in (*now, *soon) if not (self.folder / w.target.basename).exists())
            while self._running < min(self._threads, len(self._queue)) and not self._closed.is_set():
                self._running += 1
                threading.Thread(target=self._work, name="ingot-fetch", daemon=True).start()

    def close(self) -> None:
        """Stop fetching and remove incomplete files."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            self._queue.clear()
            self._changed.wait_for(lambda: not self._running, timeout=5)  # a stuck connection must not block the exit

    def _work(self) -> None:
        try:
            while not self._closed.is_set():
                with self._changed:
                    if not self._queue:
                        return
                    file = self._queue.popleft()
                # Not reported here: the reader that needs the file meets the same error and reports it.
                with suppress(IngotError):
                    self._try(file, may_evict_kept=False)
                with self._changed:
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _try(self, wanted: CachedFile, may_evict_kept: bool) -> bool:
        """Fetch a file unless it exists. False if another thread or process is fetching it, or there is no room."""
        name, need = wanted.target.basename, wanted.target.bytes
        path, part = self.folder / name, self._part(name)
        try:
            if path.exists() and self._is_intact(path, wanted.target):
                if (found := path.stat().st_size) != need:
                    raise DataError(f"{path} has {found:,} bytes, but the index says {need:,}; delete it")
                with suppress(FileNotFoundError):
                    os.utime(self._own(name))  # the time of last use
                return True
            with _open_locked(part) as file:
                if file is None:
                    return False
                try:
                    if path.exists():  # another finished it before we got the lock
                        return True
                    if not self._make_room(file, need, may_evict_kept):
                        return False
                    self.remote.retry(wanted.source.basename, lambda: self._fetch(wanted, file), self._closed)
                    return self._commit(file, part, path, self._own(name), forced=not wanted.target.hashes)
                finally:
                    self._remove_part(part, _stamp(file.fileno()))
        except NotThere:
            raise DataError(
                f"{self.remote.url}/{wanted.source.basename} does not exist, but the index lists it; copy it again"
            ) from None
        except OSError as error:
            raise _disk_error(path, error) from None

    def _commit(self, file: IO[bytes], part: Path, path: Path, own: Path | None = None, forced: bool = True) -> bool:
        """Rename a complete file to its final name; False if this process has lost it."""
        file.flush()
        if forced or not BOOT:
            os.fsync(file.fileno())
        path.parent.mkdir(parents=True, exist_ok=True)
        stat = os.fstat(file.fileno())
        with self._lock():
            if _stamp(part) != _stamp(file.fileno()):
                return False
            if own is not None:  # before the rename: a kill in between must not leave a file that is never evicted
                mark = {"inode": stat.st_ino, "mtime": stat.st_mtime_ns, "bytes": stat.st_size, "boots": [BOOT]}
                own.write_text(json.dumps({"name": path.relative_to(self.folder).as_posix(), **mark}))
            part.rename(path)
        return True

    def _is_intact(self, path: Path, target: ShardFile) -> bool:
        """Verify a fetched file once after each reboot; remove it and return False if the crash damaged it."""
        own = self._own(target.basename)
        try:
            mark = json.loads(own.read_bytes())
            if BOOT in mark["boots"] or not target.hashes or path.stat().st_ino != mark["inode"]:
                return True
        except (OSError, ValueError, KeyError):
            return True  # the user's own file: only its size is checked
        try:
            verify_file(path, target)
        except DataError:
            with self._lock():
                path.unlink(missing_ok=True)
                own.unlink(missing_ok=True)
            return False
        with self._lock():
            if own.exists():  # otherwise another process has evicted it
                own.write_text(json.dumps({**mark, "boots": [*mark["boots"][-63:], BOOT]}))
        return True

    def _remove_part(self, part: Path, stamp: tuple[int, int] | None) -> None:
        """Remove an incomplete file if it has not been replaced or changed since `stamp`."""
        with self._lock():
            if stamp is not None and _stamp(part) == stamp:
                part.unlink()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Excludes other processes while a file is committed, removed or evicted; never held while waiting."""
        with (self._state / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def put(self, name: str, content: bytes) -> Path:
        """Write a small file of the data, such as an index, which is never evicted."""
        path, part = self.folder / name, self._part(f"{name}.{os.getpid()}.{threading.get_ident()}")
        try:
            while True:  # repeats only if a starting process removes the file before it is locked
                with _open_locked(part) as file:
                    if file is not None:
                        file.write(content)
                        self._commit(file, part, path)
                        return path
        except OSError as error:
            raise _disk_error(path, error) from None

    def _fetch(self, wanted: CachedFile, file: IO[bytes]) -> None:
        """One attempt: stream, decompress, and compare with the index."""
        source, target = wanted.source, wanted.target
        file.seek(0)
        os.utime(file.fileno())  # renews the lease
        chunks = verify_stream(self.remote.stream(source.basename, wanted.begin, target.bytes), source)
        if wanted.compression:
            chunks = verify_stream(decompress(wanted.compression, chunks), target)
        for chunk in chunks:
            if self._closed.is_set():
                raise DataError("the cache was closed during a download")
            file.write(chunk)

    def _make_room(self, file: IO[bytes], need: int, may_evict_kept: bool) -> bool:
        """Evict the least recently used files of the cache until this one fits the limit too."""
        with self._lock():
            file.truncate(need)  # full size from the start, so that other processes count it
            if self.limit is None:
                return True
            evictable: list[tuple[float, int, Path, Path]] = []
            room = self.limit
            for own in self._state.glob("*.own"):
                path, size = self._owned(own)
                with suppress(FileNotFoundError):  # other processes read and commit, but only this one evicts
                    if path is not None:
                        evictable.append((own.stat().st_mtime, size, path, own))
                        room -= size
            for part in self._state.glob("*.part"):
                with suppress(FileNotFoundError):
                    room -= part.stat().st_size
            for _, size, path, own in sorted(evictable):
                if room >= 0:
                    break
                if may_evict_kept or path.relative_to(self.folder).as_posix() not in self._keep:
                    path.unlink(missing_ok=True)
                    own.unlink(missing_ok=True)
                    room += size
            return room >= 0 or may_evict_kept

    def _owned(self, own: Path) -> tuple[Path | None, int]:
        """The file that a .own file describes, and its size, if it is still the one that the cache wrote."""
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
        """Remove what killed processes left: .part files that nobody locks, .own files without their file."""
        for part in self._state.glob("*.part"):
            with _open_locked(part) as file:
                if file is not None:
                    part.unlink(missing_ok=True)  # another process may have removed it after its lease
        for own in self._state.glob("*.own"):
            if self._owned(own)[0] is not None:
                continue
            with self._lock(), suppress(FileNotFoundError):  # another starting process may have removed it
                if self._owned(own)[0] is None:  # still: .own files are written under the lock
                    if not own.read_bytes().endswith(b"}"):  # torn by a crash of the machine, so its file may be too
                        (self.folder / unquote(own.stem)).unlink(missing_ok=True)
                    own.unlink()


def _close_if_alive(reference: "weakref.ref[ShardCache]") -> None:
    if cache := reference():
        cache.close()


def _stamp(file: Path | int) -> tuple[int, int] | None:
    """Identity and last write of a file; None if it does not exist."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def _open_locked(part: Path) -> Iterator[IO[bytes] | None]:
    """The file if it could be locked, else None. The lock ends when the file is closed or the process dies."""
    with open(part, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o644)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(file.fileno()), part.stat())  # else renamed or removed before the lock
        except (BlockingIOError, FileNotFoundError):
            mine = False
        yield file if mine else None


def _disk_error(path: Path, error: OSError) -> DiskError:
    return DiskError(f"cannot write {path}: {error.strerror or error}; free some space or set cache_limit")
