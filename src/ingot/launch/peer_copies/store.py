"""Copies that an agent keeps for the ranks of one other node, next to those of its own ranks, and the server that takes
and hands them out.

A guest has two slots for each rank, as the ranks themselves have: while a copy arrives, the one before stays complete.
"""

import socket
import threading
import time
from contextlib import suppress

from ingot.checkpoint.copy_memory import SLOTS, CopyKeeper, CopyMemory, CopyRecord
from ingot.host_memory import available_memory
from ingot.launch.peer_copies.wire import (
    AskForCopy,
    CopyAnswer,
    ForgetCopies,
    JobIdentity,
    OfferCopy,
    PeerError,
    PeerLine,
    lower_priority,
)

MAX_CONNECTIONS = 8
ACCEPT_PAUSE = 0.5
NOBODY = -1


class PeerStore:
    """Listens until `close`. `own` is the memory of this node's ranks."""

    def __init__(self, job: JobIdentity, own: CopyKeeper):
        self.job, self.own = job, own
        self.own_node_rank = self.guest = NOBODY
        self._copies = CopyKeeper(0)
        self._is_closed = False
        self._lock = threading.RLock()
        self._arriving = threading.Lock()
        self._lines: set[PeerLine] = set()
        self._listener = socket.create_server(("", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="ingot-peer-copies", daemon=True).start()

    def host(self, guest: int) -> None:
        """Keep copies of the ranks of the node with this rank from now on, and of no other."""
        with self._lock:
            if guest != self.guest:
                self._end_lines()
                with self._arriving:
                    self._copies.close()
                    self._copies = CopyKeeper(len(self.own.memories) if guest != NOBODY else 0)
                    self.guest = guest

    def held(self) -> list[tuple[int, str]]:
        """Step and life of the copies that are complete for all ranks of the guest."""
        with self._lock:
            return sorted(self._copies.complete())

    def bytes_held(self) -> int:
        with self._lock:
            return sum(memory.bytes_in_use() for memory in self._copies.memories)

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.host(NOBODY)
        self._end_lines()

    def _end_lines(self) -> None:
        with self._lock:
            for line in list(self._lines):
                line.close()

    # --- in threads

    def _accept(self) -> None:
        while True:
            try:
                line = PeerLine(self._listener.accept()[0])
            except OSError:
                if self._is_closed:
                    return
                time.sleep(ACCEPT_PAUSE)  # for example no descriptor is left
                continue
            with self._lock:
                accepted = len(self._lines) < MAX_CONNECTIONS
                if accepted:
                    self._lines.add(line)
            if accepted:
                threading.Thread(target=self._serve, args=(line,), name="ingot-peer-copy", daemon=True).start()
            else:
                line.close()

    def _serve(self, line: PeerLine) -> None:
        lower_priority()
        try:
            line.admit(self.job)
            while True:
                match line.receive():
                    case OfferCopy() as offer:
                        self._take(line, offer)
                    case AskForCopy() as wanted:
                        self._hand_out(line, wanted)
                    case ForgetCopies() as order:
                        self._forget(line, order)
                    case _:
                        return
        except (PeerError, OSError, ValueError):  # the other side finds out by itself, and tries again
            pass
        finally:
            with self._lock:
                self._lines.discard(line)
            line.close()

    def _take(self, line: PeerLine, offer: OfferCopy) -> None:
        if not self._arriving.acquire(blocking=False):
            line.send(CopyAnswer("another copy is arriving"))
            return
        try:
            reason, memory = self._objection(offer)
            if memory is None:
                line.send(CopyAnswer(reason))
                return
            records, record = memory.records(), offer.record
            if any((r.step, r.life, r.xxh3) == (record.step, record.life, record.xxh3) for r in records.values()):
                line.send(CopyAnswer(has_it=True))
                return
            line.send(CopyAnswer())
            slot = _slot_to_write(records, record)
            try:
                line.receive_content(memory, slot, record)
            except PeerError as error:
                memory.forget(slot)
                line.send(CopyAnswer(str(error)))
                raise
            line.send(CopyAnswer())
        finally:
            self._arriving.release()

    def _forget(self, line: PeerLine, order: ForgetCopies) -> None:
        with self._arriving:
            for memory in self._copies.memories if order.node_rank == self.guest else []:
                memory.forget_all()
        line.send(CopyAnswer())

    def _objection(self, offer: OfferCopy) -> tuple[str, CopyMemory | None]:
        if offer.node_rank != self.guest or not 0 <= offer.local_rank < len(self._copies.memories):
            return "this node keeps the copies of another", None
        memory, size = self._copies.memories[offer.local_rank], offer.record.bytes
        needed, free = len(SLOTS) * size - memory.bytes_in_use(), available_memory()
        if size <= 0 or (free is not None and needed > free):
            return f"it has no memory for {size} bytes", None
        return "", memory

    def _hand_out(self, line: PeerLine, wanted: AskForCopy) -> None:
        memories = {self.guest: self._copies.memories, self.own_node_rank: self.own.memories}.get(wanted.node_rank, [])
        if wanted.node_rank != NOBODY and 0 <= wanted.local_rank < len(memories):
            memory = memories[wanted.local_rank]
            if (copy := memory.find(wanted.step, wanted.life)) is not None:
                line.send(CopyAnswer(record=copy[1]))
                line.send_content(memory, *copy, lambda count: None)
                return
        line.send(CopyAnswer(f"it has no copy of step {wanted.step} of these ranks"))


def _slot_to_write(records: dict[int, CopyRecord], new: CopyRecord) -> int:
    """An empty slot, one of an earlier life of the ranks, or the older one."""
    return min(SLOTS, key=lambda slot: (records[slot].life == new.life, records[slot].step) if slot in records
               else (False, -1))  # fmt: skip
