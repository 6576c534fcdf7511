"""The state file: every record on disk before anything else, one writer, damage told in one sentence."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ingot.launch.supervisor import state_file
from ingot.launch.supervisor.records import Cause, Closed, Excluded, Judged, Launched, Opened, PhaseBegan, Started
from ingot.launch.supervisor.state_file import StateError, StateFile, Superseded, current_launch, now, read_state

RECORDS: list[Any] = [
    Launched(time=now(), launch="a1", back_end="slurm", nodes=2, spares=1),
    Started(time=now(), launch="a1", job="7", restart=0, host="n1", nodes=("n1", "n2", "n3"), step=0),
    Opened(time=now(), epoch=1, attempt="7.0.1", nodes=("n1", "n2"), step=0),
    PhaseBegan(time=now(), epoch=1, phase="running"),
    Closed(time=now(), epoch=1, cause=Cause("device", "Xid 79 — «off the bus»", "n2", is_local=True), step=10),
    Excluded(time=now(), node="n2", reason="Xid 79"),
    Judged(time=now(), epoch=1, action="swap", reason="n3 takes the place of n2"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "launch"


def write(folder: Path, records: list[Any] = RECORDS) -> StateFile:
    state = StateFile(folder)
    assert all(state.append(record) for record in records)
    return state


def test_what_is_written_is_read(folder: Path) -> None:
    assert read_state(folder / "state.jsonl") == []
    write(folder)
    assert read_state(folder / "state.jsonl") == RECORDS == StateFile(folder).records


def test_a_record_is_synced_before_append_returns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    write(folder)
    assert len(synced) == len(RECORDS) and synced[-1] == (folder / "state.jsonl").stat().st_size


@pytest.mark.parametrize("kept", range(1, 60, 7))
def test_a_record_cut_off_by_a_crash_is_ignored_and_overwritten(folder: Path, kept: int) -> None:
    write(folder)
    path = folder / "state.jsonl"
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    path.write_bytes(whole[: start + kept])
    assert read_state(path) == RECORDS[:-1]
    StateFile(folder).append(RECORDS[-1])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b'{"event": "exploded"}\n', b'{"event": "opened"}\n', b"\x00\xff\n", b"[1]\n", b"\n",
     b'{"event":"closed","time":"x","epoch":1,"step":0,"cause":{"kind":"bad luck","message":""}}\n'],
)  # fmt: skip
@pytest.mark.parametrize("before", [0, 3])
def test_damaged_or_foreign_content_is_one_sentence_that_names_the_line(
    folder: Path, content: bytes, before: int
) -> None:
    write(folder, RECORDS[:before])
    path = folder / "state.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    damaged = (path.read_bytes() if before else b"") + content
    path.write_bytes(damaged)
    with pytest.raises(
        StateError, match=f"line {before + 1} is not a record.*move it away with `mv .*launch the run again"
    ) as refused:
        StateFile(folder)
    assert path.read_bytes() == damaged and "\n" not in str(refused.value)


def test_a_huge_file_is_refused_without_being_read(folder: Path) -> None:
    folder.mkdir(parents=True)
    with (folder / "state.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StateError, match="are the most that it can have"):
        StateFile(folder)


def test_a_folder_in_its_place_is_one_sentence(folder: Path) -> None:
    (folder / "state.jsonl").mkdir(parents=True)
    with pytest.raises(StateError, match="it is a folder and not a file"):
        read_state(folder / "state.jsonl")


def test_the_supervisor_of_a_cut_off_node_cannot_write_after_its_successor(folder: Path) -> None:
    orphan = write(folder, RECORDS[:3])
    successor = StateFile(folder)
    successor.append(RECORDS[3])
    content = (folder / "state.jsonl").read_bytes()
    with pytest.raises(Superseded):
        orphan.append(RECORDS[4])
    assert (folder / "state.jsonl").read_bytes() == content


def test_no_two_attempts_share_an_epoch(folder: Path) -> None:
    first, second = StateFile(folder), StateFile(folder)
    assert [first.claim_epoch(1), second.claim_epoch(1), first.claim_epoch(2), second.claim_epoch(7)] == [1, 2, 3, 7]


def full_after(limit: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with room for `limit` bytes in this folder: the writes themselves are real."""
    plain_write, plain_bytes = os.pwrite, Path.write_bytes

    def used() -> int:
        return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        free = limit - used() + os.fstat(descriptor).st_size - offset
        if free <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain_write(descriptor, data[:free], offset)

    def write_bytes(path: Path, data: bytes) -> int:
        if used() + len(data) > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain_bytes(path, data)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(Path, "write_bytes", write_bytes)


def test_on_a_full_disk_the_reserve_makes_room_for_the_end_of_the_story(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = write(folder, RECORDS[:3])
    size = (folder / "state.jsonl").stat().st_size
    full_after(size + state_file.RESERVE_BYTES + 40, folder, monkeypatch)  # room for half a record
    assert all(state.append(record) for record in RECORDS[3:])
    assert read_state(folder / "state.jsonl") == RECORDS
    assert not (folder / "reserve").exists()


def test_what_cannot_be_written_is_kept_and_written_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = write(folder, RECORDS[:3])
    (folder / "reserve").unlink()
    with monkeypatch.context() as patch:
        full_after((folder / "state.jsonl").stat().st_size + 40, folder, patch)
        assert not any(state.append(record) for record in RECORDS[3:6])
        assert state.records == RECORDS[:6] and read_state(folder / "state.jsonl") == RECORDS[:3]
    assert state.append(RECORDS[6])
    assert read_state(folder / "state.jsonl") == RECORDS


def test_a_launch_begins_with_its_own_record(folder: Path) -> None:
    again = Launched(time=now(), launch="b2", back_end="slurm", nodes=2)
    assert current_launch([*RECORDS, again, RECORDS[1]]) == [again, RECORDS[1]]
    assert current_launch([*RECORDS]) == RECORDS
