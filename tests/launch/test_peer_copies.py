"""Copies of a node's ranks on another node: they arrive whole or not at all, from and to agents of this job only, and are
fetched only where all ranks can have the same one."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from waiting import wait_until

from ingot.checkpoint.copy_memory import RECORD_BYTES, CopyKeeper, CopyMemory, CopyRecord, content_hash
from ingot.launch.messages import CopiesHeld
from ingot.launch.peer_copies import sender, store
from ingot.launch.peer_copies.arrange import keeper_of, plan_restores
from ingot.launch.peer_copies.sender import CopySender, fetch_copies
from ingot.launch.peer_copies.store import PeerStore
from ingot.launch.peer_copies.wire import AskForCopy, JobIdentity, OfferCopy, Pace, PeerError, PeerLine

JOB = JobIdentity("/runs/one", "7.0.1", "the token of this job", "n1")
RANKS, SIZE = 2, 100_000


def write(memory: CopyMemory, step: int, life: str = "a", size: int = SIZE, for_peer: bool = True) -> CopyRecord:
    slot = memory.slot_to_write()
    content = memory.begin(slot)(size)
    content[:] = bytes([step % 256]) * size
    record = CopyRecord(step, life, "me", size, content_hash(memoryview(content)), [], for_peer=for_peer)
    memory.complete(slot, record)
    content.close()
    return record


def write_all(keeper: CopyKeeper, step: int, life: str = "a", size: int = SIZE) -> None:
    for memory in keeper.memories:
        write(memory, step, life, size)


class Node:
    """What an agent has of copies."""

    def __init__(self, name: str, node_rank: int, guest: int):
        self.job = replace(JOB, node=name)
        self.own = CopyKeeper(RANKS)
        self.store = PeerStore(self.job, self.own)
        self.store.own_node_rank = node_rank
        self.store.host(guest)
        self.address = f"127.0.0.1:{self.store.port}"
        self.problems: list[str] = []
        self.sender: CopySender | None = None

    def send_to(self, address: str) -> CopySender:
        self.sender = CopySender(self.job, self.own, self.store.own_node_rank, address, self.problems.append)
        return self.sender

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self.store.close()
        self.own.close()


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes, each of which keeps the other's copies."""
    found = Node("n1", 0, guest=1), Node("n2", 1, guest=0)
    yield found
    for node in found:
        node.close()


