"""Nodes that are not fit to run together are found before the run starts, and named (F27-F29)."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cluster import Cluster, cluster
from specs import spec
from test_slurm import Launched

from ingot.errors import EXIT_FAULT
from ingot.launch.agent import node_agent
from ingot.launch.preflight.diagnosis import (
    PreflightResult,
    Problem,
    classify_nodes,
    clock_offsets,
    failed_checks,
    failing_nodes,
    next_groups,
    nodes_that_differ,
    slow_devices,
    wrong_clocks,
)
from ingot.launch.preflight.doctor import check_nodes
from ingot.launch.preflight.node_checks import files_problem, gpu_problem, nvlink_problem, resolve
from ingot.launch.preflight.preflight import Preflight, StopSignal, report_limit
from ingot.launch.protocol import NODES_VARIABLE
from ingot.launch.spec import LaunchSpec, read_spec
from ingot.launch.supervisor.failure_log import read_failures

__all__ = ["cluster"]
slow = pytest.mark.slow
HOOK = str(Path(__file__).parent / "hook")


def doctor(cluster: Cluster, folder: Path, nodes: int = 2, **fault: object) -> subprocess.CompletedProcess[str]:
    """`ingot doctor --cluster` in an allocation, with one node as `fault` says."""
    wrong = {"node": "", "kind": "", "report_seconds": 30.0} | fault
    env = cluster.env | {"PYTHONPATH": HOOK, "INGOT_TEST_NODE": json.dumps(wrong)}
    command = ["salloc", "--quiet", f"--nodes={nodes}", sys.executable, "-m", "ingot.cli.main", "doctor", "--cluster"]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120)


def test_good_nodes_pass_and_nothing_is_left_behind(cluster: Cluster, tmp_path: Path) -> None:
    done = doctor(cluster, tmp_path, nodes=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 nodes passed the checks" in done.stdout and "GB/s of bus bandwidth" in done.stdout
    assert not list(tmp_path.iterdir())


def test_one_machine_is_checked_without_slurm(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [sys.executable, "-m", "ingot.cli.main", "doctor", "--cluster", "--profile", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "1 node passed" in done.stdout, done.stdout + done.stderr


def test_a_node_that_takes_the_first_ones_name_for_itself_is_replaced_by_a_spare(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    """F28: Debian's 127.0.1.1. Its agent finds no supervisor there."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.1.1 n1\n" + (cluster.folder / "hosts").read_text().replace("n1\n", "other\n"))
    cluster.on("n2", "mount", "--bind", str(hosts), "/etc/hosts")
    try:
        run = Launched(cluster, data, tmp_path / "run", "max_duration=2ba", "--spares", "1").submit()
        run.wait_for_end()
    finally:
        cluster.on("n2", "umount", "/etc/hosts")
    assert run.states() == ["COMPLETED"], run.output()
    (failure,) = read_failures(run.folder)
    assert failure["host"] == "n2" and failure["kind"] == "silent"
    assert failure["message"].startswith("n2: its agent has not reported")
    assert "on n1,n2" in run.output() and "on n1,n3" in run.output() and (run.folder / "FINISHED").exists()


def test_a_node_with_other_code_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """F29: an image of another day."""
    version = Path(sys.modules["ingot"].__file__).parent / "version.py"  # type: ignore[arg-type]
    other = tmp_path / "version.py"
    other.write_text(version.read_text() + "# of another day\n")
    cluster.on("n3", "mount", "--bind", str(other), str(version))
    try:
        done = doctor(cluster, tmp_path, nodes=3)
    finally:
        cluster.on("n3", "umount", str(version))
    assert done.returncode and "FAIL  n3: ingot's code is" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("FAIL") == 1


def test_a_clock_half_a_minute_ahead_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """F29."""
    done = doctor(cluster, tmp_path, nodes=3, node="n2", kind="clock")
    assert done.returncode and re.search(r"FAIL  n2: the clock is (29|3\d)\.\d s ahead", done.stdout), done.stdout


def test_a_node_that_says_nothing_is_named(cluster: Cluster, tmp_path: Path) -> None:
    done = doctor(cluster, tmp_path, node="n2", kind="silent", report_seconds=5.0)
    assert done.returncode and "FAIL  n2: no report in" in done.stdout, done.stdout + done.stderr


