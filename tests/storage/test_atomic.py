"""Files that are there whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from ingot.storage import atomic
from ingot.storage.atomic import draft_of, write_whole


def test_a_private_file_is_never_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    (tmp_path / f".x.{os.getpid()}.tmp").symlink_to(tmp_path / "victim")  # as if somebody had put it there
    before = os.umask(0)
    try:
        with draft_of(path, private=True) as file:
            file.write(b"new")
            assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    finally:
        os.umask(before)
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_draft_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_whole(tmp_path / "x", "old")
    with pytest.raises(OSError, match="full"), draft_of(tmp_path / "x") as file:
        file.write(b"new")
        raise OSError("full")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "old")]


def test_a_file_system_that_cannot_sync_folders_is_not_an_error_but_a_broken_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(code: int) -> None:
        def fsync(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(code, "no")

        monkeypatch.setattr(atomic.os, "fsync", fsync)

    failing(errno.EINVAL)
    write_whole(tmp_path / "x", b"new")
    failing(errno.EIO)
    with pytest.raises(OSError, match="no"), draft_of(tmp_path / "x"):
        pass
