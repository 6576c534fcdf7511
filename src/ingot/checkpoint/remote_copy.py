"""Checkpoints in an object store or in a folder, fetched and uploaded alike, by all processes together. The manifest
goes up last and is read first, as on a disk.
"""

import json
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from ingot.checkpoint.coordinator import Coordinator
from ingot.checkpoint.location import CheckpointLocation, find_checkpoints
from ingot.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    incomplete_steps,
    read_manifest,
    steps_in,
    verify,
    write_manifest,
)
from ingot.checkpoint.store import DRAFT, put_in_place, share_of
from ingot.errors import CheckpointError, DataError, DiskError, disk_error
from ingot.parallel.rendezvous import World
from ingot.storage.object_store import Remote

RUN_FILES = ("config.yaml", "metrics.jsonl", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")
"""What goes along with a checkpoint, so that a run can go on elsewhere."""


def newest_good(run: Path, ranks: Coordinator, remote: Remote | None = None) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint of a run whose files are all intact, and what was wrong with newer ones.

    The processes check some files each and come to one verdict. One that only `remote` has is fetched. None if there
    is no checkpoint yet; an error if there are some and all are damaged.
    """
    problems: list[str] = []
    for step, here in json.loads(ranks.ask("-", lambda said: json.dumps(_candidates(run, remote)))):
        try:
            if here:
                return _check(run / CHECKPOINTS / str(step), ranks), problems
            assert remote is not None
            return fetch_into_run(CheckpointLocation(remote, f"{CHECKPOINTS}/{step}/"), run, ranks), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            f"{'; '.join(problems)}; no checkpoint of this run is intact: restore one, choose another save_folder, or "
            "delete them and start over with --fresh"
        )
    return None, problems


def _candidates(run: Path, remote: Remote | None) -> list[tuple[int, bool]]:
    """Steps and whether they are here, the best first. A store that does not answer is no store without checkpoints."""
    steps = [(step, True) for step in [*steps_in(run / CHECKPOINTS), *incomplete_steps(run / CHECKPOINTS)]]
    try:
        steps += [(place.step, False) for place in find_checkpoints(remote)] if remote is not None else []
    except DataError as error:
        raise DiskError(f"the checkpoints cannot be listed: {error}") from None
    return sorted(steps, reverse=True)


def _check(folder: Path, ranks: Coordinator) -> Manifest:
    def own_share() -> Manifest:
        manifest = read_manifest(folder)
        verify(manifest, share_of(manifest, ranks))
        return manifest

    return ranks.agree(own_share)


def fetch(place: CheckpointLocation, folder: Path, ranks: Coordinator, sections: list[str] | None = None) -> Manifest:
    """Copy a checkpoint, or some kinds of its files, into a folder, each process its share."""

    def own_share() -> Manifest:
        manifest = replace(place.manifest(), folder=folder)
        for name in share_of(manifest, ranks, sections):
            place.fetch(name, manifest.files[name], folder / name)
        return manifest

    return ranks.agree(own_share)


def fetch_into_run(place: CheckpointLocation, run: Path, ranks: Coordinator) -> Manifest:
    """Make a checkpoint from elsewhere one of a run's own."""
    draft = run / CHECKPOINTS / f"{DRAFT}fetch"
    manifest = fetch(place, draft, ranks)

    def commit() -> None:
        try:
            if ranks.first:
                write_manifest(manifest)
                put_in_place(draft, manifest.step)
        except OSError as error:
            raise disk_error("write", draft, error) from None

    ranks.agree(commit)
    return replace(manifest, folder=run / CHECKPOINTS / str(manifest.step))


def upload(manifest: Manifest, remote: Remote, names: list[str]) -> None:
    """Copy some files of a checkpoint that lies in a folder here; `MANIFEST` among them makes it one there."""
    prefix = f"{CHECKPOINTS}/{manifest.step}/"
    for name in names:
        if remote.size(prefix + name) is not None and name == MANIFEST:
            remote.delete([prefix + name])
        remote.put(prefix + name, manifest.folder / name)


def copy_checkpoint(place: CheckpointLocation, to: str) -> CheckpointLocation:
    """Copy a checkpoint to another run folder or URL, verified before its manifest makes it one there."""
    target = Remote(to)
    with ExitStack() as stack:
        if place.remote.folder is not None:
            manifest = place.manifest()
            verify(manifest)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ingot-copy-"))
            manifest = fetch(place, Path(folder), Coordinator())
            write_manifest(manifest)
        try:
            if place.prefix and place.remote.folder is not None:
                _put_run_files(place.remote.folder, target)
            upload(manifest, target, [*manifest.files, MANIFEST])
        except OSError as error:
            raise disk_error("write", to, error) from None
    return CheckpointLocation(target, f"{CHECKPOINTS}/{manifest.step}/")


def _put_run_files(run: Path, remote: Remote) -> None:
    for name in RUN_FILES:
        if (run / name).is_file():
            remote.put(name, run / name)


class Uploader:
    """Copies of a run's checkpoints at a URL, made behind the loop and behind the next local save, one at a time."""

    def __init__(self, url: str, run: Path, world: World | None, retain: Callable[[list[int]], list[int]]):
        self.remote, self.run, self.retain = Remote(url), run, retain
        self.ranks = Coordinator(world, "upload")
        self.news: list[tuple[str, bool]] = []
        self.problem: str | None = None
        self.step: int | None = None  # of the checkpoint that is on its way
        self._thread: threading.Thread | None = None

    def start(self, folder: Path) -> None:
        """Begin to upload a checkpoint, which must not be removed before that is done; all processes must call this."""
        self.wait()
        self.step = int(folder.name)
        self._thread = threading.Thread(target=self._run, args=(folder,), name="upload", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, folder: Path) -> None:
        try:
            self.ranks.agree(lambda: self._own_share(folder))
            self.ranks.agree(lambda: self._commit(folder))
            self.problem = None
        except CheckpointError as error:
            self.problem = str(error)
        except Exception as error:  # nothing that happens here may end the run
            self.problem = f"{type(error).__name__}: {error}"
        self.step = None
        if self.problem:
            self.news.append((f"uploading checkpoint {folder.name} to {self.remote.url} failed: {self.problem}", True))
        else:
            self.news.append((f"uploaded {self.remote.url}/{CHECKPOINTS}/{folder.name}", False))

    def _own_share(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        upload(manifest, self.remote, share_of(manifest, self.ranks))

    def _commit(self, folder: Path) -> None:
        if not self.ranks.first:
            return
        _put_run_files(self.run, self.remote)
        upload(read_manifest(folder), self.remote, [MANIFEST])
        self.remove(self.retain([place.step for place in find_checkpoints(self.remote)]))

    def remove(self, steps: list[int]) -> None:
        for step in steps:
            folder = f"{CHECKPOINTS}/{step}"
            self.remote.delete([f"{folder}/{MANIFEST}"])  # first, so that it is no checkpoint any more
            if names := self.remote.names(folder):
                self.remote.delete([f"{folder}/{name}" for name in names])