def test_a_node_with_a_folder_of_its_own_is_named_by_itself_and_by_the_others(cluster: Cluster, tmp_path: Path) -> None:
    cluster.on("n2", "mount", "-t", "tmpfs", "none", str(tmp_path))
    try:
        done = doctor(cluster, tmp_path, report_seconds=5.0)
    finally:
        cluster.on("n2", "umount", str(tmp_path))
    assert done.returncode and "FAIL  n2: no report in" in done.stdout, done.stdout + done.stderr
    assert "n2: error" in done.stderr and "this node does not share the run folder" in done.stderr


def test_a_taken_port_is_named_before_anything_waits_for_it(cluster: Cluster, tmp_path: Path) -> None:
    """F27."""
    done = doctor(cluster, tmp_path, node="n1", kind="port")
    assert done.returncode and "FAIL  n1: port" in done.stdout and "is taken" in done.stdout, done.stdout


@slow
def test_a_node_that_does_not_share_the_run_folder_is_replaced_by_a_spare(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    run = Launched(cluster, data, tmp_path / "run", "max_duration=2ba", "--spares", "1")
    run.folder.mkdir()
    cluster.on("n2", "mount", "-t", "tmpfs", "none", str(run.folder))
    try:
        run.submit()
        run.wait_for_end()
    finally:
        cluster.on("n2", "umount", str(run.folder))
    assert run.states() == ["COMPLETED"], run.output()
    (failure,) = read_failures(run.folder)
    assert (failure["host"], failure["kind"]) == ("n2", "silent")  # its agent has nowhere to write
    assert "on n1,n3" in run.output()


@slow
def test_the_node_that_breaks_the_all_reduce_is_found(cluster: Cluster, tmp_path: Path) -> None:
    done = doctor(cluster, tmp_path, nodes=3, node="n2", kind="deaf")
    assert done.returncode and "FAIL  n2: the all-reduce fails wherever this node takes part" in done.stdout, (
        done.stdout + done.stderr
    )
    assert done.stdout.count("FAIL") == 1


def test_what_fails_everywhere_is_not_a_nodes_fault() -> None:
    everywhere = {"a": {"gpus": "7 of 8 GPUs are there"}, "b": {"gpus": "6 of 8 GPUs are there"}}
    assert failed_checks(everywhere) == [Problem("every node: 7 of 8 GPUs are there", kind="user")]
    assert failed_checks({"a": {}, "b": everywhere["b"]}) == [Problem("b: 6 of 8 GPUs are there", "b")]
    assert failed_checks({"a": everywhere["a"]}) == [Problem("a: 7 of 8 GPUs are there", "a")]
    assert failed_checks({"a": {"data": "no index"}, "b": {"data": "no index"}}) == [Problem("no index", kind="data")]
    assert failed_checks({"a": {"disk": "full"}, "b": {"disk": "full"}}) == [Problem("every node: full")]


def test_the_majority_is_right_and_of_two_nobody_is_blamed() -> None:
    assert [p.host for p in nodes_that_differ({"a": {"torch": "1"}, "b": {"torch": "2"}, "c": {"torch": "2"}})] == ["a"]
    (problem,) = nodes_that_differ({"a": {"FI_X": "1"}, "b": {}, "c": {"FI_X": "1"}})
    assert problem.message == "b: FI_X is not set here and 1 elsewhere"
    (problem,) = nodes_that_differ({"a": {"torch": "1"}, "b": {"torch": "2"}})
    assert (problem.host, problem.suspects) == ("", ("a", "b")) and "1 on a, 2 on b" in problem.message
    (problem,) = nodes_that_differ({name: {"torch": "12"[name > "b"]} for name in "abcd"})
    assert problem.suspects == ("a", "b", "c", "d")
    assert PreflightResult([problem]).bad_nodes == ["d"]  # to find out; it is not blamed


def test_of_two_clocks_neither_is_wrong() -> None:
    (problem,) = wrong_clocks({"a": 0.0, "b": 30.0}).problems
    assert (problem.host, problem.suspects) == ("", ("a", "b")) and "differ by 30.0 s" in problem.message
    assert wrong_clocks({"a": 0.0, "b": 5.0}).notes and not wrong_clocks({"a": 0.0}).problems


def test_one_node_that_cannot_see_the_data_decides_nothing() -> None:
    (problem,) = failed_checks({"a": {"data": "no index"}})
    assert (problem.host, problem.kind, problem.suspects) == ("", "data", ("a",))
    assert PreflightResult([problem]).bad_nodes == []


def test_descriptors_are_counted_by_the_ranks_that_connect_to_the_first() -> None:
    assert files_problem(1024, 1, False) == "" == files_problem(41_984, 8192, False)
    assert "a process may open 4,096 files and rank 0 of 8,192 ranks needs 41,984" in files_problem(4096, 8192, False)
    assert "RDMA needs 8,192" in files_problem(4096, 8, True)


def seen(clocks: list[float], arrivals: list[float]) -> dict[str, dict[str, tuple[float, bool]]]:
    """What nodes with these clocks see of each other's reports, written at these true times."""
    out: dict[str, dict[str, tuple[float, bool]]] = {}
    for i, (clock, arrival) in enumerate(zip(clocks, arrivals, strict=True)):
        out[f"n{i}"] = {}
        for j, written in enumerate(arrivals):
            moment = max(arrival, written) + 0.01
            out[f"n{i}"][f"n{j}"] = (moment + clock - (written + clocks[j]), written > arrival)
    return out


@pytest.mark.parametrize("arrivals", [[0, 0, 0], [0, 5, 9], [9, 5, 0], [5, 0, 9], [5, 9, 0]])
def test_clocks_are_compared_whoever_comes_first(arrivals: list[float]) -> None:
    assert clock_offsets(seen([0, 30, 0], arrivals))["n1"] == pytest.approx(30, abs=0.05)
    found = wrong_clocks(clock_offsets(seen([-30, 0, 2], arrivals)))
    assert [p.host for p in found.problems] == ["n0"] and "behind" in found.problems[0].message
    assert len(found.notes) == 1 and found.notes[0].startswith("n2: the clock is 2.0 s ahead")


def test_a_slow_device_stands_out_and_a_spread_does_not() -> None:
    assert list(slow_devices({"a": [700.0, 705.0, 702.0], "b": [698.0, 500.0, 701.0]})) == ["b"]
    assert not slow_devices({"a": [700.0, 640.0, 760.0], "b": [600.0, 500.0, 800.0]})
    assert not slow_devices({"a": [700.0], "b": [100.0]})  # which of two is the odd one?


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_the_search_finds_a_node_that_cannot_talk(count: int, place: int) -> None:
    hosts = [f"n{i}" for i in range(count)]
    bad = hosts[place]
    rounds = [{tuple(hosts): False}]
    while groups := next_groups(hosts, rounds):
        taking_part = [host for group in groups for host in group]
        assert len(set(taking_part)) == len(taking_part)
        rounds.append({group: bad not in group or len(group) == 1 for group in groups})
    (problem,) = failing_nodes(hosts, rounds, "reset")
    if count == 2:
        assert "unknown which node" in problem.message and (problem.host, problem.suspects) == ("", ("n0", "n1"))
    else:
        assert problem.host == bad and classify_nodes(rounds) == (set(hosts) - {bad}, {bad})
        assert len(rounds) <= 5


def test_two_bad_nodes_are_found_and_a_fault_of_the_whole_is_blamed_on_none() -> None:
    hosts = [f"n{i}" for i in range(6)]
    rounds = [{tuple(hosts): False}]
    while groups := next_groups(hosts, rounds):
        rounds.append({group: not {"n0", "n5"} & set(group) for group in groups})
    assert [p.host for p in failing_nodes(hosts, rounds, "")] == ["n0", "n5"]
    rounds = [{tuple(hosts): False}]
    while groups := next_groups(hosts, rounds):
        rounds.append(dict.fromkeys(groups, True))
    (problem,) = failing_nodes(hosts, rounds, "")
    assert problem.host == "" and "any two of them succeed" in problem.message


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("0, 0, No, 3\n1, 0, No, 0\n", ""),
        ("0, [N/A], [N/A], 3\n1, [N/A], [N/A], 0\n", ""),
        ("0, 0, No, 3\n", "1 of 2 GPUs are there"),
        ("0, 0, No, 3\n1, 2, No, 0\n", "GPU 1 has 2 uncorrected memory errors"),
        ("0, 0, Yes, 3\n1, 0, No, 0\n", "GPU 0 needs a reset"),
        ("0, 0, No, 3\n1, 0, No, 40000\n", "40000 MB of GPU 1 are in use"),
        ("0, 0, No, 3\n1, 0, No, 40000\n2, 0, No, 0\n", ""),  # a node that is shared
    ],
)
def test_gpus_are_judged_by_what_nvidia_smi_says(answer: str, says: str) -> None:
    found = gpu_problem(answer, 2)
    assert found.startswith(says) and bool(found) == bool(says)


