"""A network that is slower than the profile's is noticed from NCCL's log, before the run and while it starts."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from conftest import TINY
from runs import assert_as_if_nothing_happened
from test_slurm import Launched, whole
from waiting import wait_until

from ingot.launch.agent.local_ranks import Node
from ingot.launch.agent.rank_group import RankGroup, RankPlan
from ingot.launch.build_spec import strikes
from ingot.launch.preflight.transport import TransportWatch, chosen_transport, fallback
from ingot.launch.supervisor.failure_log import read_failures, record

__all__ = ["cluster", "whole"]
HOOK = str(Path(__file__).parent / "hook")
EFA = """p5-1:812:812 [0] NCCL INFO Bootstrap : Using enp71s0:10.1.4.7<0>
p5-1:812:930 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.16.0
p5-1:812:930 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)
p5-1:812:930 [0] NCCL INFO Using network AWS Libfabric
"""
INFINIBAND = """nd-3:77:77 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>
nd-3:77:101 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.4<0>
nd-3:77:101 [0] NCCL INFO Using network IB
"""
SOCKET = """nd-3:77:77 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>
nd-3:77:101 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
nd-3:77:101 [0] NCCL INFO Failed to open libibverbs.so[.1]
nd-3:77:101 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>
nd-3:77:101 [0] NCCL INFO Using network Socket
"""


@pytest.mark.parametrize(
    ("log", "transport"),
    [
        (EFA, "efa"),
        (EFA + "NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/AWS Libfabric/0/GDRDMA\n", "efa"),
        ("NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)\nNCCL INFO Using network AWS Libfabric", "efa"),
        (EFA.replace("provider is efa, fabric is efa-direct", "Provider is tcp;ofi_rxm"), "tcp"),
        (INFINIBAND, "ib"),
        (INFINIBAND.rpartition("nd-3")[0], "ib"),  # as far as that
        (INFINIBAND + "NCCL INFO Channel 00/0 : 1[1] -> 8[0] [send] via NET/IB/0/GDRDMA\n", "ib"),
        (SOCKET, "socket"),
        (SOCKET.rpartition("nd-3")[0], "socket"),
        (INFINIBAND + "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n", "socket"),
        (SOCKET.partition("nd-3:77:101")[0], ""),  # the bootstrap is by sockets everywhere
        ("NCCL INFO cudaDriverVersion 12080", ""),
    ],
)
def test_the_transport_is_read_from_nccls_log(log: str, transport: str) -> None:
    assert chosen_transport(log) == transport


def test_a_silent_fall_back_to_sockets_is_an_error_that_names_what_was_expected() -> None:
    assert "must use efa and its log says socket" in fallback("efa", "socket")
    assert "must use ib" in fallback("ib", "")
    assert not fallback("efa", "efa") and not fallback("socket", "ib") and not fallback("gloo", "")


def test_logs_are_watched_until_each_rank_has_said_what_it_uses(tmp_path: Path) -> None:
    logs = {rank: tmp_path / f"nccl-{rank}.log" for rank in (8, 9)}
    watch = TransportWatch("ib", logs)
    assert watch.wrong() is None
    logs[8].write_text(INFINIBAND)
    logs[9].write_text(SOCKET.partition("nd-3:77:101")[0])
    assert watch.wrong() is None and list(watch.unknown) == [9]
    logs[9].write_text(SOCKET)
    wrong = watch.wrong()
    assert wrong is not None and wrong[0] == 9 and "its log says socket" in wrong[1]
    assert not TransportWatch("socket", logs).unknown and not TransportWatch("gloo", logs).unknown


def test_of_two_processes_the_one_that_falls_back_is_named_and_its_log_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", HOOK)
    monkeypatch.setenv("INGOT_TEST_NODE", json.dumps({"node": os.uname().nodename, "kind": "nccl", "ranks": ["1"]}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "nccl-0.log").write_text(SOCKET)  # of an earlier attempt
    command = ["train", *TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", "max_duration=100000ba"]
    with closing(
        RankGroup(RankPlan(command, Node(2, 2), tmp_path / "logs", "1", os.environ, transport="efa"))
    ) as group:
        group.start()
        wait_until(group.transport.wrong, seconds=60)
        assert group.transport.found is not None and group.transport.found[0] == 1
        assert group.evidence().transport.startswith("NCCL must use efa and its log says socket")
    assert not (tmp_path / "logs" / "nccl-0.log").exists()  # gloo writes none
    assert "Using network Socket" in (tmp_path / "logs" / "nccl-1.log").read_text()


def test_it_counts_as_the_nodes_fault(tmp_path: Path) -> None:
    for _ in range(2):
        record(
            tmp_path,
            attempt="7.0.1",
            rank=3,
            batch=0,
            kind="transport",
            message="n2: sockets",
            progress=False,
            host="n2",
        )
    assert strikes(tmp_path) == {"n2": 2}


@pytest.mark.slow
def test_a_node_whose_nccl_falls_back_is_replaced_by_a_spare(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    options = ["--profile", "infiniband", "--gpus-per-node", "0", "--spares", "1", "--no-preflight"]
    run = Launched(cluster, data, tmp_path / "run", *options)
    wrong = {"node": "n2", "kind": "nccl", "ranks": ["0", "1"], "report_seconds": 30}
    run.env |= {"PYTHONPATH": HOOK, "INGOT_TEST_NODE": json.dumps(wrong)}
    run.submit()
    run.wait_for_end()
    assert run.states() == ["COMPLETED"], run.output()
    (failure,) = read_failures(run.folder)
    assert (failure["host"], failure["kind"]) == ("n2", "transport") and failure["message"].startswith("n2: NCCL must")
    assert "on n1,n2" in run.output() and "on n1,n3" in run.output()
    assert_as_if_nothing_happened(run.folder, whole)
