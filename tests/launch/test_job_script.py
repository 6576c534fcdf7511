"""The job script, and what keeps a job from standing still when its first node dies."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from specs import put_on_path, spec
from waiting import wait_until

from ingot.launch.messages import ADDRESS_VARIABLE
from ingot.launch.protocol import LaunchFolder
from ingot.launch.slurm import deputy
from ingot.launch.slurm.allocation import SlurmCluster
from ingot.launch.slurm.script import render_scripts
from ingot.launch.spec import LaunchSpec


@pytest.fixture
def launched(tmp_path: Path) -> LaunchSpec:
    run = spec(image=None, run_folder=str(tmp_path / "run"), workdir=str(tmp_path))
    run.write()
    return run


def run_script(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", script], env={**os.environ, **env}, capture_output=True, text=True)


def test_a_node_without_the_interpreter_says_so_in_one_sentence(launched: LaunchSpec) -> None:
    script = render_scripts(launched)["job.sh"].replace(sys.executable, "/nowhere/bin/python")
    done = run_script(script, SLURMD_NODENAME="n1")
    assert done.returncode == 2 and "/nowhere/bin/python is not on n1: install ingot-llm in a folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_script_becomes_the_supervisors_guard(launched: LaunchSpec, tmp_path: Path) -> None:
    """Slurm signals the process of the script: it must be the one that passes signals on."""
    program = tmp_path / "python"
    program.write_text('#!/bin/bash\necho "$$ $PPID $*"\n')
    program.chmod(0o755)
    script = render_scripts(launched)["job.sh"].replace(sys.executable, str(program))
    done = run_script("echo $$\n" + script)
    first, second = done.stdout.splitlines()
    assert second.split()[0] == first
    assert second.endswith(f"-m ingot.launch.slurm.guard --spec {launched.folder / 'spec.json'}")


GUARDED = """
import os, signal, sys, time
times = {times!r}
count = os.path.getsize(times) if os.path.exists(times) else 0
open(times, "a").write("x")
{body}
"""


def guard_of(tmp_path: Path, body: str) -> tuple[subprocess.Popen[str], Path]:
    """A guard whose supervisor is `body`, which knows its `count` of predecessors, and the file that counts them."""
    times = tmp_path / "times"
    program = GUARDED.format(times=str(times), body=body)
    code = f"import sys; from ingot.launch.slurm.guard import main; sys.exit(main([sys.executable, '-c', {program!r}]))"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True), times


KILL_ITSELF = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("body", "code", "starts"),
    [
        ("sys.exit(3)", 3, 1),  # it has decided
        (f"if count < 2: {KILL_ITSELF}", 0, 3),
        (KILL_ITSELF, 128 + 9, 4),  # and no more
        ("os.abort()", 128 + 6, 4),
    ],
)
def test_a_supervisor_that_is_killed_is_started_again_a_few_times(
    tmp_path: Path, body: str, code: int, starts: int
) -> None:
    guard, times = guard_of(tmp_path, body)
    said = guard.communicate(timeout=60)[1]
    assert guard.returncode == code and len(times.read_text()) == starts
    assert said.count("the supervisor was killed by signal") == (starts - (code == 0)) * (code != 3), said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
@pytest.mark.parametrize("listens", [True, False])
def test_signals_reach_the_supervisor_and_nothing_starts_after_them(
    tmp_path: Path, number: signal.Signals, listens: bool
) -> None:
    ready = tmp_path / "ready"
    handler = "lambda *_: sys.exit(5)" if listens else f"lambda *_: {KILL_ITSELF}"
    guard, times = guard_of(
        tmp_path, f"signal.signal({int(number)}, {handler}); open({str(ready)!r}, 'w').close(); time.sleep(60)"
    )
    end = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.02)
    guard.send_signal(number)
    guard.communicate(timeout=60)
    assert guard.returncode == (5 if listens else 128 + 9) and times.read_text() == "x"


def test_the_supervisor_does_not_outlive_its_guard(tmp_path: Path) -> None:
    """A job ends with its script: what a supervisor did after that would be false."""
    pid = tmp_path / "pid"
    guard, _ = guard_of(tmp_path, f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    wait_until(lambda: pid.exists() and pid.read_text())
    guard.kill()
    guard.communicate(timeout=60)
    wait_until(lambda: not Path("/proc", pid.read_text(), "cmdline").exists())


@pytest.mark.parametrize(("nodes", "spares", "kept"), [(1, 0, False), (1, 1, True), (2, 0, False), (2, 2, True)])
def test_a_job_with_spares_outlives_its_nodes(nodes: int, spares: int, kept: bool) -> None:
    script = render_scripts(spec(nodes=nodes, spares=spares))["job.sh"]
    assert ("#SBATCH --no-kill" in script.splitlines()) == kept


def test_the_supervisor_loads_no_torch() -> None:
    modules = "ingot.launch.supervisor.main, ingot.launch.slurm.deputy, ingot.launch.slurm.guard"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_deputy_queues_the_job_again_when_the_supervisor_is_gone_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = put_on_path(monkeypatch, tmp_path / "bin", "scontrol")
    monkeypatch.setattr(deputy, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(deputy, "PATIENCE_SECONDS", 0.5)
    server = socket.create_server(("127.0.0.1", 0))
    port, greeted = server.getsockname()[1], 0
    watch = threading.Thread(target=deputy.main, args=("77", f"127.0.0.1:{port}"))
    watch.start()
    for _ in range(20):
        connection, _ = server.accept()
        connection.sendall(b'{"message":"challenge"}\n')
        connection.close()
        greeted += 1
    assert greeted == 20 and not calls.exists()
    server.close()
    watch.join(20)
    assert calls.read_text() == '["requeue", "77"]\n'


def test_a_job_that_0_1_has_queued_ends_with_what_to_do(launched: LaunchSpec) -> None:
    command = [sys.executable, "-m", "ingot.launch.worker", "--spec", str(launched.folder / "spec.json")]
    done = subprocess.run(command, env=os.environ | {"INGOT_JOB_ATTEMPT": "7.0.1"}, capture_output=True, text=True)
    launch = LaunchFolder(Path(launched.run_folder))
    assert done.returncode == 3 and launch.result("7.0.1") == 3
    assert (
        f"`ingot launch resume {launch.run}` continues" in str(launch.halted()) and len(done.stderr.splitlines()) == 1
    )


def test_a_controller_that_has_just_started_knows_no_node_and_none_is_lost(
    launched: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What sinfo prints after a restart of slurmctld, until the nodes have reported."""
    said = ["n1|unknown|none", "n2|unknown*|none", "n3|down*|Not responding", "n4|drained|disk", "n5|allocated|none"]
    put_on_path(monkeypatch, tmp_path / "bin", "sinfo", f"print({chr(10).join(said)!r})")
    cluster = SlurmCluster(launched, {**os.environ, "SLURM_JOB_ID": "1"})
    lost = asyncio.run(cluster.lost_nodes(["n1", "n2", "n3", "n4", "n5"]))
    assert [(item.node, item.is_drained) for item in lost] == [("n3", False), ("n4", True)]


