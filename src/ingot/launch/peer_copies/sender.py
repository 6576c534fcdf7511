"""Sends the newest copy of this node's ranks to the node that keeps it, and fetches copies from there.

A thread of the agent looks for new copies; the ranks do not know of it. Only the newest is sent, nothing queues up. The
transfer is spread over half the time between two copies, within 50 MB/s and 1 GB/s, so that it leaves the network to
others. What cannot be sent is left out: the next copy may get through.
"""

import threading
import time
from contextlib import suppress
from typing import Any

from ingot.checkpoint.copy_memory import CopyKeeper, CopyRecord
from ingot.launch.peer_copies.wire import (
    AskForCopy,
    ForgetCopies,
    JobIdentity,
    OfferCopy,
    Pace,
    PeerError,
    PeerLine,
    lower_priority,
)

MIN_BYTES_PER_SECOND, MAX_BYTES_PER_SECOND = 50e6, 1e9
SHARE_OF_INTERVAL = 0.5
LOOK_SECONDS = 0.25
RETRY_SECONDS = 5.0
NOTHING = (0, "")
END_SECONDS = 2.0  # for the thread to notice that it is to end


class CopySender:
    """Sends from construction until `close`.

    on_problem: called, in the thread, with the first problem after a success
    """

    def __init__(self, job: JobIdentity, keeper: CopyKeeper, node_rank: int, address: str, on_problem: Any):
        self.job, self.keeper, self.node_rank, self.address = job, keeper, node_rank, address
        self.sent = NOTHING
        """Step and life of the newest copy that the other node has."""
        self._on_problem, self._has_problem = on_problem, False
        self._seen: tuple[tuple[int, str], float] = NOTHING, 0.0
        self._interval = 0.0
        self._stopping = threading.Event()
        self._line: PeerLine | None = None
        self._thread = threading.Thread(target=self._run, name="ingot-copy-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if (line := self._line) is not None:
            line.close()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        lower_priority()
        pause = LOOK_SECONDS
        while not self._stopping.wait(pause):
            pause = LOOK_SECONDS
            with suppress(OSError):  # the memory was closed: the agent ends
                newest = self._newest() or NOTHING
                if newest == self.sent:
                    continue
                try:
                    self._send(newest) if newest != NOTHING else self._take_back()
                    self.sent = newest
                    kept = self.keeper.complete()
                    if newest not in (NOTHING, *kept) and any(c[0] > newest[0] and c[1] == newest[1] for c in kept):
                        self._tell(f"copies are made faster than they can be sent to {self.address}: those there are "
                                   "too old to be of use; raise snapshot_interval")  # fmt: skip
                    else:
                        self._has_problem = False
                except PeerError as error:
                    pause = RETRY_SECONDS
                    if newest == NOTHING:
                        continue
                    self._tell(f"the copy of step {newest[0]} was not sent to {self.address}: {error}")

    def _tell(self, problem: str) -> None:
        if not self._stopping.is_set() and not self._has_problem:
            self._has_problem = True
            self._on_problem(problem)

    def _newest(self) -> tuple[int, str] | None:
        """The newest copy that all ranks of this node have and that is meant to leave it."""
        newest = max(self.keeper.complete(for_peer=True), default=None)
        now = time.monotonic()
        if newest is not None and newest != self._seen[0]:
            before, at = self._seen
            if before[1] == newest[1]:
                self._interval = now - at
            self._seen = newest, now
        return newest

    def _take_back(self) -> None:
        """The ranks have used or discarded all copies. A node that dies alone leaves nobody else who knows that."""
        line = PeerLine.connect(self.address, self.job)
        try:
            line.ask(ForgetCopies(self.node_rank))
        finally:
            line.close()

    def _rate(self, total: int) -> float:
        if not self._interval:
            return MAX_BYTES_PER_SECOND
        return min(MAX_BYTES_PER_SECOND, max(MIN_BYTES_PER_SECOND, total / (SHARE_OF_INTERVAL * self._interval)))

    def _send(self, newest: tuple[int, str]) -> None:
        self._line = line = PeerLine.connect(self.address, self.job)
        try:
            if self._stopping.is_set():
                raise PeerError("this node does something else now")
            found = [memory.find(*newest) for memory in self.keeper.memories]
            pace = Pace(self._rate(sum(record.bytes for _, record in filter(None, found))), self._stopping)
            for local_rank, (memory, copy) in enumerate(zip(self.keeper.memories, found, strict=True)):
                if copy is None:
                    raise PeerError("the ranks have overwritten it")
                slot, record = copy
                if not line.ask(OfferCopy(self.node_rank, local_rank, record)).has_it:
                    line.send_content(memory, slot, record, pace)
                    line.confirm()
        finally:
            self._line = None
            line.close()


def fetch_copies(
    job: JobIdentity, keeper: CopyKeeper, node_rank: int, copy: tuple[int, str], address: str
) -> list[CopyRecord]:
    """Fill the memory of this node's ranks with those of a node of this rank, as another node has kept them. Raises
    `PeerError`, and then leaves nothing."""
    line = PeerLine.connect(address, job)
    records = []
    try:
        for local_rank, memory in enumerate(keeper.memories):
            record = line.ask(AskForCopy(node_rank, local_rank, *copy)).record
            if record is None or (record.step, record.life) != copy:
                raise PeerError("the other node answers something else")
            memory.forget_all()
            line.receive_content(memory, 0, record)
            records.append(record)
    except BaseException:
        for memory in keeper.memories:
            memory.forget_all()
        raise
    finally:
        line.close()
    return records