def test_an_nvlink_that_is_down_is_named() -> None:
    whole = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    other = whole.replace("GPU 0", "GPU 1")
    assert (
        nvlink_problem("") == nvlink_problem(whole + other) == nvlink_problem("GPU 0: NVIDIA L4 (UUID: GPU-a)\n") == ""
    )
    assert "GPU 1 link 1" in nvlink_problem(whole + other.replace("Link 1: 26.562 GB/s", "Link 1: <inactive>"))


def test_an_unknown_name_is_distinguished_from_the_loopback_address() -> None:
    assert "cannot resolve" in resolve("no-such-host.invalid")[1]
    assert "this node's own loopback address" in resolve("localhost")[1]
    assert resolve("192.0.2.7") == ("192.0.2.7", "")


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["fd00::7", "192.0.2.7"], "192.0.2.7"),
        (["fd00::7", "fd00::8"], "fd00::7,fd00::8"),
        (["192.0.2.8", "192.0.2.7"], "192.0.2.7,192.0.2.8"),
    ],
)
def test_addresses_of_the_first_node_are_compared_by_ip_version_4_where_it_has_any(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], expected: str
) -> None:
    """Whether a node looks up IPv6 addresses is its own setting, and no reason to exclude it."""
    found = [(None, None, None, "", (address, 0)) for address in addresses]
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **options: found)
    assert resolve("first") == (expected, "")