def test_a_node_that_slurm_has_got_back_since_a_start_is_known_by_its_times(
    launched: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = datetime.now(UTC).replace(microsecond=0)
    times = {"n1": (-900, -900), "n2": (60, 90), "n3": (-900, 5), "n4": (-900, 0)}
    second = int(begin.timestamp())
    said = [f"NodeName={node} Arch=x86_64 OS=Linux 6.1 BootTime={second + boot} SlurmdStartTime={second + slurmd} A=b"
            for node, (boot, slurmd) in times.items()]  # fmt: skip
    calls = put_on_path(monkeypatch, tmp_path / "bin", "scontrol",
                        f"import os; print({chr(10).join(said)!r} if os.environ['SLURM_TIME_FORMAT'] == '%s' else '')")  # fmt: skip
    cluster = SlurmCluster(launched, {**os.environ, "SLURM_JOB_ID": "1"})
    found = asyncio.run(cluster.restarted_nodes(list(times), begin.isoformat()))
    assert list(found) == ["n2", "n3"] and found["n2"].startswith("it was booted at ")
    assert found["n3"].startswith("its slurmd was started at ") and "n1,n2,n3,n4" in calls.read_text()


@pytest.mark.parametrize(("task", "others"), [("1", "70_[2-4]"), ("3", "70_[4-4]"), ("4", ""), (None, "")])
def test_exclusions_reach_the_rest_of_a_chain(
    launched: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str | None, others: str
) -> None:
    calls = put_on_path(monkeypatch, tmp_path / "bin", "scontrol")
    env = {**os.environ, "SLURM_JOB_ID": "71"}
    if task is not None:
        env |= {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_MAX": "4"}
    assert asyncio.run(SlurmCluster(launched, env).hand_over(["n2", "n3"])) == bool(others)
    expected = f'["update", "JobId={others}", "ExcNodeList=n2,n3"]\n' if others else ""
    assert (calls.read_text() if calls.exists() else "") == expected
    assert not others or (asyncio.run(SlurmCluster(launched, env).hand_over([])) and calls.read_text() == expected)


LAST_OF_ARRAY = {
    "SLURM_JOB_ID": "7",
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURM_ARRAY_TASK_MAX": "1",
}


def test_the_last_element_of_an_array_does_not_speak_for_all_of_them(
    launched: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job id is that of the array: `scontrol requeue 7` starts elements again that have ended."""
    calls = put_on_path(monkeypatch, tmp_path / "bin", "scontrol")
    cluster = SlurmCluster(launched, {**os.environ, **LAST_OF_ARRAY})
    handler = signal.getsignal(signal.SIGTERM)
    assert asyncio.run(cluster.requeue(["n1"]))
    signal.signal(signal.SIGTERM, handler)
    asyncio.run(cluster.comment("ingot: finish"))
    assert [json.loads(line)[1] for line in calls.read_text().splitlines()] == ["7_1", "JobId=7_1", "JobId=7_1"]
    assert cluster.job == "7"


def test_what_a_killed_supervisor_has_started_is_ended_and_the_script_is_not(
    launched: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = put_on_path(monkeypatch, tmp_path / "bin", "scancel")
    asked = tmp_path / "bin" / "squeue.calls"
    steps = "7_1.0\\n7_1.12\\n7_1.batch\\n7_1.extern\\n"
    put_on_path(monkeypatch, tmp_path / "bin", "squeue",
                f"import os; print('7_1.batch' if os.path.exists({str(killed)!r}) else '{steps}')")  # fmt: skip
    asyncio.run(SlurmCluster(launched, {**os.environ, **LAST_OF_ARRAY}).end_earlier_steps())
    assert '"--jobs=7_1"' in asked.read_text()
    assert killed.read_text() == '["--signal=KILL", "7_1.0", "7_1.12"]\n'


SRUN = """
import signal, subprocess, time
node = sys.argv[4].partition("=")[2]
open({folder!r} + "/started-" + node, "a").write("x")
def ended(*_):
    open({folder!r} + "/step-ended", "a").write(node)
    sys.exit(1)
signal.signal(signal.SIGTERM, ended)
if os.fork() == 0:  # srun's child, which ends the step when srun is killed
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.01)
    open({folder!r} + "/step-ended", "a").write(node)
    sys.exit()
if {ends}:
    print("srun: error: " + node + ": task 0: Killed", file=sys.stderr, flush=True)
time.sleep(60)
"""
AGENT_ENV = {ADDRESS_VARIABLE: "n1:1"}


def sruns(launched: LaunchSpec, folder: Path, monkeypatch: pytest.MonkeyPatch, ends: bool = False) -> SlurmCluster:
    """A cluster whose srun runs until it is told to end, and says of its task that it was killed."""
    put_on_path(monkeypatch, folder / "bin", "srun", SRUN.format(folder=str(folder), ends=ends))
    return SlurmCluster(launched, {**os.environ, "SLURM_JOB_ID": "1"})


async def appears(path: Path, content: str) -> None:
    async with asyncio.timeout(20):
        while not path.exists() or path.read_text() != content:
            await asyncio.sleep(0.02)


def test_an_orphan_ends_its_srun_and_not_the_step(
    launched: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor in the queue has a step of the same number, which srun's end would be the end of."""

    async def start(abandon: bool) -> None:
        cluster = sruns(launched, tmp_path, monkeypatch)
        await cluster.start_agents(["n1"], AGENT_ENV)
        await appears(tmp_path / "started-n1", "x" if abandon else "xx")
        await asyncio.sleep(0.3)  # its child, too
        if abandon:
            await cluster.abandon_steps()
        await cluster.end_agents()
        await asyncio.sleep(0.3)
        assert (tmp_path / "step-ended").exists() != abandon

    monkeypatch.setattr("ingot.launch.slurm.allocation.END_SECONDS", 0.5)
    asyncio.run(start(True))
    asyncio.run(start(False))


def test_a_second_agent_replaces_the_first_whose_end_says_nothing_of_it(
    launched: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start() -> None:
        cluster = sruns(launched, tmp_path, monkeypatch, ends=True)
        await cluster.start_agents(["n1", "n2"], AGENT_ENV)
        async with asyncio.timeout(20):
            while cluster.ended.qsize() < 2:
                await asyncio.sleep(0.02)
        sruns(launched, tmp_path, monkeypatch)
        await cluster.start_agents(["n1"], AGENT_ENV)
        assert [cluster.ended.get_nowait().node for _ in range(cluster.ended.qsize())] == ["n2"]
        await appears(tmp_path / "started-n1", "xx")
        await asyncio.sleep(0.3)
        assert cluster.ended.empty() and "n1" in (tmp_path / "step-ended").read_text()
        assert "n2" not in (tmp_path / "step-ended").read_text()
        await cluster.abandon_steps()
        await cluster.end_agents()

    asyncio.run(start())
