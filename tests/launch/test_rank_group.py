"""What an agent finds out about its ranks and its node, from outside: real processes are killed, stopped, frozen and
starved. Only kernel messages of devices come from a file in place of /dev/kmsg."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from disks import mounted
from freezer import freezer
from waiting import wait_until

from ingot.errors import CheckpointError, disk_error
from ingot.launch.agent import node_state
from ingot.launch.agent.attempt import run_attempt
from ingot.launch.agent.failure import Failure, kind_of
from ingot.launch.agent.local_ranks import Node
from ingot.launch.agent.node_state import NodeWatch, count_oom_kills, folder_problem
from ingot.launch.agent.rank_group import RankGroup, RankPlan
from ingot.training.runtime.heartbeat import EVALUATION, SAVE, Beat, HangBudgets, Heartbeat, parse_beat

__all__ = ["freezer"]
BEAT = """
import time
from ingot.training.runtime.heartbeat import *
dump_stacks_on_request()
heart = Heartbeat(HangBudgets(step=0.5, start=0.5, save=0.5))
"""

Start = Callable[..., RankGroup]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ranks that run a script in place of ingot, before anything is imported."""
    groups = []

    def begin(script: str, ranks: int = 1, logs: Path = tmp_path / "logs") -> RankGroup:
        (tmp_path / "sitecustomize.py").write_text(f"import os\nif 'RANK' in os.environ:\n  exec({script!r})\n")
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        group = RankGroup(RankPlan(["train"], Node(ranks, ranks), logs, "1", env, epoch=7))
        groups.append(group)
        group.start()
        return group

    yield begin
    for group in groups:
        group.close()


def test_evidence_says_how_each_rank_ended_and_what_it_wrote(start: Start) -> None:
    script = """
import json, os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["RANK"] == "2":
    from ingot.launch.agent.failure import exit_code_of
    def fail(): raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    os._exit(exit_code_of(fail))
time.sleep(60)
"""
    group = start(script, 3)
    wait_until(lambda: len(group.codes()) == 2)
    found = group.evidence()
    assert [(rank.exit_code, rank.kind) for rank in found.ranks] == [(None, ""), (-9, ""), (1, "device")]
    assert "uncorrectable ECC" in found.ranks[2].message and found.ranks[2].time > 0 and found.boot_id
    assert group.kill() == () and len(group.codes()) == 3


def test_evidence_of_a_hang_says_where_each_rank_is(start: Start) -> None:
    script = (
        BEAT
        + """
if os.environ["RANK"] == "1":
    import signal
    os.kill(os.getpid(), signal.SIGSTOP)
if os.environ["RANK"] == "2":
    import ctypes
    def foreign(): ctypes.PyDLL(None).sleep(60)  # holds the GIL
    foreign()
def read_data(): time.sleep(60)
read_data()
"""
    )
    group = start(script, 3)
    wait_until(lambda: len(group.late()) == 3)
    sleeping, stopped, holding = group.evidence(is_hang=True).ranks
    assert "read_data" in sleeping.where and not sleeping.in_torch and sleeping.late_seconds > 0
    assert stopped.process_state == "T" and "foreign" in holding.where
    assert sleeping.phase == "start" and group.kill() == ()


def test_an_attempt_with_an_epoch_tells_it_to_its_ranks(start: Start, tmp_path: Path) -> None:
    group = start(f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['INGOT_EPOCH']); os._exit(0)")
    wait_until(lambda: group.codes())
    assert (tmp_path / "seen").read_text() == "7"


def test_a_rank_that_cannot_be_killed_is_reported_and_not_waited_for(start: Start, freezer: Path) -> None:
    group = start("import time; time.sleep(60)", 2)
    (freezer / "cgroup.procs").write_text(str(group.processes[1].pid))
    (freezer / "freezer.state").write_text("FROZEN")
    assert group.evidence().ranks[1].process_state == "D"
    assert group.kill(0.5) == (1,)
    assert group.processes[1].poll() is None  # `kill` has not waited for its end
    assert group.codes() == {0: -signal.SIGKILL}
    (freezer / "freezer.state").write_text("THAWED")
    wait_until(lambda: not group.living())


