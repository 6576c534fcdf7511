"""The diagnosis: the right node, or an explicit "undecided"; a healthy node is never named, however little is known."""

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from ingot.launch.agent.evidence import NodeEvidence, RankEvidence
from ingot.launch.supervisor.diagnose import PaceWatch, diagnose, diagnose_unfinished
from ingot.launch.supervisor.history import History
from ingot.launch.supervisor.records import Cause, Opened, Started, StopRequested

NODES = ("n1", "n2", "n3")
PEER = "[/torch/csrc/distributed/c10d] Connection closed by peer [198.18.20.11]:51234"
TORCH = "torch/distributed/distributed_c10d.py:2810 (all_reduce)"


def consequence(rank: int, time: float = 100.0) -> RankEvidence:
    return RankEvidence(rank, 1, PEER, "program", time, batch=4)


def on(*ranks: RankEvidence, **more: object) -> dict[str, NodeEvidence]:
    """One rank per node; the others lost their peer."""
    own = {rank.rank: rank for rank in ranks}
    return {node: NodeEvidence(node, (own.get(i, consequence(i)),)) for i, node in enumerate(NODES)}


def blame(evidence: dict[str, NodeEvidence], lost: dict[str, str] | None = None, **more: object) -> Cause:
    return diagnose(NODES, evidence, lost or {}, **more)  # type: ignore[arg-type]


def waits(rank: int, **values: object) -> RankEvidence:
    known = {"batch": 4, "late_seconds": 12.0, "where": TORCH, "in_torch": True, "process_state": "S", "collectives": 7}
    return RankEvidence(rank, **(known | values))  # type: ignore[arg-type]


def hang(*ranks: RankEvidence) -> Cause:
    return blame({node: NodeEvidence(node, (rank,)) for node, rank in zip(NODES, ranks, strict=True)}, hang="no beat")


def test_the_first_cause_and_not_the_first_report() -> None:
    """H2, H5: whoever has a reason of its own, though others failed earlier by their clocks."""
    found = blame(on(RankEvidence(1, 1, "internal error: KeyError: 'x'", "program", 500.0, batch=4)))
    assert (found.kind, found.node, found.rank, found.batch, found.is_local) == ("program", "n2", 1, 4, False)


def test_an_error_of_all_nodes_is_nobodys_hardware() -> None:
    ranks = [RankEvidence(i, 2, "data.train.path: /nowhere", "user", 5.0) for i in range(3)]
    found = blame(on(*ranks))
    assert (found.kind, found.node, found.suspects) == ("user", "", ())


@pytest.mark.parametrize(
    "message",
    ["internal error: RuntimeError: CUDA error: uncorrectable ECC error encountered",
     "internal error: GPU 3 has fallen off the bus", "NVRM: Xid (PCI:0000:3b:00): 79",
     "internal error: DistBackendError: NCCL error: unhandled system error, ibv_create_qp failed",
     "NCCL error: ncclUnhandledCudaError: Call to CUDA function failed."],
)  # fmt: skip
def test_device_texts_are_the_nodes(message: str) -> None:
    """G1, G2."""
    found = blame(on(RankEvidence(1, 1, message, "program", 200.0)))
    assert (found.kind, found.node, found.is_local) == ("device", "n2", True)


def test_a_line_of_the_kernel_is_evidence_though_the_rank_could_not_speak() -> None:
    evidence = on() | {"n2": NodeEvidence("n2", (RankEvidence(1, -9),), device_errors=("NVRM: Xid 79",))}
    found = blame(evidence)
    assert (found.kind, found.node, found.is_local) == ("device", "n2", True) and "Xid 79" in found.message


def test_an_illegal_access_is_the_programs() -> None:
    ranks = [
        RankEvidence(i, 1, "CUDA error: an illegal memory access was encountered", "program", 5.0) for i in range(3)
    ]
    assert blame(on(*ranks)).kind == "program" and blame(on(*ranks)).node == ""


def test_a_killed_rank_is_named_and_not_struck() -> None:
    """M2."""
    found = blame(on(RankEvidence(1, -9, batch=4)))
    assert (found.kind, found.node, found.rank, found.is_local) == ("machine", "n2", 1, False)
    evidence = on() | {"n2": NodeEvidence("n2", (RankEvidence(1, -9),), oom_kills=1)}
    assert "lack of memory" in blame(evidence).message


