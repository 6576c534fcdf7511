"""Memory of a launcher that holds two copies of a rank's state, and outlives the rank.

It is an anonymous file (memfd) that the launcher creates and the rank inherits. It has no name, so nothing can be left
behind: the system frees it when the last process that holds it ends, however it ends. While one copy is written, the
other stays intact. A record with hashes is written after the copy; a rank that dies before leaves no record.

    records     2 x 1 MiB   length, hash, whether it was used, JSON: step, life of the run, state, hash of the content
    contents    2 x the size of the larger content, each a whole safetensors file
"""

import mmap
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
import xxhash

from ingot.errors import CheckpointError
from ingot.parallel.rank_env import COPY_FDS

SLOTS = (0, 1)
RECORD_BYTES = 1 << 20
START = 25  # of a record's JSON: after its length (8 bytes), its hash (16), and a byte that says whether it was used
BLOCK = 1 << 24
NAME = "ingot-copy"


class CopyRecord(msgspec.Struct, frozen=True):
    """What a copy is of."""

    step: int
    life: str
    """Of the processes that wrote it, the same on all ranks: copies of one step from two lives do not fit together."""
    owner: str
    """Run, layout and rank."""
    bytes: int
    xxh3: str
    tensors: list[tuple[str, str, str, tuple[int, ...]]]
    """Kind, name, type and whole shape."""
    state: str = ""
    """Of rank 0: JSON of everything that is not a tensor."""
    for_peer: bool = False
    """Whether every node has room for the copies of another node as well."""


class CopyMemory:
    """The memory of a rank, seen by the rank or by its launcher."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        if os.fstat(descriptor).st_size < 2 * RECORD_BYTES:
            os.ftruncate(descriptor, 2 * RECORD_BYTES)

    def records(self) -> dict[int, CopyRecord]:
        """The complete copies that have not been used, by slot. Contents are not verified."""
        return {slot: record for slot in SLOTS if (record := self._record(slot)) is not None}

    def _record(self, slot: int) -> CopyRecord | None:
        head = os.pread(self.descriptor, START, slot * RECORD_BYTES)
        length = int.from_bytes(head[:8], "little")
        if not 0 < length <= RECORD_BYTES - START or head[24]:
            return None
        text = os.pread(self.descriptor, length, slot * RECORD_BYTES + START)
        if xxhash.xxh3_128_digest(text) != head[8:24]:
            return None
        try:
            return msgspec.json.decode(text, type=CopyRecord)
        except msgspec.DecodeError:
            return None

    def find(self, step: int, life: str) -> tuple[int, CopyRecord] | None:
        """The slot and record of a copy."""
        return next(((slot, r) for slot, r in self.records().items() if (r.step, r.life) == (step, life)), None)

    def bytes_in_use(self) -> int:
        """What the system has given to this memory so far."""
        return os.fstat(self.descriptor).st_blocks * 512

    def offset_of(self, slot: int) -> int:
        """Where a content begins."""
        return 2 * RECORD_BYTES + slot * self._content_bytes()

    def _content_bytes(self) -> int:
        return (os.fstat(self.descriptor).st_size - 2 * RECORD_BYTES) // 2

    def slot_to_write(self) -> int:
        """The slot without a complete copy, or with the older one."""
        records = self.records()
        return min(SLOTS, key=lambda slot: records[slot].step if slot in records else -1)

    def forget(self, slot: int) -> None:
        os.pwrite(self.descriptor, bytes(START), slot * RECORD_BYTES)

    def forget_all(self) -> None:
        for slot in SLOTS:
            self.forget(slot)

    def mark_used(self, slot: int) -> None:
        """Offer the copy no more: if the run fails again before the next one, the fault may be in it."""
        os.pwrite(self.descriptor, b"\1", slot * RECORD_BYTES + 24)

    def begin(self, slot: int) -> Callable[[int], mmap.mmap]:
        """Forget what is in a slot; returns what maps the slot for a new content of a given size."""
        self.forget(slot)

        def allocate(size: int) -> mmap.mmap:
            pages = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            if os.fstat(self.descriptor).st_size != 2 * (RECORD_BYTES + pages):  # of another size: not the same tensors
                self.forget_all()
                os.ftruncate(self.descriptor, 2 * (RECORD_BYTES + pages))
            return mmap.mmap(self.descriptor, size, offset=2 * RECORD_BYTES + slot * pages)

        return allocate

    def complete(self, slot: int, record: CopyRecord) -> None:
        """Write the record of a content that is there."""
        text = msgspec.json.encode(record)
        if len(text) > RECORD_BYTES - START:
            raise CheckpointError(f"the state of the run has {len(text)} bytes of JSON, too many for a copy in memory")
        os.pwrite(self.descriptor, text, slot * RECORD_BYTES + START)
        head = len(text).to_bytes(8, "little") + xxhash.xxh3_128_digest(text) + b"\0"
        os.pwrite(self.descriptor, head, slot * RECORD_BYTES)

    def content(self, slot: int, record: CopyRecord) -> mmap.mmap:
        """A content, verified."""
        if record.bytes > self._content_bytes():
            raise CheckpointError(f"the copy of step {record.step} in host memory is cut short")
        memory = mmap.mmap(self.descriptor, record.bytes, offset=self.offset_of(slot))
        if content_hash(memoryview(memory)) != record.xxh3:
            raise CheckpointError(f"the copy of step {record.step} in host memory is corrupt: its hash differs")
        return memory


def content_hash(content: memoryview) -> str:
    digest = xxhash.xxh3_128()
    for begin in range(0, len(content), BLOCK):  # this releases the GIL
        digest.update(content[begin : begin + BLOCK])
    return digest.hexdigest()


class CopyKeeper:
    """The launcher's side: the memory of each of its ranks. Nothing is allocated before a rank writes."""

    def __init__(self, ranks: int):
        self.memories: list[CopyMemory] = []
        with suppress(OSError, AttributeError):  # Linux only
            self.memories = [CopyMemory(os.memfd_create(f"{NAME}-{rank}")) for rank in range(ranks)]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """An environment that tells the ranks of their memory. `inherited` says which descriptors they must get."""
        descriptors = ",".join(str(memory.descriptor) for memory in self.memories)
        rest = {name: value for name, value in env.items() if name != COPY_FDS}
        return {**rest, COPY_FDS: descriptors} if descriptors else rest

    def newest(self) -> int:
        """The newest step that all ranks have copied; 0 if there is none."""
        return max((step for step, _ in self.complete()), default=0)

    def complete(self, for_peer: bool = False) -> set[tuple[int, str]]:
        """Step and life of the copies that all ranks have; with `for_peer`, of those that another node is to keep."""
        held = [{(r.step, r.life) for r in memory.records().values() if r.for_peer or not for_peer}
                for memory in self.memories]  # fmt: skip
        return set.intersection(*held) if held else set()

    def close(self) -> None:
        for memory in self.memories:
            os.close(memory.descriptor)
        self.memories = []


def inherited(env: Mapping[str, str], local_rank: int) -> tuple[int, ...]:
    """The descriptor that a rank must inherit, if its launcher keeps memory for it."""
    found = env.get(COPY_FDS, "").split(",")
    return (int(found[local_rank]),) if local_rank < len(found) and found[local_rank].isdigit() else ()


def find_memory(env: Mapping[str, str], local_rank: int) -> CopyMemory | None:
    """The memory of this rank; None if its launcher keeps none. A descriptor of something else is left alone."""
    for descriptor in inherited(env, local_rank):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{NAME}-"):
                return CopyMemory(descriptor)
    return None
