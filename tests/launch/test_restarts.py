"""How often a job starts again: the job script, run by bash with substitutes for Slurm's commands."""

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from specs import put_on_path, spec

from ingot.launch.agent import node_agent
from ingot.launch.monitor.status import read_status
from ingot.launch.preflight import preflight
from ingot.launch.preflight.diagnosis import PreflightResult, Problem
from ingot.launch.preflight.preflight import Preflight
from ingot.launch.protocol import ATTEMPT_VARIABLE, LaunchFolder
from ingot.launch.slurm.script import MAX_REQUEUES, render_scripts
from ingot.launch.spec import LaunchSpec
from ingot.launch.submit import submit_to_slurm
from ingot.launch.supervisor.failure_log import read_failures
from ingot.launch.supervisor.restart_policy import decide_restart

# an attempt that ends with what the test says; CHECKPOINT is the step that it saves. Staging is done as srun does it.
SRUN = """
import signal, subprocess
from pathlib import Path
if "bash" in sys.argv:
    for node in ("n1", "n2"):
        subprocess.run(sys.argv[sys.argv.index("bash"):], env={**os.environ, "SLURMD_NODENAME": node})
    sys.exit(0)
if "DIES" in os.environ:
    os.kill(os.getppid(), signal.SIGKILL)  # the node of the job script
run, attempt = Path(os.environ["RUN"]), os.environ.get("INGOT_JOB_ATTEMPT")
if step := os.environ.get("CHECKPOINT"):
    (run / "checkpoints" / step).mkdir(parents=True, exist_ok=True)
    (run / "checkpoints" / step / "manifest.json").touch()
if "SIGNALED" in os.environ:
    (run / "launch" / f"stop.{attempt.rpartition('.')[0]}").touch()
if code := os.environ.get("CODE"):
    (run / "launch" / f"code.{attempt}").write_text(code + "\\n")
"""


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchSpec:
    put_on_path(monkeypatch, tmp_path / "bin", "srun", SRUN)
    put_on_path(monkeypatch, tmp_path / "bin", "scontrol", "print('n1\\nn2') if 'hostnames' in sys.argv else None")
    for name in ("sinfo", "scancel", "sleep"):
        put_on_path(monkeypatch, tmp_path / "bin", name)
    run = spec(image=None, run_folder=str(tmp_path / "run"), workdir=str(tmp_path))
    run.folder.mkdir(parents=True)
    return run