def test_ranks_that_the_watchdog_aborts_are_consequences() -> None:
    found = blame(on(RankEvidence(0, -6), RankEvidence(2, -6), RankEvidence(1, -11)))
    assert (found.node, found.message) == ("n2", "the process of rank 1 was killed by signal 11")


def test_broken_connections_alone_decide_nothing() -> None:
    found = blame(on())
    assert (found.node, found.suspects, found.is_local) == ("", NODES, False)


def test_a_lost_node_explains_what_its_peers_say() -> None:
    """L4, P1, P2."""
    evidence = on()
    del evidence["n2"]
    found = blame(evidence, {"n2": "its agent was killed"})
    assert (found.kind, found.node, found.is_local) == ("lost", "n2", False)
    found = blame(evidence, {"n2": "the cluster has lost it"}, cut_off=["n2"])
    assert (found.kind, found.node, found.is_local) == ("lost", "n2", True)


def test_when_most_nodes_are_lost_at_once_the_watcher_may_be_the_one_cut_off() -> None:
    found = blame({}, dict.fromkeys(("n2", "n3"), "no answer"))
    assert found.node == "" and found.suspects == ("n2", "n3")
    found = blame({}, dict.fromkeys(("n2", "n3"), "no answer"), cut_off=["n2", "n3"])
    assert (found.node, found.bad_nodes, found.is_local) == ("n2", ("n3",), True)


def test_a_full_disk_blames_no_node() -> None:
    """D1f: every rank dies of it, with whatever text; the agents look at the folder."""
    full = "the run folder is full: No space left on device"
    evidence = {n: NodeEvidence(n, (RankEvidence(i, 1),), site=full) for i, n in enumerate(NODES)}
    assert blame(evidence) == Cause("site", full)
    del evidence["n3"]
    assert blame(evidence, {"n3": "gone"}).kind == "site"


def test_a_folder_that_one_node_alone_cannot_write_is_that_nodes() -> None:
    evidence = on() | {"n2": NodeEvidence("n2", (RankEvidence(1, 1),), site="Stale file handle")}
    found = blame(evidence)
    assert (found.kind, found.node, found.is_local) == ("site", "n2", True)


def test_memory_errors_agree_on_the_smallest_size() -> None:
    ranks = [RankEvidence(i, 1, "out of memory", "memory", 5.0, fits=size) for i, size in enumerate((4, 2, 4))]
    found = blame(on(*ranks))
    assert (found.kind, found.fits, found.node) == ("memory", 2, "")


def test_a_slow_transport_is_the_nodes_that_chose_it() -> None:
    evidence = on() | {"n2": NodeEvidence("n2", (waits(1),), transport="NCCL uses sockets")}
    assert (blame(evidence).kind, blame(evidence).node) == ("transport", "n2")
    everywhere = {n: NodeEvidence(n, transport="NCCL uses sockets") for n in NODES}
    assert blame(everywhere).node == "" and blame(everywhere).suspects == NODES


DOWN, BACK = "down: Not responding", "it was booted at 12:00:00"


@pytest.mark.parametrize(
    ("down", "back", "asked", "kind", "node"),
    [
        ("n2", "n1", True, "lost", "n2"),  # what is gone now says more than what was
        ("", "n1", False, "lost", "n1"),
        ("", "n3", False, "lost", "n3"),  # a spare; Slurm ends the job for it, too
        ("", "n1 n2", False, "lost", "n1"),
        ("", "n1 n2 n3", False, "supervisor", "n1"),  # a power cut
        ("", "", False, "supervisor", "n1"),
        ("", "n1", True, "stopped", ""),
    ],
)
def test_an_attempt_that_nobody_has_closed(down: str, back: str, asked: bool, kind: str, node: str) -> None:
    history = History(
        starts=[Started(time="", launch="L", job="7", restart=0, host="n1", nodes=NODES, step=0)],
        open=Opened(time="", epoch=1, attempt="7.0.1", nodes=("n1", "n2"), step=0),
        stop=StopRequested(time="", reason="signal") if asked else None,
    )
    cause = diagnose_unfinished(history, dict.fromkeys(down.split(), DOWN), dict.fromkeys(back.split(), BACK))
    assert (cause.kind, cause.node, cause.is_local) == (kind, node, kind == "lost")
    assert cause.bad_nodes == (("n2",) if back == "n1 n2" else ())


