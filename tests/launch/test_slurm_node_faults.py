"""More faults of single nodes and of the cluster, on a real Slurm: what hides on a node, waits in the kernel, or cuts the
node off. Each ends within a stated time, and no healthy node is blamed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from freezer import freezer
from runs import assert_as_if_nothing_happened
from test_slurm import whole
from test_slurm_faults import ALL, Watched, usual

from ingot.launch.supervisor import judge
from ingot.launch.supervisor.failure_log import read_failures
from ingot.launch.supervisor.records import Closed, Excluded, Judged, Opened, Started, StopRequested
from ingot.training.runtime.heartbeat import parse_beat

__all__ = ["cluster", "freezer", "usual", "whole"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("usual")]


def rank_process(run: Watched, rank: int) -> tuple[int, dict[str, str]]:
    """The process of a rank, and its environment; no process (0) if there is none."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, content = (path / "cmdline").read_bytes(), (path / "environ").read_text()
        except OSError:
            continue
        env = dict(part.split("=", 1) for part in content.split("\0") if "=" in part)
        if b"agent.rank_main" in words and str(run.folder).encode() in words and env.get("RANK") == str(rank):
            return int(path.name), env
    return 0, {}


class Elsewhere(Watched):
    """A run that was submitted from another folder than that of its run folder."""

    work: Path

    def ingot(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "ingot.cli.main", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=self.work, timeout=120)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr


@pytest.mark.parametrize("what", ["work", "home"])
def test_a_node_that_lacks_the_working_directory_or_the_run_folder_is_replaced(
    cluster: Cluster, data: Path, tmp_path: Path, what: str
) -> None:
    """U1."""
    (tmp_path / "work" / "here").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    run = Elsewhere(cluster, data, tmp_path / "home" / "run", "max_duration=2ba", "--spares", "1")
    run.work = tmp_path / "work" / "here"
    cluster.on("n2", "mount", "-t", "tmpfs", "none", str(tmp_path / what))
    run.submit().end()
    assert run.causes[-1] == ("finished", "") and run.nodes == [("n1", "n2"), ("n1", "n3")]
    cause = run.of(Closed)[0].cause
    assert cause.node == "n2" and cause.kind in ("machine", "silent"), cause


