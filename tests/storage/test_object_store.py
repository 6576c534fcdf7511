"""Reading from a folder as from an object store."""

from pathlib import Path

import pytest

from ingot.storage import object_store
from ingot.storage.object_store import Remote, RemoteFile


@pytest.mark.parametrize(("begin", "count", "expected"), [(None, 0, b"0123456789"), (2, 5, b"23456"), (8, 5, b"89")])
def test_a_part_of_a_local_file_has_the_bytes_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: int | None, count: int, expected: bytes
) -> None:
    monkeypatch.setattr(object_store, "CHUNK", 3)
    (tmp_path / "x").write_bytes(b"0123456789")
    assert b"".join(Remote(str(tmp_path)).stream("x", begin, count)) == expected


def test_a_remote_file_reads_and_seeks_like_any_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    file = RemoteFile(f"file://{tmp_path}/x")
    assert file.read(4) == b"0123" and file.seek(-3, 2) == 7
    assert file.read() == b"789" and file.read(1) == b""
