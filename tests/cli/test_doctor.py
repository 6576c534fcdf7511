"""What `ingot doctor` prints of its findings."""

import json

import pytest
from conftest import Ingot

from ingot.report.environment_check import CheckResult

FOUND = [
    CheckResult("Python", "ok", "3.11", "install another"),
    CheckResult("GPU", "warn", "none", "install a driver"),
    CheckResult("disk", "warn", "5 GB"),
]


@pytest.mark.parametrize(("state", "code"), [("warn", 0), ("fail", 1)])
def test_what_is_not_fine_has_its_fix_next_to_it(
    ingot_here: Ingot, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    found = [*FOUND, CheckResult("torch", state, "too old", "pip install torch")]
    monkeypatch.setattr("ingot.cli.doctor.check_environment", lambda: found)
    done = ingot_here("doctor", check=False)
    assert done.returncode == code
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["ok", "Python", "3.11"], ["warn", "GPU", "none", "->", "install", "a", "driver"], ["warn", "disk", "5", "GB"],
        [state, "torch", "too", "old", "->", "pip", "install", "torch"],
    ]  # fmt: skip
    assert [row["what"] for row in json.loads(ingot_here("doctor", "--json", check=False).stdout)][-1] == "torch"