@pytest.mark.parametrize(
    ("asked", "gpus", "found"),
    [(None, 0, ("cpu", 0)), (None, 4, ("tcp", 4)), ("tcp", 0, ("tcp", 8)), ("azure-ndv4", 0, ("azure-ndv4", 8))],
)
def test_the_doctor_checks_nodes_like_this_one_unless_a_profile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, gpus: int, found: tuple[str, int]
) -> None:
    specs: list[LaunchSpec] = []

    def run(command: list[str], env: object) -> subprocess.CompletedProcess[str]:
        specs.append(read_spec(Path(command[-1])))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setattr("ingot.launch.preflight.doctor.count_gpus", lambda: gpus)
    monkeypatch.setattr("ingot.launch.preflight.doctor.subprocess.run", run)
    assert check_nodes(None, asked) == 0
    assert [(spec.profile, spec.gpus_per_node) for spec in specs] == [found]


def test_a_signal_ends_the_wait_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    alone = spec(verb="prepare", arguments=[], run_folder=str(tmp_path), workdir=str(tmp_path), image=None)
    report = alone.folder / "preflight" / "1" / "n1.json"
    before = signal.getsignal(signal.SIGUSR2)

    def ask() -> None:
        while not report.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    with pytest.raises(StopSignal):
        Preflight(alone, "1", 1, {"MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "61000"}).run(lambda verdict: None)
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) == before and json.loads(report.read_text())["rank"] == 1


def test_a_node_without_the_folder_stays_longer_than_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end would end them, before they have named it."""
    stays: list[float] = []
    monkeypatch.setattr(node_agent, "time", SimpleNamespace(sleep=stays.append))
    monkeypatch.setenv(NODES_VARIABLE, "n1,n2")
    monkeypatch.setattr(sys, "argv", ["agent", "--check", "--spec", str(tmp_path / "absent.json")])
    assert node_agent.main() == EXIT_FAULT
    assert stays and min(stays) >= 2 * report_limit(None)


def test_preflight_can_be_turned_off() -> None:
    assert spec().preflight and not spec(preflight=False).preflight
