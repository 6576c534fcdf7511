"""Copies of the training state in the memory of one node, as its agent sees them: those of its own ranks, which survive
them, and those of another node's ranks, which survive the other node."""

import sys
from collections.abc import Mapping

from ingot.checkpoint.copy_memory import CopyKeeper
from ingot.errors import IngotError
from ingot.launch.messages import CopiesHeld, FetchCopies, RunRanks
from ingot.launch.peer_copies.sender import CopySender, fetch_copies
from ingot.launch.peer_copies.store import PeerStore
from ingot.launch.peer_copies.wire import JobIdentity
from ingot.parallel.rank_env import PEER_COPY_BYTES


class NodeCopies:
    """From the start of an agent to its end. Nothing is allocated before ranks make copies."""

    def __init__(self, job: JobIdentity, ranks: int):
        self.job, self.keeper = job, CopyKeeper(ranks)
        self._store: PeerStore | None = None
        self._sender: CopySender | None = None

    def report(self) -> CopiesHeld:
        """What is there, and where to fetch it."""
        if self._store is None:
            self._store = PeerStore(self.job, self.keeper)
        store = self._store
        own = tuple(sorted(self.keeper.complete()))
        return CopiesHeld(store.port, store.own_node_rank, own, store.guest, tuple(store.held()))

    def fetch(self, order: FetchCopies) -> None:
        """Raises `PeerError` if that was not possible."""
        fetch_copies(self.job, self.keeper, order.node_rank, (order.step, order.life), order.address)
        if self._store is not None:
            self._store.own_node_rank = order.node_rank

    def keep(self, guest: int) -> None:
        """Keep copies of the ranks of this node, though this one runs none."""
        if self._store is None:
            raise IngotError("this node has not said where it listens for copies")
        self._store.host(guest)

    def begin(self, order: RunRanks) -> None:
        """This node's ranks are about to start: keep the guest's copies, and send theirs to the peer."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._store is None:
            return
        self._store.own_node_rank = order.node_rank
        self._store.host(order.guest)
        if order.peer:
            self._sender = CopySender(self.job, self.keeper, order.node_rank, order.peer, self._warn)

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """An environment that tells the ranks of their memory, and whether there will be a copy on another node."""
        found = self.keeper.environment({name: value for name, value in env.items() if name != PEER_COPY_BYTES})
        if self._store is not None and self._sender is not None:
            found[PEER_COPY_BYTES] = str(self._store.bytes_held())
        return found

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._store is not None:
            self._store.close()
        self.keeper.close()

    def _warn(self, text: str) -> None:
        print(f"{self.job.node}: {text}", file=sys.stderr, flush=True)