def test_a_missing_file_that_one_node_sees_first_may_be_its_mount() -> None:
    found = blame(on(RankEvidence(1, 2, "/data is not there", "data", 5.0)))
    assert (found.kind, found.node, found.is_local) == ("data", "n2", True)
    later = blame(on(RankEvidence(1, 2, "shard 7 is damaged", "data", 5.0, batch=40)))
    assert not later.is_local


# hangs: stopped > state D > not in torch > no stack > fewest collectives > none


def test_a_stopped_rank_is_the_strongest_sign() -> None:
    """H1; at the same moment another rank happens to be outside torch."""
    found = hang(waits(0, where="train.py:7 (step)", in_torch=False), waits(1, process_state="T"), waits(2))
    assert (found.kind, found.node, found.rank, found.is_local) == ("hang", "n2", 1, True)
    assert found.batch == 4 and "SIGSTOP" in found.message


def test_a_rank_in_state_d_is_next() -> None:
    """H5."""
    found = hang(waits(0, where="train.py:7 (step)", in_torch=False), waits(1, process_state="D", where=""), waits(2))
    assert (found.node, found.is_local) == ("n2", True) and "state D" in found.message


def test_a_rank_outside_torch_is_next() -> None:
    """H3."""
    found = hang(waits(0), waits(1, where="loader.py:7 (sleep)", in_torch=False), waits(2, collectives=3))
    assert (found.node, found.is_local) == ("n2", False) and "loader.py:7" in found.message


def test_a_rank_without_a_stack_holds_the_interpreter() -> None:
    """H2: it is rank 0 that had been blamed."""
    found = hang(waits(0), waits(1), waits(2, where="", in_torch=False))
    assert found.node == "n3" and "does not even show its stack" in found.message


def test_fewest_collectives_are_next() -> None:
    assert hang(waits(0), waits(1, collectives=6), waits(2)).node == "n2"


def test_the_slowest_until_then_is_the_last_sign_and_no_strike() -> None:
    """W1: all wait in torch, and have joined as many collectives."""
    found = hang(*(waits(i, own_seconds=seconds) for i, seconds in enumerate((1.0, 4.0, 1.1))))
    assert (found.node, found.is_local) == ("n2", False) and "4 s of its own work per batch" in found.message
    found = hang(waits(0, own_seconds=4.0), waits(1, collectives=6, own_seconds=1.0), waits(2, own_seconds=1.0))
    assert found.node == "n2", "a missed collective is the stronger sign"
    assert hang(waits(0, own_seconds=1.0), waits(1, own_seconds=1.2), waits(2, own_seconds=1.1)).node == ""
    assert hang(waits(0), waits(1, own_seconds=4.0), waits(2, own_seconds=1.0)).node == "", "one was not measured"


def test_a_slow_node_is_said_after_three_looks_and_taken_back_after_three() -> None:
    """W1."""
    pace, said = PaceWatch(), []
    for seconds in (0.0, 4.0, 4.0, 1.0, 4.0, 4.0, 4.0, 1.0, 1.0, 1.0):
        for node, own in (("n1", 1.0), ("n2", seconds), ("n3", 1.1)):
            pace.note(node, own)
        said.append(pace.look())
    assert not any(said[:6]) and not said[9]
    assert said[6] == said[8] == "n2 is slower than the others: 4 s of its own work per batch; the median is 1.1 s"


def test_several_are_suspects_and_none_is_named() -> None:
    found = hang(waits(0), waits(1, process_state="T"), waits(2, process_state="T"))
    assert (found.node, found.suspects) == ("", ("n2", "n3"))
    found = hang(waits(0), waits(1), waits(2))
    assert (found.node, found.suspects) == ("", NODES) and "nothing shows" in found.message


@dataclass
class Fault:
    """A fault of one node, and what could be seen of it if everybody could report."""

    kind: str
    node: str
    evidence: dict[str, NodeEvidence]
    lost: dict[str, str] = field(default_factory=dict)
    cut_off: tuple[str, ...] = ()
    hang: str = ""
    sign: str = ""


