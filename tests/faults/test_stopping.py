"""Runs that are asked to stop (F9, F10, F11, F33): all ranks after the same step, one checkpoint, an exit code that
says so, and an identical continuation."""

import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import Ingot
from runs import BATCHES, Run, assert_as_if_nothing_happened, ranks, whole

from ingot.checkpoint.manifest import steps_in
from ingot.training.runtime.lease import clear_stop_request

__all__ = ["ranks", "whole"]

SLOW_STEPS = {"kind": "slow", "rank": 0, "batch": 1}  # so that there is time to ask


def stopped_at(run: Run) -> int:
    """The one checkpoint that was not saved at an interval."""
    steps = steps_in(run.folder / "checkpoints")
    assert len(steps) == steps[-1] // 4 + (steps[-1] % 4 > 0)
    return steps[-1]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow, id="three ranks"),
        pytest.param(signal.SIGUSR2, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher_saves_and_stops(
    data: Path, whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = Run(data, tmp_path / "run", **SLOW_STEPS).start()
    run.wait_for_batch(9)
    run.process.send_signal(number)
    said = run.end(code=75)
    assert number.name in said
    assert 9 <= stopped_at(run) < BATCHES and not (run.folder / "FINISHED").exists()
    assert not (run.folder / "owner.json").exists()
    Run(data, run.folder).run()
    assert_as_if_nothing_happened(run.folder, whole)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(data: Path, whole: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", **SLOW_STEPS).start()
    run.wait_for_batch(9)
    os.kill(run.ranks()[2], signal.SIGUSR2)
    assert "SIGUSR2" in run.end(code=75)
    stopped_at(run)
    Run(data, run.folder).run()
    assert_as_if_nothing_happened(run.folder, whole)


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(data: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", kind="slow", rank=1, batch=10, seconds=60).start()
    run.wait_for_batch(9)
    run.process.send_signal(signal.SIGINT)
    assert run.process.stderr is not None
    assert "press Ctrl-C again to end it now" in run.process.stderr.readline()
    run.process.send_signal(signal.SIGINT)
    assert "stopped at once" in run.end(code=130)


@pytest.mark.slow
def test_a_stop_file_and_a_wall_time_limit_save_and_stop(data: Path, whole: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", **SLOW_STEPS).start()
    run.wait_for_batch(5)
    (run.folder / "STOP").touch()
    assert "the file STOP is in the run folder" in run.end(code=75)
    limited = Run(data, run.folder, "max_wall_time=0.5sec", **SLOW_STEPS)
    assert "max_wall_time is over" in limited.run(code=75)
    Run(data, run.folder).run()
    assert_as_if_nothing_happened(run.folder, whole)


def test_a_second_launcher_on_the_same_folder_is_refused_with_the_owners_name(data: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", nproc=1, **SLOW_STEPS, seconds=2).start()
    run.wait_for_batch(2)
    second = Run(data, run.folder, nproc=1)
    second.command[-2:] = []  # without a launcher, which would be refused before its rank
    said = second.run(code=2)
    assert f"is in use by process {run.ranks()[0]} on" in said
    run.process.terminate()
    run.end(code=75)


LAUNCHED = [0, pytest.param(2, marks=pytest.mark.slow)]  # 0: no launcher, the command itself trains


@pytest.mark.parametrize("nproc", LAUNCHED)
def test_a_closed_terminal_saves_and_stops(data: Path, tmp_path: Path, nproc: int) -> None:
    run = Run(data, tmp_path / "run", nproc=nproc, **SLOW_STEPS)
    if not nproc:
        run.command[-2:] = []
    ours, theirs = pty.openpty()
    run.process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *run.command],
        env=run.env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )
    os.close(theirs)
    run.wait_for_batch(5)
    os.close(ours)  # the system sends HUP, and writing to the terminal fails from now on
    assert run.process.wait(60) == 75
    assert 5 <= stopped_at(run) < BATCHES and not (run.folder / "owner.json").exists()


@pytest.mark.slow
def test_nohup_keeps_a_run_going_after_a_hangup(data: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", nproc=1, **SLOW_STEPS)
    run.command[:0] = ["nohup"]
    run.start().wait_for_batch(3)
    run.process.send_signal(signal.SIGHUP)
    run.end()
    assert (run.folder / "FINISHED").exists()


@pytest.mark.parametrize("nproc", LAUNCHED)
def test_a_stop_during_start_up_is_honored_and_one_from_before_is_not(data: Path, tmp_path: Path, nproc: int) -> None:
    run = Run(data, tmp_path / "run", "max_duration=2ba", nproc=nproc)
    if not nproc:
        run.command = [*run.command[: run.command.index("--nproc")], "max_duration=2ba"]
    run.folder.mkdir()
    (run.folder / "STOP").touch()
    run.start()
    run.wait(lambda: not (run.folder / "STOP").exists())  # of the earlier life; the processes only begin to start
    (run.folder / "STOP").touch()
    assert "the file STOP is in the run folder" in run.end(code=75)
    assert (run.folder / "STOP").exists() and not steps_in(run.folder / "checkpoints")
    assert not (run.folder / "metrics.jsonl").read_bytes()
    run.run()  # typed again, the command means: go on
    assert (run.folder / "FINISHED").exists() and not (run.folder / "STOP").exists()


@pytest.mark.parametrize("nproc", [0, 1])
def test_a_run_can_be_asked_to_stop_before_it_owns_its_folder(
    data: Path, tmp_path: Path, nproc: int, ingot: Ingot
) -> None:
    run = Run(data, tmp_path / "run", nproc=nproc)
    if not nproc:
        run.command = run.command[: run.command.index("--nproc")]
        run.folder.mkdir()  # a new run of one process has no folder before it owns it
    run.command += ["max_duration=20000ba", "save_interval=20000ba", "loggers.samples=false"]
    run.start()
    run.wait(lambda: (run.folder / "launch" / "jobs.jsonl").exists())
    assert "asked" in ingot("stop", str(run.folder)).stdout
    assert "the file STOP is in the run folder" in run.end(code=75)
    assert "stopped" in ingot("status", str(run.folder)).stdout
    assert "is not running" in ingot("stop", str(run.folder)).stdout


@pytest.mark.slow
def test_a_second_command_keeps_the_stop_request_of_an_active_run(data: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", nproc=1, **SLOW_STEPS, seconds=2).start()
    run.wait_for_batch(2)
    (run.folder / "STOP").touch()
    clear_stop_request(run.folder)  # which another command begins with
    assert (run.folder / "STOP").exists()
    run.end(code=75)
    clear_stop_request(run.folder)
    assert not (run.folder / "STOP").exists()