def start(run: LaunchSpec, restart: int = 0, script: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The job starts, for the first time or again."""
    job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "RUN": run.run_folder,
           "SLURM_RESTART_COUNT": str(restart)}  # fmt: skip
    return subprocess.run(
        ["bash", "-c", script or render_scripts(run)["job.sh"]],
        env={**os.environ, **job, **env},
        capture_output=True,
        text=True,
    )


def requeues(run: LaunchSpec) -> int:
    path = Path(run.workdir) / "bin" / "scontrol.calls"
    return path.read_text().count('["requeue", "7"]') if path.exists() else 0


def attempts(run: LaunchSpec) -> int:
    path = Path(run.workdir) / "bin" / "srun.calls"
    return path.read_text().count("ingot.launch.agent.node_agent") if path.exists() else 0


def halted(run: LaunchSpec) -> str:
    """What `ingot status` says."""
    return read_status(Path(run.run_folder)).state


def test_a_run_that_stopped_by_itself_is_not_requeued(launched: LaunchSpec) -> None:
    done = start(launched, CODE="75", CHECKPOINT="4")
    assert done.returncode == 0 and "max_wall_time" in done.stdout and requeues(launched) == 0


def test_a_run_that_was_stopped_by_a_signal_is_requeued(launched: LaunchSpec) -> None:
    done = start(launched, CODE="75", CHECKPOINT="4", SIGNALED="1")
    assert done.returncode == 0 and requeues(launched) == 1


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"CODE": "75", "SIGNALED": "1"}, "asked to save and stop"),  # the time limit comes before the first step
        ({"STAGE": "/proc/nowhere"}, "cannot copy {image} to /proc/nowhere on n1,n2"),
    ],
)
def test_a_job_without_progress_is_not_requeued_forever(
    launched: LaunchSpec, tmp_path: Path, env: dict[str, str], why: str
) -> None:
    if stage := env.pop("STAGE", None):
        (tmp_path / "ingot.sqsh").write_bytes(b"an image")
        (tmp_path / "ingot.sqsh.sha256").write_text(f"{hashlib.sha256(b'an image').hexdigest()}  ingot.sqsh\n")
        launched = launched.model_copy(update={"image": str(tmp_path / "ingot.sqsh"), "stage": stage})
    for restart in (0, 1):
        start(launched, restart, **env)
        assert requeues(launched) == restart + 1 and not (launched.folder / "HALT").exists()
    done = start(launched, 2, **env)
    assert done.returncode == 3 and requeues(launched) == 2
    state = halted(launched)
    assert state.startswith("halted: 3 starts of the job have led to no new checkpoint") and "7.2 on n1: " in state
    assert why.format(image=launched.image) in state
    assert "nothing to do" in start(launched, 3, **env).stdout


def test_a_job_whose_first_node_dies_each_time_halts_though_slurm_requeues_it(launched: LaunchSpec) -> None:
    for restart in range(3):
        assert start(launched, restart, DIES="1").returncode == -signal.SIGKILL
    assert not (launched.folder / "HALT").exists()
    assert start(launched, 3, DIES="1").returncode == 3
    assert "the last was 7.2 on n1: it exited without reporting a result" in halted(launched)
    assert attempts(launched) == 3


def test_the_jobs_of_a_chain_count_as_restarts(launched: LaunchSpec) -> None:
    chain = {"SLURM_ARRAY_TASK_MAX": "9", "CODE": "75", "SIGNALED": "1"}
    for task in range(1, 4):
        assert start(launched, SLURM_JOB_ID=str(task), SLURM_ARRAY_TASK_ID=str(task), **chain).returncode == 0
    assert start(launched, SLURM_JOB_ID="4", SLURM_ARRAY_TASK_ID="4", **chain).returncode == 3
    assert "the last was 3.0 on n1: it was asked to save" in halted(launched) and attempts(launched) == 3


def test_a_job_that_makes_progress_is_requeued_each_time(launched: LaunchSpec) -> None:
    for restart in range(5):
        start(launched, restart, CODE="75", SIGNALED="1", CHECKPOINT=str(9 + restart))  # 9, 10: compared as numbers
    assert requeues(launched) == 5 and not (launched.folder / "HALT").exists()


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_a_job_that_was_requeued_too_often_halts_with_or_without_progress(launched: LaunchSpec, verb: str) -> None:
    launched = launched.model_copy(update={"verb": verb})
    script = next(iter(render_scripts(launched).values()))
    start(launched, MAX_REQUEUES, script, CODE="0")
    assert attempts(launched) == 1 and not (launched.folder / "HALT").exists()
    assert start(launched, MAX_REQUEUES + 1, script, CODE="0").returncode == 3
    assert attempts(launched) == 1 and "has been requeued 21 times" in halted(launched)


def test_attempts_of_which_nothing_is_recorded_are_bounded(launched: LaunchSpec) -> None:
    """The nodes judge by what they record; these could say that they failed, but not why."""
    done = start(launched, CODE="1")
    assert done.returncode == 3 and attempts(launched) == 6
    assert "6 attempts in a row have led to no new checkpoint" in halted(launched)


def test_a_new_launch_counts_from_zero(launched: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for restart in range(3):
        start(launched, restart, CODE="75", SIGNALED="1")
    assert halted(launched).startswith("halted")
    put_on_path(monkeypatch, tmp_path / "bin", "sbatch", "print(8)")
    submit_to_slurm(launched)
    assert [job.id for job in LaunchFolder(Path(launched.run_folder)).jobs()] == ["8"]
    start(launched, SLURM_JOB_ID="8", CODE="75", SIGNALED="1")
    assert not (launched.folder / "HALT").exists()


def test_swapping_bad_nodes_for_spares_is_not_an_attempt_without_progress(
    launched: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three bad nodes one after another; the spares bound it, and then the starts of the job."""

    def find(self: Preflight, note: Callable[[PreflightResult], None]) -> PreflightResult:
        result = PreflightResult([Problem("n1: its disk is full", "n1")])
        note(result)
        return result

    monkeypatch.setattr(Preflight, "run", find)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node_agent, "_raise_limits", lambda: None)
    for attempt in ("7.0.1", "7.0.2", "7.0.3"):
        node = node_agent.NodeAgent(launched, {"SLURM_JOB_ID": "7", ATTEMPT_VARIABLE: attempt})
        assert node.run() == 1
    assert (launched.folder / "bad.7").read_text() == "n1\n" * 3
    assert (
        len(read_failures(Path(launched.run_folder))) == 3
        and decide_restart(read_failures(Path(launched.run_folder))).restart
    )


def test_a_result_that_never_came_is_recorded(launched: LaunchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ROUND_SECONDS", 0.01)
    noted: list[PreflightResult] = []
    result = Preflight(launched, "7.0.1", 1, {})._read_result(noted.append)
    assert noted == [result] and "has written no result" in result.problems[0].message
