"""Nodes that are not fit to run together are found before the run starts, and named (F27-F29)."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from conftest import Ingot
from specs import spec
from test_slurm import Launched
from waiting import wait_until

from ingot.errors import EXIT_FAULT, EXIT_USER_ERROR
from ingot.launch.preflight.diagnosis import (
    PreflightResult,
    Problem,
    classify_nodes,
    failed_checks,
    failing_nodes,
    next_groups,
    nodes_that_differ,
    slow_devices,
    wrong_clocks,
)
from ingot.launch.preflight.doctor import check_nodes
from ingot.launch.preflight.node_checks import files_problem, gpu_problem, nvlink_problem
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.failure_log import read_failures
from ingot.launch.supervisor.node_tests import cause_of_problems

__all__ = ["cluster"]
slow = pytest.mark.slow
HOOK = str(Path(__file__).parent / "hook")


DOCTOR = [sys.executable, "-m", "ingot.cli.main", "doctor", "--cluster"]


def doctor(
    cluster: Cluster, folder: Path, *options: str, nodes: int = 2, **fault: object
) -> subprocess.CompletedProcess[str]:
    """`ingot doctor --cluster` in an allocation, with one node as `fault` says."""
    wrong = {"node": "", "kind": "", "report_seconds": 30.0} | fault
    env = cluster.env | {"PYTHONPATH": HOOK, "INGOT_TEST_NODE": json.dumps(wrong)}
    command = ["salloc", "--quiet", f"--nodes={nodes}", *DOCTOR, *options]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120)


def test_good_nodes_pass_and_nothing_is_left_behind(cluster: Cluster, tmp_path: Path) -> None:
    done = doctor(cluster, tmp_path, nodes=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:-2]] == [
        f"  ok  {what}" for what in ("agent", "environment", "disk", "limits", "software", "clocks", "devices", "network")]  # fmt: skip
    assert "3 nodes passed the checks" in done.stdout and "GB/s of bus bandwidth" in done.stdout
    assert not list(tmp_path.iterdir())


def test_one_machine_is_checked_without_slurm(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        [*DOCTOR, "--profile", "cpu"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *checks, last = done.stdout.splitlines()
    assert [check.split(":")[0] for check in checks] == [
        "  ok  agent", "  ok  environment", "  ok  disk", "  ok  limits"]  # fmt: skip
    assert last.startswith("1 node passed the checks")


@pytest.mark.parametrize(
    ("argument", "states"),
    [
        ("data=absent", ["ok", "ok", "ok", "ok", "ok", "fail"]),
        ("no_such_key=1", ["ok", "ok", "ok", "ok", "fail", "skip"]),
    ],
)
def test_each_check_of_one_machine_is_listed_with_how_it_ended(
    tmp_path: Path, ingot_here: Ingot, argument: str, states: list[str]
) -> None:
    run = tmp_path / "run"
    spec(run_folder=str(run), workdir=str(tmp_path), image=None, nodes=1, spares=0,
         arguments=["--", "mpt-125m", argument]).write()  # fmt: skip
    done = ingot_here("doctor", "--cluster", str(run), check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == EXIT_USER_ERROR and lines[-1].startswith("FAIL  "), done.stdout
    assert [line.split()[0] for line in lines[:-1]] == states
    assert [line.split()[1] for line in lines[:-1]] == [
        "agent:",
        "environment:",
        "disk:",
        "limits:",
        "config:",
        "data:",
    ]
    found = json.loads(ingot_here("doctor", "--cluster", str(run), "--json", check=False).stdout)
    assert list(found["checks"].values()) == states


@slow
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


@pytest.mark.parametrize("node", [pytest.param("n1", marks=slow), "n2"])
def test_a_node_whose_agent_says_nothing_is_named_and_the_others_are_tested(
    cluster: Cluster, tmp_path: Path, node: str
) -> None:
    done = doctor(cluster, tmp_path, nodes=3, node=node, kind="silent", report_seconds=15.0)
    assert done.returncode == EXIT_FAULT and f"FAIL  {node}: its agent has not reported: it hangs" in done.stdout, (
        done.stdout + done.stderr
    )
    assert done.stdout.count("FAIL") == 1 and "2 nodes passed the checks" in done.stdout


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_with_a_folder_of_its_own_is_named(cluster: Cluster, tmp_path: Path, node: str) -> None:
    """The first node cannot even lead the checks: the next one does."""
    cluster.on(node, "mount", "-t", "tmpfs", "none", str(tmp_path))
    try:
        done = doctor(cluster, tmp_path, nodes=3)
    finally:
        cluster.on(node, "umount", str(tmp_path))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == EXIT_FAULT and line.startswith(f"FAIL  {node}: "), done.stdout + done.stderr
    assert "/launch/spec.json does not exist" in line and "does this node share the run folder?" in line
    assert ("2 nodes passed the checks" in done.stdout) == (node == "n1")


def test_a_node_without_the_interpreter_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.on("n1", "mount", "-t", "tmpfs", "none", sys.prefix)
    try:
        done = doctor(cluster, tmp_path, nodes=2)
    finally:
        cluster.on("n1", "umount", sys.prefix)
    assert done.returncode == EXIT_FAULT and "FAIL  n1: cannot check the nodes from here: " in done.stdout, (
        done.stdout + done.stderr
    )
    assert "No such file" in done.stdout and "1 node passed the checks" in done.stdout


@slow
def test_a_node_that_dies_in_the_allocation_is_named_and_the_others_are_tested(
    cluster: Cluster, tmp_path: Path
) -> None:
    """srun reaches it no more, and ends the agents of all nodes for that."""
    gate, ready = tmp_path / "gate", tmp_path / "ready"
    os.mkfifo(gate)
    script = f"touch {ready}; read < {gate}; exec {' '.join(DOCTOR)}"
    command = ["salloc", "--quiet", "--no-kill", "--nodes=3", "bash", "-c", script]
    with subprocess.Popen(command, env=cluster.env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(ready.exists, "the allocation")
            cluster.kill_node("n2")
            gate.write_text("\n")
            said = process.communicate(timeout=100)[0]
        finally:
            process.kill()
            cluster.restore()
    assert process.returncode == EXIT_FAULT and said.count("FAIL") == 1 and "FAIL  n2: " in said, said
    assert "2 nodes passed the checks" in said


def test_findings_of_all_nodes_as_json(cluster: Cluster, tmp_path: Path) -> None:
    found = json.loads(doctor(cluster, tmp_path, "--json").stdout)
    assert set(found["checks"].values()) == {"ok"}
    assert found["problems"] == [] and "2 nodes passed the checks" in found["notes"][0]
    found = json.loads(doctor(cluster, tmp_path, "--json", nodes=3, node="n2", kind="clock").stdout)
    assert [problem["host"] for problem in found["problems"]] == ["n2"]


def test_an_interrupted_doctor_leaves_nothing_behind(cluster: Cluster, tmp_path: Path) -> None:
    env = cluster.env | {"PYTHONPATH": HOOK,
                         "INGOT_TEST_NODE": json.dumps({"node": "n2", "kind": "silent", "report_seconds": 60.0})}  # fmt: skip
    process = subprocess.Popen(["salloc", "--quiet", "--nodes=2", *DOCTOR], env=env, cwd=tmp_path)
    steps = ["squeue", "--steps", "--noheader", "--format=%j"]
    wait_until(lambda: cluster.ask(*steps).split().count("python") >= 2, "the checks and their agents")
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGINT)
    assert process.wait(30) != 0
    wait_until(lambda: not cluster.ask("squeue", "--noheader"), "the end of the allocation")
    assert not list(tmp_path.iterdir())


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
    cause = cause_of_problems(PreflightResult([problem]), "abcd")
    assert (cause.node, cause.suspects) == ("", ("a", "b", "c", "d"))


def test_of_two_clocks_neither_is_wrong() -> None:
    (problem,) = wrong_clocks({"a": 0.0, "b": 30.0}).problems
    assert (problem.host, problem.suspects) == ("", ("a", "b")) and "differ by 30.0 s" in problem.message
    assert wrong_clocks({"a": 0.0, "b": 5.0}).notes and not wrong_clocks({"a": 0.0}).problems


def test_one_node_that_cannot_see_the_data_decides_nothing() -> None:
    (problem,) = failed_checks({"a": {"data": "no index"}})
    assert (problem.host, problem.kind, problem.suspects) == ("", "data", ("a",))
    cause = cause_of_problems(PreflightResult([problem]), ["a"])
    assert (cause.kind, cause.node, cause.is_local) == ("data", "a", True)


def test_descriptors_are_counted_by_the_ranks_that_connect_to_the_first() -> None:
    assert files_problem(1024, 1, False) == "" == files_problem(41_984, 8192, False)
    assert "a process may open 4,096 files and rank 0 of 8,192 ranks needs 41,984" in files_problem(4096, 8192, False)
    assert "RDMA needs 8,192" in files_problem(4096, 8, True)


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


@pytest.mark.parametrize(
    ("asked", "gpus", "found"),
    [(None, 0, ("cpu", 0)), (None, 4, ("tcp", 4)), ("tcp", 0, ("tcp", 8)), ("azure-ndv4", 0, ("azure-ndv4", 8))],
)
def test_the_doctor_checks_nodes_like_this_one_unless_a_profile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, gpus: int, found: tuple[str, int]
) -> None:
    specs: list[LaunchSpec] = []

    async def check(spec: LaunchSpec, *rest: object) -> PreflightResult:
        specs.append(spec)
        return PreflightResult()

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setattr("ingot.launch.preflight.doctor.count_gpus", lambda: gpus)
    monkeypatch.setattr("ingot.launch.preflight.doctor.check_together", check)
    assert check_nodes(None, asked).exit_code == 0
    assert [(spec.profile, spec.gpus_per_node) for spec in specs] == [found]


def test_preflight_can_be_turned_off() -> None:
    assert spec().preflight and not spec(preflight=False).preflight
