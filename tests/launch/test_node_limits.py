"""Limits of the system that a node is checked for, and what a command says that is interrupted."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.errors import EXIT_FAULT, EXIT_INTERRUPTED
from ingot.launch.agent.failure import exit_code_of
from ingot.launch.preflight import node_checks
from ingot.launch.profiles import find_profile


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_a_node_whose_processes_may_open_too_few_files_is_named_with_both_numbers() -> None:
    cpu = find_profile("cpu")
    assert node_checks._limits(cpu, 8) == ""
    assert "may open 2,048 files and rank 0 of 8,192 ranks needs" in node_checks._limits(cpu, 8192)


def test_little_shared_memory_is_a_problem_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_checks, "FREE_BYTES", 1 << 60)
    said = node_checks._shared_memory()
    assert said.startswith("/dev/shm has ") and f"NCCL needs {1 << 60:,}" in said
    monkeypatch.setattr(node_checks, "FREE_BYTES", 0)
    assert node_checks._shared_memory() == ""


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (KeyboardInterrupt(), "interrupted", EXIT_INTERRUPTED),
        (KeyboardInterrupt("stopped now, during step 1"), "stopped now, during step 1", EXIT_INTERRUPTED),
        (ValueError("x"), "internal error: ValueError: x; see y", EXIT_FAULT),
    ],
)
def test_an_interruption_says_what_it_knows(
    error: BaseException, said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert exit_code_of(fail, "; see y") == code
    assert capsys.readouterr().err == f"{said}\n"
