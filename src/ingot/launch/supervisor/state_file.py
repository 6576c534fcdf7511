"""`launch/state.jsonl`: appended to by one process at a time, read by anybody.

A record is on disk (fsync) before its writer acts on it. The writer notices when somebody else has appended: a
supervisor on a node that was cut off must not go on writing after its successor has started. When the disk is full, a
reserve of 1 MiB is released, so that what matters most, why the run ended, can still be written; what cannot be written
stays in memory and is tried again with the next record.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ingot.errors import IngotError
from ingot.launch.supervisor.records import Launched, Record
from ingot.storage.small_files import OddFile, move_away, read_bytes

STATE, RESERVE, EPOCHS = "state.jsonl", "reserve", "epochs"
RESERVE_BYTES = 1 << 20
STUCK_SECONDS = 1.0  # for a disk that did not answer when it was last asked
MAX_BYTES = 64 << 20  # a launch writes some kilobytes

T = TypeVar("T")
_decoder = msgspec.json.Decoder(Record)


class StateError(IngotError):
    """The state file cannot be read."""


class DamagedState(StateError):
    """Its content is not ours, or is damaged."""

    def __init__(self, path: Path, why: str):
        self.command = move_away(path)
        """What helps."""
        then = f"move it away with `{self.command}`, then launch the run again: it continues from the last checkpoint"
        super().__init__(f"{path} is damaged, or something else has written it: {why}; {then}")


class Superseded(IngotError):
    """Another process writes the state file now."""


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def read_state(path: Path) -> list[Any]:
    """All records, over all launches; none if there is no file. What comes after the last newline was never complete:
    its writer was killed before it could act on it."""
    return _parse(path, _content(path))


def current_launch(records: Sequence[Any]) -> list[Any]:
    """The records of the last launch."""
    starts = [number for number, record in enumerate(records) if isinstance(record, Launched)]
    return list(records[starts[-1] :]) if starts else list(records)


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_BYTES)
    except FileNotFoundError:
        return b""
    except OddFile as error:
        raise DamagedState(path, str(error.strerror)) from None
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror or error}; see whether its disk is there") from None


def _parse(path: Path, content: bytes) -> list[Any]:
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            record = _decoder.decode(line)
            if not _is_time(record.time):
                raise msgspec.DecodeError(f"{record.time[:60]!r} is not a time with a time zone")
            records.append(record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedState(path, f"line {number} is not a record of the launcher ({error})") from None
    return records


def _is_time(text: str) -> bool:
    """Whether one can compute with a time: it has a zone, and is not at the end of the calendar."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return False
    return time.tzinfo is not None and 1970 < time.year < 9000


class StateFile:
    """The writer."""

    def __init__(self, folder: Path):
        """Read what is there. The folder is that of the launcher, RUN/launch."""
        self.folder, self.path = folder, folder / STATE
        content = _content(self.path)
        self.records: list[Any] = _parse(self.path, content)
        self._size = content.rfind(b"\n") + 1
        self._torn = len(content) - self._size
        self._unwritten: list[bytes] = []

    def append(self, record: Any) -> bool:
        """Add a record; returns whether it, and all before it, are on disk. Raises `Superseded` if somebody else has
        written since."""
        self.add(record)
        return self.flush()

    def add(self, record: Any) -> None:
        """Add a record in memory, which no disk can hold up."""
        self.records.append(record)
        self._unwritten.append(msgspec.json.encode(record) + b"\n")

    def flush(self) -> bool:
        """Write what could not be written before; returns whether all is on disk."""
        lines = self._unwritten[:]  # another thread may add some meanwhile
        if not lines:
            return True
        try:
            self._write(b"".join(lines))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._release_reserve():
                return False
            try:
                self._write(b"".join(lines))
            except OSError:
                return False
        del self._unwritten[: len(lines)]
        self._fill_reserve()
        return True

    def claim_epoch(self, at_least: int) -> int:
        """A number that no other attempt of this run has or will have. On a full disk, the file that proves it is left
        out."""
        epoch = at_least
        while True:
            try:
                (self.folder / EPOCHS).mkdir(parents=True, exist_ok=True)
                os.close(os.open(self.folder / EPOCHS / str(epoch), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640))
                return epoch
            except FileExistsError:
                epoch += 1
            except OSError:
                return epoch

    def _write(self, data: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            size = os.fstat(descriptor).st_size
            if size != self._size + self._torn:
                raise Superseded(f"{self.path}: another supervisor has written since; this one ends")
            if self._torn:  # half a record of a writer that was killed
                os.ftruncate(descriptor, self._size)
                self._torn = 0
            try:
                written = os.pwrite(descriptor, data, self._size)
                if written < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, self._size)
                self._torn = max(0, os.fstat(descriptor).st_size - self._size)
                raise
            self._size += len(data)
        finally:
            os.close(descriptor)

    def _release_reserve(self) -> bool:
        with suppress(OSError):
            (self.folder / RESERVE).unlink()
            return True
        return False

    def _fill_reserve(self) -> None:
        path = self.folder / RESERVE
        if path.exists():
            return
        try:
            path.write_bytes(bytes(RESERVE_BYTES))
        except OSError:
            with suppress(OSError):
                path.unlink()


class DiskThread:
    """Uses the shared file system, one thing after another; it may not answer, and then nobody else waits for long."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._threads, self._is_stuck = ThreadPoolExecutor(1, "ingot-state"), False

    async def do(self, action: Callable[[], T], default: T | None = None) -> T:
        """The result of an action. If the disk does not answer: the default, or `TimeoutError` without one; the action
        is carried out when it answers again."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, action)
        try:
            async with asyncio.timeout(min(self.seconds, STUCK_SECONDS) if self._is_stuck else self.seconds):
                result = await asyncio.shield(future)
        except TimeoutError:
            self._is_stuck = True
            if default is None:
                raise
            return default
        self._is_stuck = False
        return result

    async def try_to(self, action: Callable[[], Any]) -> None:
        with suppress(OSError, TimeoutError):
            await self.do(action)

    def submit(self, action: Callable[[], Any]) -> None:
        """Carry it out some time; nobody waits for it."""
        self._threads.submit(action)