def draw_fault(draw: random.Random) -> Fault:
    """One faulty node of 2 to 8, with up to 4 ranks each, clocks that are wrong, and an order that proves nothing."""
    nodes = [f"n{i}" for i in range(1, draw.randint(2, 8) + 1)]
    processes, bad = draw.randint(1, 4), draw.choice(nodes)
    kind = draw.choice(["program", "killed", "device", "kernel", "lost", "dead", "stopped", "state-d", "python", "gil",
                        "missed"])  # fmt: skip
    clock = {node: draw.uniform(-15, 15) for node in nodes}
    hanging = kind in ("stopped", "state-d", "python", "gil", "missed")
    culprit = nodes.index(bad) * processes + draw.randrange(processes)
    evidence: dict[str, NodeEvidence] = {}
    for index, node in enumerate(nodes):
        ranks = []
        for rank in range(index * processes, (index + 1) * processes):
            at = 1000 + clock[node] + draw.uniform(0, 2)
            healthy = waits(rank) if hanging else draw.choice(
                [consequence(rank, at), RankEvidence(rank, -6), waits(rank, late_seconds=0.0)]
            )  # fmt: skip
            ranks.append(faulty(kind, rank, at) if rank == culprit else healthy)
        lines = ("NVRM: Xid 79",) if kind == "kernel" and node == bad else ()
        evidence[node] = NodeEvidence(node, tuple(ranks), device_errors=lines)
    order = draw.sample(nodes, len(nodes))
    evidence = {node: evidence[node] for node in order}
    fault = Fault(kind, bad, evidence, hang="rank 0 has no beat" if hanging else "")
    if kind in ("lost", "dead"):
        del evidence[bad]
        fault.lost = {bad: "connection lost"}
        fault.cut_off = (bad,) if kind == "dead" else ()
    return fault


def faulty(kind: str, rank: int, at: float) -> RankEvidence:
    known = {
        "program": RankEvidence(rank, 1, "internal error: KeyError: 3", "program", at, batch=4),
        "killed": RankEvidence(rank, -9, batch=4),
        "device": RankEvidence(rank, 1, "CUDA error: uncorrectable ECC error", "program", at),
        "kernel": RankEvidence(rank, -9),
        "stopped": waits(rank, process_state="T", where=""),
        "state-d": waits(rank, process_state="D", where=""),
        "python": waits(rank, where="data.py:1 (read)", in_torch=False),
        "gil": waits(rank, where="", in_torch=False),
        "missed": waits(rank, collectives=6),
    }
    return known.get(kind, RankEvidence(rank, -9))


def check(seed: int) -> None:
    draw = random.Random(seed)
    fault = draw_fault(draw)
    nodes = sorted(set(fault.evidence) | {fault.node})
    found = diagnose(nodes, fault.evidence, fault.lost, fault.cut_off, fault.hang)
    assert found.node == fault.node, f"seed {seed}: {fault.kind} on {fault.node}, and the diagnosis is {found}"
    local = fault.kind in ("device", "kernel", "dead", "stopped", "state-d")
    assert found.is_local == local, f"seed {seed}: {fault.kind} {found}"
    # now with less: nodes that did not answer in time, and texts that got lost
    partial = {node: item for node, item in fault.evidence.items() if draw.random() < 0.7}
    for node, item in partial.items():
        if draw.random() < 0.3:
            ranks = tuple(msgspec.structs.replace(r, message="", time=0.0) if r.exit_code == 1 and "Conn" in r.message
                          and draw.random() < 0.1 else r for r in item.ranks)  # fmt: skip
            partial[node] = msgspec.structs.replace(item, ranks=ranks)
    less = diagnose(nodes, partial, fault.lost, fault.cut_off, fault.hang)
    assert not less.is_local or less.node == fault.node, f"seed {seed}: {fault.kind} on {fault.node}: {less}"
    assert not less.bad_nodes


@pytest.mark.parametrize("part", range(4))
def test_whatever_the_fault_its_node_is_found_and_no_other_is_struck(part: int) -> None:
    for seed in range(part * 500, part * 500 + 500):
        check(seed)


@pytest.mark.slow
def test_ten_thousand_faults_more() -> None:
    for seed in range(10_000, 22_000):
        check(seed)
