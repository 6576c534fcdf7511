"""Files by URL: an object store, a web server or a folder, with the same errors for all.

`obstore` (Rust) is the client. Retries are here and not inside the client, because only the caller knows the lengths
and hashes of an index: fetching and checking are retried together.
"""

import io
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ingot.errors import DataError
from ingot.storage.atomic import whole_file

CHUNK = 1 << 22
RETRIES = 8
BACKOFF_SECONDS = (0.25, 20.0)  # first and longest pause; the actual one is a random fraction of it
READ_TIMEOUT = "30s"  # of silence; the total time of a request is not limited, since shards may be large

METADATA_SERVER = "169.254.169.254"
HINT = "credentials come from the environment (AWS_, GOOGLE_, AZURE_...; AWS_SKIP_SIGNATURE=true for a public bucket)"

T = TypeVar("T")


def is_url(path: str) -> bool:
    """Whether a path is in an object store or on a web server."""
    return "://" in path


class NotThere(Exception):
    """The remote has no such file."""


class Forbidden(DataError):
    """The remote denies access; some do so for files that do not exist."""


class Again(Exception):
    """A failure that a retry may fix."""


class Remote:
    """A folder, or an object store by URL (s3://, gs://, az://, http://, https://)."""

    def __init__(self, url: str, retries: int = RETRIES, backoff: tuple[float, float] = BACKOFF_SECONDS):
        self.url = url.rstrip("/")
        # None for an object store
        self.folder = Path(url.removeprefix("file://")) if "://" not in url or url.startswith("file://") else None
        self._store: Any = None if self.folder else _open_store(self.url)
        self._answered = False  # after an answer, a failure to get credentials is temporary
        self._retries, self._backoff = (1 if self.folder else retries), backoff

    def read(self, name: str) -> bytes | None:
        """A small file, whole; None if it is not there."""
        try:
            return self.retry(name, lambda: b"".join(self.stream(name)))
        except NotThere:
            return None

    def stream(self, name: str, begin: int | None = None, count: int = 0) -> Iterator[bytes]:
        """The bytes of a file, or of a part of it, in chunks. Failures that a retry may fix raise Again."""
        if self.folder is not None:
            yield from _stream_file(self.folder / name, begin, count)
            return
        options = None if begin is None else {"range": (begin, begin + count)}
        opened = self._answer(name, lambda: self._store.get(name, options=options))
        chunks = iter(opened.stream(min_chunk_size=CHUNK))
        while chunk := self._answer(name, lambda: next(chunks, b"")):
            yield chunk

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is not there."""
        if self.folder is not None:
            path = self.folder / name
            return path.stat().st_size if path.is_file() else None
        try:
            return self._ask(name, lambda: int(self._store.head(name)["size"]))
        except NotThere:
            return None

    def names(self, under: str | None = None, required: bool = False) -> list[str]:
        """Names of files and folders directly in it, or in a folder of it. An error if the store cannot be listed and
        `required`, otherwise nothing, as over http."""
        if self.folder is not None:
            folder = self.folder / (under or "")
            return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        from obstore.exceptions import BaseError

        def find() -> Any:
            return self._store.list_with_delimiter(under)

        try:
            found = self._ask(under or "", find) if required else find()
        except (BaseError, OSError):
            return []
        paths = [*found["common_prefixes"], *(str(entry["path"]) for entry in found["objects"])]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def put(self, name: str, source: Path) -> None:
        """Upload a file; it appears whole or not at all."""
        if self.folder is None:
            self._ask(name, lambda: self._store.put(name, source), "written")
            return
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as file, source.open("rb") as content:
            shutil.copyfileobj(content, file, CHUNK)

    def delete(self, names: list[str]) -> None:
        """Remove files."""
        if self.folder is None:
            self._ask(names[0], lambda: self._store.delete(names), "removed")
            return
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def _ask(self, name: str, action: Callable[[], T], doing: str = "fetched") -> T:
        return self.retry(name, lambda: self._answer(name, action), doing=doing)

    def _answer(self, name: str, action: Callable[[], T]) -> T:
        """What a store answers; its failures become final ones and `Again`."""
        from obstore import exceptions as obs

        try:
            result = action()
            self._answered = True
            return result
        except (obs.NotFoundError, FileNotFoundError):
            raise NotThere(name) from None
        except (obs.PermissionDeniedError, obs.UnauthenticatedError) as error:
            raise Forbidden(f"{self.url}/{name} is forbidden: {first_line(error)}; {HINT}") from None
        except (obs.BaseError, OSError) as error:
            if METADATA_SERVER in str(error) and not self._answered:  # asked a cloud machine for credentials
                raise Forbidden(f"{self.url}/{name} needs credentials, and there are none; {HINT}") from None
            raise Again(first_line(error)) from None

    def retry(
        self, name: str, action: Callable[[], T], stop: threading.Event | None = None, doing: str = "fetched"
    ) -> T:
        """Call `action` until it works, with growing random pauses, so that clients that failed together do not retry
        together."""
        first, longest = self._backoff
        for attempt in range(self._retries + 1):
            try:
                return action()
            except Again as error:
                reason = str(error)
            pause = random.uniform(0, min(longest, first * 2**attempt))
            if attempt < self._retries and (stop or threading.Event()).wait(pause):
                break
        raise DataError(f"{self.url}/{name} could not be {doing} in {attempt + 1} attempts: {reason}")


class RemoteFile(io.RawIOBase):
    """An object as a file: every read requests a range, with retries."""

    def __init__(self, url: str):
        folder, _, self.object = url.rpartition("/")
        self.remote = Remote(folder)
        size = self.remote.size(self.object)
        if size is None:
            raise DataError(f"{url}: does not exist any more")
        self.size, self.at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self.size - self.at)
        if count <= 0:
            return 0
        try:
            data = self.remote.retry(self.object, lambda: b"".join(self.remote.stream(self.object, self.at, count)))
        except NotThere:
            raise DataError(f"{self.remote.url}/{self.object}: removed while it was read") from None
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def _stream_file(path: Path, begin: int | None, count: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(begin or 0)
            left = count if begin is not None else path.stat().st_size
            while left > 0 and (chunk := file.read(min(CHUNK, left))):
                left -= len(chunk)
                yield chunk
    except FileNotFoundError:
        raise NotThere(path.name) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _open_store(url: str) -> Any:
    from obstore.store import from_url

    names = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
    plain = any(endpoint.startswith("http://") for endpoint in (url, *(os.environ.get(name, "") for name in names)))
    try:
        return from_url(
            url,
            client_options={"allow_http": plain, "timeout": "1h", "read_timeout": READ_TIMEOUT},
            retry_config={"max_retries": 0},  # `Remote.retry` does it
        )
    except Exception as error:
        raise DataError(
            f"'{url}' cannot be opened ({first_line(error)}); known are s3://, gs://, az://, http(s):// and folders"
        ) from None


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
