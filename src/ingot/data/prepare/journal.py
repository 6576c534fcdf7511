"""What a preparation keeps on the disk: the target, its work folder, and in it a journal of finished tasks.

Each finished task is a line in the journal; the same command run again reads it and does the rest. Several processes,
on several machines, can divide the pieces of one split: each has its own journal in the common work folder, and the
last process reads them all.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import xxhash

from ingot.data.prepare.options import PrepareOptions
from ingot.data.prepare.packing import part_paths
from ingot.data.prepare.progress import follow
from ingot.errors import DataError, disk_error
from ingot.storage.atomic import file_hash, write_json

STATE = "state.json"
# What a run writes into its work folder, and what remains when it is killed.
_WORK_NAMES = re.compile(
    r"lock(\.\w+)?|journal(\.\d+)?\.jsonl|parts|shards|state\.json|\.state\.json\.\d+\.tmp|\.nfs\w+"
)


@dataclass
class SplitReport:
    """What was written for one split."""

    folder: str
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0
    empty: int = 0
    samples: int = 0
    shards: int = 0
    is_estimate: bool = False
    """Some samples were dropped, so documents and bytes are shares of what was read, by tokens."""
    histogram: list[int] = field(default_factory=list)
    """Documents by length: entry b counts those of 2**(b-1) to 2**b - 1 tokens."""
    longest: list[tuple[int, str]] = field(default_factory=list)
    """(tokens, where) of the longest documents."""
    bad_records: list[str] = field(default_factory=list)
    """The first few records that were skipped, and why."""


@dataclass(frozen=True)
class Target:
    """Where the output goes: a folder of its own, or a pair of files at a prefix."""

    tokenizer_folder: Path
    work: Path  # where it is built
    folder: Path  # final folder
    stem: str | None  # name of the pair, for the indexed format

    @staticmethod
    def choose(options: PrepareOptions, key: str) -> "Target":
        root, split, prefix = options.folder, options.split, options.output_prefix
        if options.format == "mds":
            return Target(root / "tokenizer", root / f".{split}.partial", root / split, None)
        pair = Path(prefix) if prefix else root / split / split
        stem = f"{pair.name}_{key}_document"
        tokenizer_folder = (pair.parent if prefix else root) / "tokenizer"
        return Target(tokenizer_folder, pair.parent / f".{stem}.partial", pair.parent, stem)

    def remove(self) -> None:
        """Delete an earlier result, finished or not; an error if `prepare` did not write it."""
        self.check_work()
        try:
            if self.stem is None:
                taken = self.folder.is_symlink() or (self.folder.exists() and not is_empty(self.folder))
            else:  # a run that was killed at the very end has put the .bin in place and nothing else
                ends = ("idx", "meta.json") if (self.work / STATE).is_file() else ("idx", "meta.json", "bin")
                taken = any(os.path.lexists(self.folder / f"{self.stem}.{end}") for end in ends)
            if taken and not self._is_own():
                output = self.folder / self.stem if self.stem else self.folder
                raise DataError(
                    f"{output}: not removed, because it is a link or has no meta.json of `prepare`; "
                    "remove it yourself, or choose another output"
                )
            if self.work.exists():
                shutil.rmtree(self.work)
            if self.stem is not None:
                for suffix in ("idx", "bin", "meta.json"):
                    (self.folder / f"{self.stem}.{suffix}").unlink(missing_ok=True)
            elif self.folder.exists():
                for entry in sorted(self.folder.iterdir()):
                    if entry != self.meta:  # last: a removal that is interrupted can be repeated
                        _remove(entry)
                self.meta.unlink(missing_ok=True)
                self.folder.rmdir()
        except OSError as error:
            raise disk_error("remove", self.folder, error) from None

    def check_work(self) -> None:
        """Refuse a work folder that `prepare` did not make: its contents would be removed."""
        if self.work.is_symlink() or (self.work.exists() and not self.work.is_dir()):
            raise DataError(f"{self.work}: not a folder that `prepare` made; move it away, or choose another output")
        with contextlib.suppress(FileNotFoundError):
            for entry in self.work.iterdir():
                if entry.is_symlink() or not _WORK_NAMES.fullmatch(entry.name):
                    raise DataError(f"{entry}: `prepare` did not write this; move it away, or choose another output")

    def _is_own(self) -> bool:
        """Whether the result has the metadata of a preparation."""
        if self.stem is None and self.folder.is_symlink():
            return False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return bool(json.loads(self.meta.read_text(encoding="utf-8"))["prepare"]["signature"])
        return False

    @property
    def meta(self) -> Path:
        return self.folder / (f"{self.stem}.meta.json" if self.stem else "meta.json")


def is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _remove(path: Path) -> None:
    """Delete a file, a link or a folder; what a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class Journal:
    """Which pieces and shards of a split are done, in memory and in its work folder."""

    def __init__(self, work: Path, share: tuple[int, int] | None, say: Callable[[str], None]):
        self.work, self.share, self.say = work, share, say
        self.turn, self.turns = share or (0, 1)  # own pieces: those whose number is `turn` modulo `turns`
        self.pieces: dict[int, dict[str, Any]] = {}  # finished pieces and what was in them
        self.shards: dict[int, dict[str, Any]] = {}  # finished shards and their index entries
        self.state: dict[str, Any] = {}

    def is_own(self, piece: int) -> bool:
        """Whether this process does the piece."""
        return piece % self.turns == self.turn

    @contextlib.contextmanager
    def opened(self, state: dict[str, Any]) -> Iterator[None]:
        """Read what an earlier run of the same command has done, or clear what another command left. Locks the work
        folder. `state` describes this command."""
        self.work.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as locks:
            if self.share:
                with (self.work / "lock.start").open("w") as start:
                    fcntl.flock(start, fcntl.LOCK_EX)  # one after another: the first prepares the folder
                    locks.enter_context(self._lock(f"lock.{self.turn}", fcntl.LOCK_EX))
                    self._start_or_resume(locks.enter_context(self._lock("lock", fcntl.LOCK_SH)), state)
            else:
                self._start_or_resume(locks.enter_context(self._lock("lock", fcntl.LOCK_EX)), state)
            own = self.work / (f"journal.{self.turn}.jsonl" if self.share else "journal.jsonl")
            for path in sorted(self.work.glob("journal*.jsonl")):
                self._read(path, repair=path == own)
            self._verify_parts()
            with own.open("a", encoding="utf-8") as self.file:
                yield

    def record(self, task: Literal["tokenize", "shard"], number: int, done: dict[str, Any]) -> None:
        """Note a finished task."""
        (self.pieces if task == "tokenize" else self.shards)[number] = done
        self.file.write(json.dumps({"task": task, "number": number, "done": done}) + "\n")
        self.file.flush()

    def _lock(self, name: str, how: int) -> IO[str]:
        """Held while the file is open."""
        file = (self.work / name).open("w+")
        self._take(file, how)
        return file

    def _take(self, file: IO[str], how: int) -> None:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise DataError(f"{self.work}: another `prepare` is running here; wait for it") from None

    def _start_or_resume(self, lock: IO[str], state: dict[str, Any]) -> None:
        old: Any = None
        with contextlib.suppress(OSError, ValueError):
            old = json.loads((self.work / STATE).read_text(encoding="utf-8"))
        if isinstance(old, dict) and all(old.get(k) == state[k] for k in ("signature", "inputs")):
            self.state = old
        else:
            if old:
                self._take(lock, fcntl.LOCK_EX)  # not while another command's processes are running
                self.say(f"{self.work}: left by another command or other input; starting again")
            for entry in self.work.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif not entry.name.startswith("lock"):
                    entry.unlink()
            write_json(self.work / STATE, state)
            self.state = state
            if self.share:
                self._take(lock, fcntl.LOCK_SH)
        for name in ("parts", "shards"):
            (self.work / name).mkdir(exist_ok=True)

    def _read(self, path: Path, repair: bool) -> None:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        if repair and len(whole) < len(lines):  # killed while it wrote the last one
            path.write_text("".join(whole), encoding="utf-8")
        for line in whole:
            entry = json.loads(line)
            if entry["task"] != "tokenize":
                self.shards[entry["number"]] = entry["done"]
            elif self.is_own(entry["number"]):
                self.pieces[entry["number"]] = entry["done"]

    def _verify_parts(self) -> None:
        for number, done in follow("verifying what an earlier run left", list(self.pieces.items())):
            data, lengths = part_paths(self.work, number)
            # A missing part is in finished shards; one that is damaged (a power cut) must be rebuilt.
            if data.exists() and (not lengths.exists() or file_hash(data, xxhash.xxh3_64) != done["hash"]):
                del self.pieces[number]