def test_a_new_node_fetches_what_the_lost_one_had_sent(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    two.send_to(one.address)
    for step in (5, 6):
        write_all(two.own, step)
        wait_until(lambda step=step: (step, "a") in one.store.held())
    assert one.store.held() == [(5, "a"), (6, "a")]
    two.close()
    spare = CopyKeeper(RANKS)
    fetch_copies(JOB, spare, 1, (6, "a"), one.address)
    assert spare.complete() == {(6, "a")}
    for memory in spare.memories:
        slot, record = next(iter(memory.records().items()))
        assert memory.content(slot, record)[:] == bytes([6]) * SIZE
    spare.close()


def test_copies_also_come_from_the_node_whose_ranks_made_them(nodes: tuple[Node, Node]) -> None:
    """Its devices have failed, and its agent still answers."""
    one, _ = nodes
    write_all(one.own, 9)
    spare = CopyKeeper(RANKS)
    fetch_copies(JOB, spare, 0, (9, "a"), one.address)
    assert spare.complete() == {(9, "a")}
    spare.close()


def test_only_the_newest_copy_is_sent_and_only_if_there_is_room_for_it(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    for step in (5, 6):
        write_all(two.own, step)
    two.send_to(one.address)
    wait_until(one.store.held)
    assert one.store.held() == [(6, "a")]
    for memory in two.own.memories:  # the ranks have found that nodes have no room for it
        write(memory, 7, for_peer=False)
    time.sleep(3 * sender.LOOK_SECONDS)
    assert one.store.held() == [(6, "a")]


def test_copies_of_a_new_life_replace_those_of_an_old_one_first(nodes: tuple[Node, Node]) -> None:
    """After the last checkpoint was used, step numbers begin again below those of older copies."""
    one, two = nodes
    two.send_to(one.address)
    for step, life, held in [(14, "a", [(14, "a")]), (16, "a", [(14, "a"), (16, "a")]), (10, "b", [(10, "b"), (16, "a")]),
                             (12, "b", [(10, "b"), (12, "b")])]:  # fmt: skip
        if life == "b" and step == 10:
            for memory in two.own.memories:
                memory.forget_all()
        write_all(two.own, step, life)
        wait_until(lambda held=held: one.store.held() == held)


def test_a_copy_that_was_damaged_where_it_is_kept_is_refused(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    two.send_to(one.address)
    write_all(two.own, 5)
    wait_until(one.store.held)
    memory = one.store._copies.memories[1]
    os.pwrite(memory.descriptor, b"harm", 2 * RECORD_BYTES + 50_000)
    spare = CopyKeeper(RANKS)
    with pytest.raises(PeerError, match="copy of step 5 is damaged: its hash differs"):
        fetch_copies(JOB, spare, 1, (5, "a"), one.address)
    assert all(memory.records() == {} for memory in spare.memories), "of the other rank neither"
    spare.close()


def test_a_copy_that_changes_on_its_way_is_not_kept_and_the_one_before_is(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    two.send_to(one.address)
    write_all(two.own, 5)
    wait_until(one.store.held)
    assert two.sender is not None
    two.sender.close()
    record = msgspec.structs.replace(write(two.own.memories[0], 6), xxh3="0" * 32)
    line = PeerLine.connect(one.address, two.job)
    line.ask(OfferCopy(1, 0, record))
    line.send_content(two.own.memories[0], two.own.memories[0].find(6, "a")[0], record, lambda count: None)  # type: ignore[index]
    with pytest.raises(PeerError, match="its hash differs"):
        line.confirm()
    line.close()
    assert one.store.held() == [(5, "a")]


def test_a_node_that_dies_while_it_sends_leaves_the_copy_before(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    two.send_to(one.address)
    write_all(two.own, 5, size=3_000_000)
    wait_until(one.store.held)
    assert two.sender is not None
    two.sender.close()
    record = write(two.own.memories[0], 6, size=3_000_000)
    line = PeerLine.connect(one.address, two.job)
    line.ask(OfferCopy(1, 0, record))
    line._socket.sendall(bytes(1_000_000))
    line.close()
    wait_until(lambda: not one.store._lines)
    assert one.store.held() == [(5, "a")]
    two.send_to(one.address)  # nothing holds up the next one
    write(two.own.memories[1], 6, size=3_000_000)
    wait_until(lambda: (6, "a") in one.store.held())


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [(replace(JOB, token="another token"), "does not know the job's token"),
     (replace(JOB, start="8.0.1"), "it belongs to /runs/one 8.0.1"),
     (replace(JOB, launch="/runs/two"), "it belongs to /runs/two")],
)  # fmt: skip
def test_a_stranger_neither_gets_nor_leaves_a_copy(
    nodes: tuple[Node, Node], stranger: JobIdentity, reason: str
) -> None:
    one, _ = nodes
    write_all(one.own, 5)
    keeper = CopyKeeper(RANKS)
    with pytest.raises(PeerError, match=reason):
        fetch_copies(stranger, keeper, 0, (5, "a"), one.address)
    write_all(keeper, 6)
    problems: list[str] = []
    offering = CopySender(stranger, keeper, 1, one.address, problems.append)
    wait_until(lambda: problems)
    offering.close()
    assert reason in problems[0] and one.store.held() == [] and keeper.complete() == {(6, "a")}
    keeper.close()


def test_a_listener_without_the_token_is_not_given_a_copy(nodes: tuple[Node, Node]) -> None:
    stranger = PeerStore(replace(JOB, token="another token"), CopyKeeper(RANKS))
    stranger.host(0)
    stranger.job = replace(stranger.job)
    with pytest.raises(PeerError, match="token"):
        PeerLine.connect(f"127.0.0.1:{stranger.port}", JOB)
    stranger.close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = threading.Thread(target=lambda: silent.accept()[0].sendall(b'{"message":"welcome","proof":"x"}\n'))
        said.start()
        with pytest.raises(PeerError, match="not an agent"):
            PeerLine.connect(f"127.0.0.1:{silent.getsockname()[1]}", JOB)
        said.join()


def test_what_nobody_asked_to_keep_is_refused(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = nodes
    record = write(two.own.memories[0], 5)
    line = PeerLine.connect(one.address, two.job)
    for rank, local in [(0, 0), (2, 0), (1, RANKS), (1, -1)]:
        with pytest.raises(PeerError, match="keeps the copies of another"):
            line.ask(OfferCopy(rank, local, record))
    with pytest.raises(PeerError, match="has no memory for"):
        line.ask(OfferCopy(1, 0, msgspec.structs.replace(record, bytes=1 << 50)))
    monkeypatch.setattr(store, "available_memory", lambda: 1000)
    with pytest.raises(PeerError, match="has no memory for"):
        line.ask(OfferCopy(1, 0, record))
    with pytest.raises(PeerError, match="no copy of step 5"):
        line.ask(AskForCopy(1, 0, 5, "a"))
    line.close()
    assert one.store.bytes_held() < SIZE


def test_a_peer_that_is_away_is_mentioned_once_and_gets_the_next_copy(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes
    monkeypatch.setattr(sender, "RETRY_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    two.send_to(f"127.0.0.1:{port}")
    write_all(two.own, 5)
    wait_until(lambda: two.problems)
    time.sleep(0.5)
    assert len(two.problems) == 1 and two.problems[0].startswith("the copy of step 5 was not sent to 127.0.0.1:")
    assert two.sender is not None
    two.sender.address = one.address
    wait_until(lambda: one.store.held() == [(5, "a")])


def test_copies_that_come_faster_than_they_can_be_sent_are_mentioned_once(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes
    monkeypatch.setattr(sender, "MIN_BYTES_PER_SECOND", RANKS * SIZE / 2.0)
    monkeypatch.setattr(sender, "MAX_BYTES_PER_SECOND", RANKS * SIZE / 2.0)
    two.send_to(one.address)
    for step in range(5, 17):
        write_all(two.own, step)
        time.sleep(0.4)
    assert len(two.problems) == 1
    assert "faster than they can be sent" in two.problems[0] or "its hash differs" in two.problems[0]


def test_a_node_keeps_the_copies_of_one_other_and_forgets_those_of_an_earlier_guest(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    two.send_to(one.address)
    write_all(two.own, 5)
    wait_until(one.store.held)
    assert one.store.bytes_held() >= RANKS * SIZE
    one.store.host(1)
    assert one.store.held() == [(5, "a")], "the same guest: nothing changes"
    one.store.host(3)
    assert one.store.held() == [] and one.store.bytes_held() == 0


def test_the_rate_is_bounded_and_a_transfer_ends_with_its_thread() -> None:
    stopping = threading.Event()
    begin, pace = time.monotonic(), Pace(1e6, stopping)
    for _ in range(5):
        pace(100_000)
    assert time.monotonic() - begin >= 0.49
    stopping.set()
    with pytest.raises(PeerError):
        pace(1)


# --- who fetches what

A, B, C = (8, "a"), (10, "a"), (12, "b")


def held(rank: int, own: tuple = (), guest: int = -1, guests: tuple = ()) -> CopiesHeld:
    return CopiesHeld(4000, rank, own, guest, guests)


def test_copies_are_half_the_nodes_away_and_every_node_keeps_one() -> None:
    assert [keeper_of(rank, 8) for rank in range(8)] == [4, 5, 6, 7, 0, 1, 2, 3]
    for nodes in range(1, 20):
        keepers = [keeper_of(rank, nodes) for rank in range(nodes)]
        assert sorted(keepers) == list(range(nodes))
        assert nodes == 1 or all(rank != keeper for rank, keeper in enumerate(keepers))
    assert all(b - a in (1, -2) for a, b in pairwise(keeper_of(rank, 3) for rank in range(3)))


def test_a_spare_fetches_the_newest_copy_that_all_can_have() -> None:
    agents = {"n1": held(0, (A, B), guest=1, guests=(A, B)), "n3": held(-1)}
    newest, older = plan_restores(["n1", "n3"], agents, 4)
    assert newest.copy == B and [(f.node, f.node_rank, f.sources) for f in newest.fetches] == [("n3", 1, ("n1",))]
    assert older.copy == A
    assert [plan.copy for plan in plan_restores(["n1", "n3"], agents, 8)] == [B], "the disk has step 8"
    agents["n1"] = held(0, (B, C), guest=1, guests=(A, B))
    assert [plan.copy for plan in plan_restores(["n1", "n3"], agents, 4)] == [B], "the newest was not sent in time"
    agents["n2"] = held(1, (B, C))  # left out, but its agent still answers
    assert [(plan.copy, plan.fetches[0].sources) for plan in plan_restores(["n1", "n3"], agents, 4)] == [
        (C, ("n2",)), (B, ("n1", "n2")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "agents",
    [
        {"n1": held(0, (A,), 1, ()), "n3": held(-1)},  # nothing was sent
        {"n1": held(0, (C,), 1, (A, B)), "n3": held(-1)},  # the steps do not agree
        {"n1": held(0, (), 1, (A, B)), "n3": held(-1)},  # those that stayed have discarded theirs
        {"n1": held(0, (A,), 1, (A,))},  # the spare does not answer
        {"n1": held(-1), "n3": held(-1)},  # all are new
        {"n1": held(0, (A,), 1, (A,)), "n3": held(1, ())},  # nobody is new
    ],
)
def test_without_a_common_copy_nothing_is_fetched(agents: dict[str, CopiesHeld]) -> None:
    assert plan_restores(["n1", "n3"], agents, 4) == []


def test_the_copy_of_a_node_alone_is_on_the_spare_that_takes_its_place_or_on_another() -> None:
    agents = {"n2": held(-1, (), 0, (A, B))}
    assert [(plan.copy, plan.fetches[0].sources) for plan in plan_restores(["n2"], agents, 4)] == [
        (B, ("n2",)), (A, ("n2",)),
    ]  # fmt: skip
    agents["n3"] = held(-1)
    assert [plan.fetches[0].sources for plan in plan_restores(["n3"], agents, 8)] == [("n2",)]
    agents["n1"] = held(0, (B, C))  # its devices have failed, and its agent still answers
    assert [plan.copy for plan in plan_restores(["n3"], agents, 10)] == [C]
    assert plan_restores(["n1"], agents, 4) == [], "it knows itself what its ranks have used"
    assert plan_restores(["n3"], {"n3": held(-1)}, 4) == []


def test_a_copy_that_the_ranks_have_used_or_discarded_is_taken_back(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    two.send_to(one.address)
    write_all(two.own, 5)
    wait_until(one.store.held)
    for memory in two.own.memories:
        memory.forget_all()
    wait_until(lambda: not one.store.held())
    write_all(two.own, 3, "b")
    wait_until(lambda: one.store.held() == [(3, "b")])
    assert two.problems == []


def test_two_lost_nodes_need_both_keepers() -> None:
    nodes = ["n1", "s1", "n3", "s2"]  # n2 and n4 keep each other's
    agents = {"n1": held(0, (B,), 2, (B,)), "n3": held(2, (B,), 0, (B,)), "s1": held(-1), "s2": held(-1)}
    assert plan_restores(nodes, agents, 4) == []
    nodes = ["s1", "s2", "n3", "n4"]  # n1 and n2 are kept by n3 and n4
    agents = {"n3": held(2, (B,), 0, (B,)), "n4": held(3, (B,), 1, (B,)), "s1": held(-1), "s2": held(-1)}
    (plan,) = plan_restores(nodes, agents, 4)
    assert [(f.node, f.node_rank, f.sources) for f in plan.fetches] == [("s1", 0, ("n3",)), ("s2", 1, ("n4",))]