def test_a_node_that_dies_and_is_back_after_slurm_has_noticed_is_replaced(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """P2."""
    run = Watched(cluster, data, tmp_path / "run", "--spares", "1", **ALL).submit()
    run.wait_for_batch(8)
    cluster.kill_node("n2")
    run.wait(lambda: "down" in cluster.ask("sinfo", "-h", "-N", "-n", "n2", "-o", "%T"), 60)
    cluster.start_node("n2")
    run.end()
    assert run.causes == [("lost", "n2"), ("finished", "")] and run.nodes == [("n1", "n2"), ("n1", "n3")]
    assert run.excluded == ["n2"] and set(judge.strikes(run.records)) <= {"n2"}
    assert_as_if_nothing_happened(run.folder, whole)


@pytest.mark.parametrize(("node", "nodes"), [("n2", ("n1", "n3")), ("n1", ("n3", "n2"))])
def test_an_nccl_error_of_the_node_itself_brings_the_spare(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path, node: str, nodes: tuple[str, ...]
) -> None:
    """G2. There is no NCCL here: its text is raised on that node. What its peer sees then is real, of gloo."""
    text = "NCCL error in: ProcessGroupNCCL.cpp:2111, unhandled system error, NCCL version 2.21.5\nncclSystemError: System call"
    run = Watched(cluster, data, tmp_path / "run", "--spares", "1", kind="message", text=text, node=node, batch=11,
                  attempts="all")  # fmt: skip
    run.submit().end()
    assert run.causes == [("device", node), ("finished", "")] and run.nodes[1] == nodes
    assert judge.strikes(run.records) == {node: 1} and run.excluded == [node]
    assert_as_if_nothing_happened(run.folder, whole)


def test_memory_that_runs_out_four_times_is_four_smaller_microbatches_and_no_fault(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    """M1: more often than attempts may fail. There is no device here: torch's error is raised on one node."""
    sizes = ["global_train_batch_size=32", "max_duration=6ba", "device_train_microbatch_size=16"]
    run = Watched(cluster, data, tmp_path / "run", *sizes, kind="memory", room=1, node="n2", batch=2, attempts="all")
    run.submit().end()
    assert run.causes == [("memory", "n2")] * 4 + [("finished", "")]
    assert [closed.cause.fits for closed in run.of(Closed)] == [8, 4, 2, 1, None]
    assert run.nodes == [("n1", "n2")] * 5 and not run.excluded and judge.strikes(run.records) == {}


def test_a_node_with_a_full_disk_of_its_own_is_replaced(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """P4."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    run = Watched(cluster, data, tmp_path / "run", "max_duration=2ba", "--spares", "1")
    run.env["TMPDIR"] = str(scratch)
    cluster.on("n2", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(scratch))
    run.submit().end()
    assert run.causes == [("machine", "n2"), ("finished", "")] and run.nodes == [("n1", "n2"), ("n1", "n3")]
    assert [record.node for record in run.of(Excluded)] == ["n2"]


@pytest.mark.parametrize("count", [3, 4])
def test_all_nodes_but_the_last_are_bad_and_it_is_found_over_a_requeue_with_fewer_spares(
    data: Path, tmp_path: Path, count: int
) -> None:
    """P4: more nodes are bad than there are spares; of three nodes, no spare is left."""
    nodes, scratch = Cluster(tmp_path / "cluster", count, 1), tmp_path / "scratch"
    scratch.mkdir()
    try:
        nodes.start()
        for number in range(1, count):
            nodes.on(f"n{number}", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(scratch))
        run = Watched(nodes, data, tmp_path / "run", "max_duration=2ba", "-N", "1", "--spares", "1")
        run.env["TMPDIR"] = str(scratch)
        run.submit().end()
    finally:
        nodes.stop()
    names = [f"n{number}" for number in range(1, count + 1)]
    assert run.causes == [*(("machine", name) for name in names[:-1]), ("finished", "")], run.output()
    assert run.nodes == [(name,) for name in names]
    assert [record.node for record in run.of(Excluded)] == names[:-1]
    expected = ["swap", "requeue", "finish"] if count == 3 else ["swap", "requeue", "swap", "finish"]
    assert [record.action for record in run.of(Judged)] == expected
    assert run.of(Started)[-1].nodes == tuple(names[2:])


def test_a_slow_node_is_named_and_left_alone(cluster: Cluster, data: Path, whole: Path, tmp_path: Path) -> None:
    """W1."""
    run = Watched(cluster, data, tmp_path / "run", kind="slow", node="n2", batch=1, attempts="all", seconds=2.5)
    run.submit()
    run.wait(lambda: "n2 is slower than the others" in run.ingot("status", str(run.folder)), 120)
    run.end()
    assert run.causes == [("finished", "")] and not run.of(Excluded) and judge.strikes(run.records) == {}
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_rank_that_waits_in_the_kernel_holds_up_nobody_and_its_node_is_replaced(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path, freezer: Path
) -> None:
    """H5: a frozen process is in state D and survives SIGKILL, like one that waits for a dead file system."""
    run = Watched(cluster, data, tmp_path / "run", "hang_timeout=4", "--spares", "1", **ALL).submit()
    run.wait_for_batch(8)
    pid, _ = rank_process(run, 1)
    assert pid  # 0 is this process itself
    (freezer / "cgroup.procs").write_text(str(pid))
    (freezer / "freezer.state").write_text("FROZEN")
    began = time.monotonic()
    run.wait(lambda: run.of(Closed))
    assert time.monotonic() - began < 60
    run.wait(lambda: (run.folder / "FINISHED").exists())
    cause = run.of(Closed)[0].cause
    assert (cause.kind, cause.node) == ("hang", "n2") and "cannot be ended" in cause.message
    assert run.nodes == [("n1", "n2"), ("n1", "n3")]
    (freezer / "freezer.state").write_text("THAWED")
    run.end()
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_rank_that_hangs_before_its_first_step_is_found_by_the_budget_of_the_start(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """H4."""
    run = Watched(cluster, data, tmp_path / "run", "startup_timeout=20", "hang_timeout=5", **ALL).submit()

    def has_started() -> bool:
        _, env = rank_process(run, 1)
        try:
            beat = parse_beat(Path(env["INGOT_HEARTBEAT_FILE"]).read_bytes())
        except (KeyError, OSError):
            return False
        return beat is not None and beat.allowed == 20

    run.wait(has_started)
    pid, _ = rank_process(run, 1)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    run.wait(lambda: run.of(Closed), 90)
    assert time.monotonic() - began < 60 and run.causes[0] == ("hang", "n2")
    run.end()
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_crash_of_a_rank_is_started_again_where_it_was(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """M2."""
    run = Watched(cluster, data, tmp_path / "run", kind="segfault", node="n2", batch=11, once=str(tmp_path / "struck"))
    run.submit().end()
    assert run.causes == [("machine", "n2"), ("finished", "")] and "signal 11" in run.of(Closed)[0].cause.message
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_controller_that_is_away_while_a_rank_fails_costs_time_only(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """C1."""
    run = Watched(cluster, data, tmp_path / "run", kind="kill", node="n2", batch=20, once=str(tmp_path / "struck"))
    run.submit()
    run.wait_for_batch(5)
    cluster.stop_controller()
    try:
        end = time.monotonic() + 60
        while not run.of(Closed) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(15)
    finally:
        cluster.start_controller()
    run.end()
    assert run.causes[-1] == ("finished", "") and {kind for kind, _ in run.causes} <= {"machine", "site", "finished"}
    assert_as_if_nothing_happened(run.folder, whole)


def test_what_is_left_on_a_batch_host_that_is_cut_off_does_not_end_its_successor(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """O1: the network is gone, the run folder is still in reach."""
    run = Watched(cluster, data, tmp_path / "run", **ALL).submit()
    run.wait_for_batch(8)
    cluster.on("n1", "ip", "link", "set", "eth0", "down")
    run.wait(lambda: len({opened.attempt.rpartition(".")[0] for opened in run.of(Opened)}) > 1, 180)
    run.end(seconds=300)
    assert run.causes[-1] == ("finished", "") and run.nodes[-1] == ("n2", "n3")
    assert not {record.node for record in run.of(Excluded)} & {"n2", "n3"}, "they were only out of its reach"
    assert not set(judge.strikes(run.records)) & {"n2", "n3"}
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_batch_host_that_is_cut_off_for_a_minute_names_nobody_and_spares_its_successor(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """When it is back, it learns that it has been replaced; its srun would end a step of its successor."""
    run = Watched(cluster, data, tmp_path / "run", **ALL).submit()
    run.wait(lambda: "preflight" in run.phases())
    link = ["ip", "link", "set", f"{cluster.bridge}.1"]
    subprocess.run([*link, "down"], check=True, env=cluster.env)
    began = time.monotonic()
    run.wait(lambda: len(run.of(Started)) > 1, 180)
    time.sleep(max(0.0, 60 - (time.monotonic() - began)))
    subprocess.run([*link, "up"], check=True, env=cluster.env)
    run.end(seconds=300)
    assert [kind for kind, _ in run.causes] in (["site", "finished"], ["supervisor", "finished"])
    assert run.nodes == [("n1", "n2"), ("n2", "n3")] and not run.of(Excluded)
    assert_as_if_nothing_happened(run.folder, whole)


def test_what_an_orphan_says_after_it_is_back_on_the_network_counts_against_nobody(
    cluster: Cluster, data: Path, whole: Path, tmp_path: Path
) -> None:
    """O2: its ranks fail when their connections do, while its successor runs."""
    run = Watched(cluster, data, tmp_path / "run", "hang_timeout=20", **(ALL | {"seconds": 1.5})).submit()
    run.wait_for_batch(6)
    link = ["ip", "link", "set", f"{cluster.bridge}.1"]
    subprocess.run([*link, "down"], check=True, env=cluster.env)
    run.wait(lambda: "running" in [r.phase for r in run.records[run.second_start() :] if hasattr(r, "phase")], 200)
    subprocess.run([*link, "up"], check=True, env=cluster.env)
    run.end(seconds=300)
    first, *others = run.of(Closed)
    assert len(others) == 1 and others[0].cause.kind == "finished" and first.cause.node in ("", "n1"), run.causes
    assert not set(run.excluded) & {"n2", "n3"} and not set(judge.strikes(run.records)) & {"n2", "n3"}
    assert all(failure["host"] in ("", "n1") for failure in read_failures(run.folder))
    assert_as_if_nothing_happened(run.folder, whole)


@pytest.mark.parametrize("phase", ["preflight", "running"])
def test_a_canceled_job_ends_and_is_not_queued_again(cluster: Cluster, data: Path, tmp_path: Path, phase: str) -> None:
    """C5."""
    run = Watched(cluster, data, tmp_path / "run", **ALL).submit()
    run.wait(lambda: phase in run.phases())
    cluster.ask("scancel", run.job)
    run.end("CANCELLED")
    assert [stop.reason for stop in run.of(StopRequested)] == ["signal"] and len(run.of(Opened)) == 1
