"""Checkpoints at a URL, fetched and uploaded by all ranks together. As on a disk, the manifest is written last and read
first.
"""

import json
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from msgspec.structs import replace

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
from ingot.checkpoint.store import DRAFT, own_files, put_in_place, read_and_verify
from ingot.errors import CheckpointError, DataError, DiskError, disk_error
from ingot.parallel.coordinator import Coordinator, LocalCoordinator
from ingot.storage.object_store import Remote

RUN_FILES = ("config.yaml", "metrics.jsonl", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")
"""Copied along with a checkpoint, so that the run can continue on another machine."""


def newest_good(run: Path, coordinator: Coordinator, remote: Remote | None = None) -> tuple[Manifest | None, list[str]]:
    """The newest intact checkpoint of a run, and what is wrong with newer ones.

    Each rank checks some of the files, and all return the same. A checkpoint that only `remote` has is fetched. None if
    there is no checkpoint yet; an error if there are some and all are damaged.
    """
    problems: list[str] = []
    candidates = coordinator.gather_and_decide("", lambda texts: [json.dumps(_candidates(run, remote))] * len(texts))
    for step, here in json.loads(candidates):
        try:
            if here:
                return read_and_verify(run / CHECKPOINTS / str(step), coordinator), problems
            assert remote is not None
            location = CheckpointLocation(remote, f"{CHECKPOINTS}/{step}/")
            return fetch_into_run(location, run, coordinator), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            f"{'; '.join(problems)}; no checkpoint of this run is intact, and none was deleted: restore one from a "
            "copy, or choose another save_folder"
        )
    return None, problems


def _candidates(run: Path, remote: Remote | None) -> list[tuple[int, bool]]:
    """Steps, and whether they are local, best first. An unreachable store is an error, not an empty one."""
    steps = [(step, True) for step in [*steps_in(run / CHECKPOINTS), *incomplete_steps(run / CHECKPOINTS)]]
    try:
        steps += [(found.step, False) for found in find_checkpoints(remote)] if remote is not None else []
    except DataError as error:
        raise DiskError(f"the checkpoints cannot be listed: {error}") from None
    return sorted(steps, reverse=True)


def fetch(
    location: CheckpointLocation, folder: Path, coordinator: Coordinator, kinds: list[str] | None = None
) -> Manifest:
    """Copy a checkpoint, or some kinds of its files, into a folder; each rank copies some files."""

    text = coordinator.broadcast(location.manifest_text)

    def fetch_own_files() -> Manifest:
        manifest = replace(location.parse(text), folder=folder)
        for name, file in own_files(manifest, coordinator, kinds).items():
            location.fetch(name, file, folder / name, manifest.files[name].bytes)
        return manifest

    return coordinator.run_on_all_ranks(fetch_own_files)


def fetch_into_run(location: CheckpointLocation, run: Path, coordinator: Coordinator) -> Manifest:
    """Fetch a checkpoint and make it one of the run's own."""
    draft = run / CHECKPOINTS / f"{DRAFT}fetch"
    manifest = fetch(location, draft, coordinator)

    def commit() -> None:
        try:
            if coordinator.is_first:
                write_manifest(manifest)
                put_in_place(draft, manifest.step)
        except OSError as error:
            raise disk_error("write", draft, error) from None

    coordinator.run_on_all_ranks(commit)
    return replace(manifest, folder=run / CHECKPOINTS / str(manifest.step))


def upload(folder: Path, prefix: str, remote: Remote, names: Iterable[str]) -> None:
    """Copy files of a local checkpoint to a URL. The copy of `MANIFEST` makes it a checkpoint there."""
    for name in names:
        if remote.size(prefix + name) is not None and name == MANIFEST:
            remote.delete([prefix + name])
        remote.put(prefix + name, folder / name)


def copy_checkpoint(location: CheckpointLocation, to: str) -> CheckpointLocation:
    """Copy a checkpoint to another run folder or URL: verified first, manifest last."""
    target = Remote(to)
    with ExitStack() as stack:
        if location.remote.folder is not None:
            manifest = location.manifest()
            verify(manifest)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ingot-copy-"))
            manifest = fetch(location, Path(folder), LocalCoordinator())
            write_manifest(manifest)
        try:
            if location.prefix and location.remote.folder is not None:
                _put_run_files(location.remote.folder, target)
            upload(manifest.folder, f"{CHECKPOINTS}/{manifest.step}/", target, [*manifest.files, MANIFEST])
        except OSError as error:
            raise disk_error("write", to, error) from None
    return CheckpointLocation(target, f"{CHECKPOINTS}/{manifest.step}/")


def _put_run_files(run: Path, remote: Remote) -> None:
    for name in RUN_FILES:
        if (run / name).is_file():
            remote.put(name, run / name)


class Uploader:
    """Copies a run's checkpoints to a URL in the background, one at a time; local saves continue meanwhile.

    `outdated` receives the steps of the checkpoints at the URL and returns those to delete.
    """

    def __init__(
        self,
        url: str,
        run: Path,
        coordinator: Coordinator,
        outdated: Callable[[list[int]], list[int]],
        confirm_owner: Callable[[], None] = lambda: None,
    ):
        self.remote, self.run, self._outdated, self._confirm_owner = Remote(url), run, outdated, confirm_owner
        self._coordinator = coordinator.for_topic("upload")
        self.news: list[tuple[str, bool]] = []
        self.problem: str | None = None
        self.step: int | None = None  # of the checkpoint that is being uploaded
        self._thread: threading.Thread | None = None

    def start(self, folder: Path) -> None:
        """Start to upload a checkpoint, which must not be deleted meanwhile. All ranks must call this."""
        self.wait()
        self.step = int(folder.name)
        self._thread = threading.Thread(target=self._run, args=(folder,), name="upload", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, folder: Path) -> None:
        try:
            names = json.loads(self._coordinator.gather_and_decide("", partial(self._share_files, folder)))
            prefix = f"{CHECKPOINTS}/{folder.name}/"
            self._coordinator.run_on_all_ranks(lambda: upload(folder, prefix, self.remote, names))
            self._coordinator.run_on_all_ranks(lambda: self._commit(folder, prefix))
            self.problem = None
        except CheckpointError as error:
            self.problem = str(error)
        except Exception as error:  # a failed upload must not end the run
            self.problem = f"{type(error).__name__}: {error}"
        self.step = None
        if self.problem:
            self.news.append((f"uploading checkpoint {folder.name} to {self.remote.url} failed: {self.problem}", True))
        else:
            self.news.append((f"uploaded {self.remote.url}/{CHECKPOINTS}/{folder.name}", False))

    def _share_files(self, folder: Path, texts: list[str]) -> list[str]:
        """What each rank uploads."""
        names = list(read_manifest(folder).files)
        return [json.dumps(names[rank :: len(texts)]) for rank in range(len(texts))]

    def _commit(self, folder: Path, prefix: str) -> None:
        if not self._coordinator.is_first:
            return
        _put_run_files(self.run, self.remote)
        self._confirm_owner()
        upload(folder, prefix, self.remote, [MANIFEST])
        self.remove(self._outdated([found.step for found in find_checkpoints(self.remote)]))

    def remove(self, steps: list[int]) -> None:
        for step in steps:
            folder = f"{CHECKPOINTS}/{step}"
            self.remote.delete([f"{folder}/{MANIFEST}"])  # first: without it, it is not a checkpoint
            if names := self.remote.names(folder):
                self.remote.delete([f"{folder}/{name}" for name in names])
