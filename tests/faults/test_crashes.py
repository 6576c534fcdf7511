"""Ranks that die, hang or fall behind (F1-F8, F15, F30, F34) are detected from outside, named, and restarted."""

import os
import signal
import time
from pathlib import Path

import pytest
from runs import Run, assert_as_if_nothing_happened, ranks, whole

from ingot.launch.supervisor.failure_log import node_name

__all__ = ["ranks", "whole"]

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "rank", "words"),
    [("kill", 1, "killed by signal 9"), pytest.param("kill", 2, "killed by signal 9", marks=slow, id="three ranks"),
     pytest.param("kill", 0, "killed by signal 9", marks=slow),
     pytest.param("segfault", 2, "killed by signal 11", marks=slow),
     pytest.param("abort", 1, "killed by signal 6", marks=slow)],
)  # fmt: skip
def test_a_process_that_dies_is_named_and_the_run_continues_from_its_last_checkpoint(
    data: Path, whole: Path, tmp_path: Path, kind: str, rank: int, words: str
) -> None:
    saved = tmp_path / "run" / "checkpoints" / "8" / "manifest.json"
    run = Run(data, tmp_path / "run", kind=kind, rank=rank, batch=11, after=str(saved))
    said = run.run()
    assert words in said and "attempt 2 starts from batch 8" in said
    (failure,) = run.failures()
    assert (failure["rank"], failure["batch"], failure["kind"]) == (rank, 11, "machine")
    assert_as_if_nothing_happened(run.folder, whole)
    if kind != "kill":  # what Python was doing when it crashed
        assert "in strike" in (run.folder / "logs" / f"stacks-{rank}.txt").read_text()


@slow
def test_an_error_on_the_first_attempt_only_costs_one_retry(data: Path, whole: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", kind="exception", rank=1, batch=10)
    assert "RuntimeError: a bug that strikes here" in run.run()
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_the_same_error_twice_stops_with_its_own_exit_code(data: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", kind="exception", rank=1, batch=10, attempts=list(range(1, 9)))
    said = run.run(code=3)
    assert "the same error twice" in said and "rank 1 of 3 failed first, in batch 10" in said
    assert [f["kind"] for f in run.failures()] == ["program", "program"]


@slow
def test_a_run_that_dies_before_it_has_started_over_still_starts_over(data: Path, tmp_path: Path) -> None:
    """`--fresh` holds until the checkpoints of the run before are gone."""
    Run(data, tmp_path / "run", nproc=1).run()
    again = Run(data, tmp_path / "run", "seed=4", "--fresh", nproc=1)  # a checkpoint of another seed is refused
    once, path = tmp_path / "once", tmp_path / "hook" / "sitecustomize.py"
    path.parent.mkdir()
    path.write_text(f"""
import os, signal
if 'RANK' in os.environ and not os.path.exists({str(once)!r}):
    open({str(once)!r}, 'w').close()
    os.kill(os.getpid(), signal.SIGKILL)
""")
    again.env["PYTHONPATH"] = str(path.parent)
    said = again.run()
    assert once.exists() and "attempt 2 starts from batch 0" in said and "resumed" not in said
    whole = Run(data, tmp_path / "whole", "seed=4", nproc=1)
    whole.run()
    assert_as_if_nothing_happened(again.folder, whole.folder)


@slow
def test_three_attempts_without_a_new_checkpoint_stop(data: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", kind="kill", rank=2, batch=10, attempts=list(range(1, 9)))
    assert f"3 attempts have ended alike on {node_name()} since the newest checkpoint" in run.run(code=3)
    assert len(run.failures()) == 3  # the first one wrote it


@pytest.mark.parametrize(
    ("kind", "words"),
    [("stop", "it is stopped"), pytest.param("stop", "it is stopped", marks=slow, id="three ranks"), pytest.param("gil", "(strike)", marks=slow),
     pytest.param("desync", "it missed one", marks=slow)],
)  # fmt: skip
def test_a_process_that_hangs_is_found_from_outside_with_the_stacks_of_all(
    data: Path, whole: Path, tmp_path: Path, kind: str, words: str, ranks: int
) -> None:
    run = Run(data, tmp_path / "run", "hang_timeout=3", kind=kind, rank=1, batch=11)
    said = run.run()
    assert "rank 1 has made no progress for" in said and words in said
    assert run.failures()[0]["kind"] == "hang"
    for rank in {*range(ranks)} - {1}:  # the others show where they waited
        assert "most recent call first" in (run.folder / "logs" / f"stacks-{rank}.txt").read_text()
    assert_as_if_nothing_happened(run.folder, whole)


@slow
def test_a_straggler_is_reported_and_left_alone(data: Path, whole: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", kind="slow", rank=2, batch=3, attempts=[1])
    said = run.run()
    assert "rank 2" in said and "slower than the others" in said
    assert not run.failures()
    assert_as_if_nothing_happened(run.folder, whole)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=slow)])
def test_a_killed_launcher_leaves_no_process_and_the_next_one_continues(
    data: Path, whole: Path, tmp_path: Path, count: int
) -> None:
    run = Run(data, tmp_path / "run", kind="slow", rank=0, batch=1).start()
    run.wait_for_batch(9)
    processes = run.ranks()
    run.process.kill()
    run.process.communicate()
    assert len(processes) == count
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in processes.values()):
        assert time.monotonic() < end, "orphans"
        time.sleep(0.05)
    again = Run(data, tmp_path / "run")
    said = again.run()
    assert "resumed from" in said  # neither a lease nor anything else of the killed run blocks it
    assert_as_if_nothing_happened(again.folder, whole)


@slow
def test_kills_at_several_moments_change_nothing(data: Path, whole: Path, tmp_path: Path) -> None:
    run = Run(data, tmp_path / "run", kind="slow", rank=0, batch=1, attempts=list(range(1, 99))).start()
    for number, (victim, batch) in enumerate(((0, 6), (2, 10), (1, 15)), 1):
        run.wait(lambda number=number: number == 1 or len(run.failures()) == number - 1)
        run.wait_for_batch(batch)
        run.wait(lambda: len(run.ranks()) == 3)
        os.kill(run.ranks()[victim], signal.SIGKILL)
        run.wait(lambda number=number: len(run.failures()) == number)
    run.end()
    assert [f["rank"] for f in run.failures()] == [0, 2, 1]
    assert_as_if_nothing_happened(run.folder, whole)
