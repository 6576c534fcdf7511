"""Copies in a launcher's memory: whole or not there, verified, used once, and gone with the last process."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from ingot.checkpoint.copy_memory import (
    RECORD_BYTES,
    SLOTS,
    START,
    CopyKeeper,
    CopyMemory,
    CopyRecord,
    content_hash,
    find_memory,
)
from ingot.errors import CheckpointError

KILLS = 15


@pytest.fixture
def keeper():  # type: ignore[no-untyped-def]
    keeper = CopyKeeper(2)
    yield keeper
    keeper.close()


def write(memory: CopyMemory, slot: int, step: int, size: int = 100_000, life: str = "a") -> None:
    content = memory.begin(slot)(size)
    content[:] = bytes([step % 256]) * size
    memory.complete(slot, CopyRecord(step, life, "me", size, content_hash(memoryview(content)), []))


def test_two_copies_are_kept_apart(keeper: CopyKeeper) -> None:
    memory = keeper.memories[0]
    assert memory.records() == {}
    for slot, step in ((0, 5), (1, 6)):
        write(memory, slot, step)
    found = memory.records()
    assert {slot: record.step for slot, record in found.items()} == {0: 5, 1: 6}
    assert [memory.content(slot, found[slot])[:2] for slot in SLOTS] == [b"\5\5", b"\6\6"]
    memory.begin(0)
    assert {slot: record.step for slot, record in memory.records().items()} == {1: 6}


def test_a_copy_is_offered_once(keeper: CopyKeeper) -> None:
    memory = keeper.memories[0]
    write(memory, 0, 5)
    memory.mark_used(0)
    assert memory.records() == {}
    write(memory, 0, 7)
    assert memory.records()[0].step == 7


@pytest.mark.parametrize("place", [0, 8, START, START + 10])
def test_a_damaged_record_is_not_a_copy(keeper: CopyKeeper, place: int) -> None:
    memory = keeper.memories[0]
    write(memory, 0, 5)
    (byte,) = os.pread(memory.descriptor, 1, place)
    os.pwrite(memory.descriptor, bytes([byte ^ 1]), place)
    assert memory.records() == {}


def test_a_damaged_content_is_refused(keeper: CopyKeeper) -> None:
    memory = keeper.memories[0]
    write(memory, 1, 5)
    record = memory.records()[1]
    content = memory.content(1, record)
    content[50_000] ^= 1
    with pytest.raises(CheckpointError, match="copy of step 5 in host memory is corrupt"):
        memory.content(1, record)
    content.close()
    os.ftruncate(memory.descriptor, 2 * RECORD_BYTES + 4096)
    with pytest.raises(CheckpointError, match="cut short"):
        memory.content(1, record)


def test_a_content_of_another_size_replaces_both(keeper: CopyKeeper) -> None:
    memory = keeper.memories[0]
    write(memory, 0, 5)
    write(memory, 1, 6, size=300_000)
    assert {slot: record.step for slot, record in memory.records().items()} == {1: 6}


def test_the_launcher_knows_the_newest_step_of_all_ranks(keeper: CopyKeeper) -> None:
    one, two = keeper.memories
    assert keeper.newest() == 0
    for slot, step in ((0, 5), (1, 6)):
        write(one, slot, step)
    write(two, 0, 5)
    assert keeper.newest() == 5
    write(two, 1, 6, life="of another attempt")
    assert keeper.newest() == 5


def test_a_rank_finds_its_own_memory_and_takes_no_other_file_for_it(keeper: CopyKeeper, tmp_path: Path) -> None:
    env = keeper.environment({"A": "1", "INGOT_COPY_FDS": "77"})
    assert env["A"] == "1"
    found = find_memory(env, 1)
    assert found is not None and found.descriptor == keeper.memories[1].descriptor
    assert find_memory(env, 2) is None and find_memory({}, 0) is None
    with (tmp_path / "file").open("wb") as file:
        assert find_memory({"INGOT_COPY_FDS": str(file.fileno())}, 0) is None
    assert (tmp_path / "file").stat().st_size == 0
    assert find_memory({"INGOT_COPY_FDS": "999"}, 0) is None
    assert "INGOT_COPY_FDS" not in CopyKeeper(0).environment(env)


def write_for_ever(memory: CopyMemory) -> None:
    first = max(record.step for record in memory.records().values())
    for step in range(first + 1, 1_000_000):
        write(memory, memory.slot_to_write(), step, size=3_000_000)


def test_a_rank_killed_at_any_moment_leaves_whole_copies_or_none(keeper: CopyKeeper) -> None:
    memory, chance, seen = keeper.memories[0], random.Random(1), set()
    write(memory, 0, 2, size=3_000_000)
    write(memory, 1, 1, size=3_000_000)
    start = multiprocessing.get_context("fork")
    for _ in range(KILLS):
        process = start.Process(target=write_for_ever, args=(memory,))
        process.start()
        time.sleep(0.02 + chance.random() * 0.1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        records = memory.records()
        seen.add(len(records))
        assert records  # the one that was not being written
        for slot, record in records.items():
            assert set(memory.content(slot, record)[::1000]) == {record.step % 256}
    assert 1 in seen  # some were killed while they wrote


def test_the_memory_has_no_name_and_ends_with_its_last_process(keeper: CopyKeeper) -> None:
    before = set(os.listdir("/dev/shm"))
    write(keeper.memories[0], 0, 5)
    assert set(os.listdir("/dev/shm")) <= before
    link = os.readlink(f"/proc/self/fd/{keeper.memories[0].descriptor}")
    assert link == "/memfd:ingot-copy-0 (deleted)"