def test_a_failure_is_known_even_if_another_rank_cannot_be_killed(
    tmp_path: Path, freezer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that fails freezes its neighbor first."""
    script = f"""
import os, time
if 'RANK' in os.environ:
    if os.environ['RANK'] == '1':
        open({str(freezer / "cgroup.procs")!r}, 'w').write(str(os.getpid()))
        time.sleep(60)
    while not open({str(freezer / "cgroup.procs")!r}).read():
        time.sleep(0.01)
    open({str(freezer / "freezer.state")!r}, 'w').write('FROZEN')
    from ingot.launch.agent.failure import exit_code_of
    def fail(): raise RuntimeError('the cause')
    os._exit(exit_code_of(fail))
"""
    (tmp_path / "sitecustomize.py").write_text(script)
    monkeypatch.setattr(RankGroup.close, "__defaults__", (0.5,))
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    outcome = run_attempt(["train"], Node(2, 2), tmp_path / "logs", "1", env=env)
    assert outcome.failure is not None and "the cause" in outcome.failure.message and outcome.rank == 0


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "full", "size=64k") as folder:
        yield folder


def test_a_full_or_read_only_run_folder_is_named(start: Start, full: Path) -> None:
    group = start("import time; time.sleep(60)", logs=full)
    assert group.evidence().site == ""
    with pytest.raises(OSError, match="No space left"), (full / "large").open("wb") as file:
        file.write(bytes(1 << 20))
    assert group.evidence().site == f"cannot write to {full}: No space left on device"
    (full / "large").unlink()
    assert group.evidence().site == ""
    group.kill()  # whose log is open for writing
    subprocess.run(["mount", "-o", "remount,ro", full], check=True)
    assert "Read-only file system" in group.evidence().site


def test_a_folder_that_does_not_answer_is_named(tmp_path: Path) -> None:
    """Opening a pipe for writing waits for a reader, as a hung server's file system would for its server."""
    os.mkfifo(tmp_path / f".probe-{node_state.node_name()}-{os.getpid()}")
    assert folder_problem(tmp_path, 0.2) == f"{tmp_path} has not answered for 0.2 s"
    assert folder_problem(tmp_path / "absent", 5) == f"cannot write to {tmp_path / 'absent'}: No such file or directory"


def test_kernel_messages_about_devices_are_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, of an earlier attempt\n")
    monkeypatch.setattr(node_state, "KERNEL_LOG", log)
    with closing(NodeWatch()) as watch:
        assert watch.look(tmp_path).device_errors == ()
        with log.open("a") as file:
            file.write(
                "6,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
                "6,3,3,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault: of the program\n"
                "6,4,4,-;device eth0 entered promiscuous mode\n"
                "3,5,5,-;EDAC MC0: 1 UE uncorrectable error on DIMM_A1\n"
            )
        found = watch.look(tmp_path).device_errors
    assert [line.partition(" ")[0] for line in found] == ["NVRM:", "EDAC"] and "79" in found[0]


def test_processes_that_the_kernel_kills_for_memory_are_counted(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"ingot-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(100 << 20))
    except OSError:
        pytest.skip("there is no memory controller to limit a group of processes with")
    before = count_oom_kills()
    script = f"""
import os, subprocess, sys
open({str(group / "cgroup.procs")!r}, 'w').write(str(os.getpid()))
from ingot.launch.agent.node_state import NodeWatch
from pathlib import Path
watch = NodeWatch()
code = subprocess.run([sys.executable, '-c', 'open("/proc/self/oom_score_adj", "w").write("1000"); x = bytearray(300 << 20)']).returncode
print(code, watch.look(Path({str(tmp_path)!r})).oom_kills)
"""
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == ["-9", "1"], done.stderr
        assert count_oom_kills() == before  # it was in another group than this process
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "device"),
        (RuntimeError("CUDA error: unspecified launch failure"), "device"),
        (RuntimeError("CUDA error: device-side assert triggered"), "program"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "program"),
        (RuntimeError("NCCL error: unhandled system error\nncclSystemError: .. Last error:\nibv_modify_qp failed"), "device"),
        (RuntimeError("ncclSystemError: .. Last error:\nsocketProgress: Connection closed by remote peer n2"), "program"),
        (RuntimeError("ncclRemoteError: a remote process exited prematurely"), "program"),
        (RuntimeError("a bug"), "program"),
        (OSError(28, "No space left on device"), "machine"),
        (disk_error("save checkpoints in", "/shared/run", OSError(28, "No space left on device")), "site"),
        (disk_error("save checkpoints in", "/shared/run", OSError(30, "Read-only file system")), "site"),
        (disk_error("save checkpoints in", "/shared/run", OSError(5, "Input/output error")), "machine"),
        (CheckpointError("it is of another model"), "user"),
    ],
)  # fmt: skip
def test_the_kind_of_a_failure_says_who_is_at_fault(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind


def test_a_device_error_that_nccl_reports_is_a_cause_and_not_a_consequence() -> None:
    assert not Failure("NCCL error: ibv_modify_qp failed", "device", 1, 1.0).is_consequence
    assert Failure("NCCL error: connection closed by remote peer", "program", 1, 1.0).is_consequence


def test_each_phase_has_its_own_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "beat"
    path.write_bytes(bytes(64))
    monkeypatch.setenv("INGOT_HEARTBEAT_FILE", str(path))
    heart = Heartbeat(HangBudgets(start=600, step=100, save=420))

    def beat() -> Beat:
        found = parse_beat(path.read_bytes())
        assert found is not None
        return found

    seen = [(beat().phase, beat().allowed)]
    for batch in range(3):
        heart.step(batch)
        seen.append((beat().phase, beat().allowed))
    assert seen == [("start", 600), ("start", 600), ("start", 600), ("step", 100)]
    heart.begin(EVALUATION)
    assert (beat().phase, beat().allowed) == ("evaluation", 420)
    heart.begin(SAVE)
    before = beat().at
    wait_until(lambda: (tmp_path / "data").write_bytes(bytes(4 << 20)) and beat().at > before)  # a save that writes
    heart.last -= 1000  # how long the save took is not how long a step takes
    heart.step(3)
    assert (beat().phase, beat().allowed) == ("step", 100)
    heart.last -= 50  # a slow step makes the next ones less suspicious
    heart.step(4)
    assert beat().allowed == pytest.approx(500, rel=0.01)
