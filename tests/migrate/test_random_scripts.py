"""Random scripts convert to the arguments that bash passes when it runs them, or are refused."""

from pathlib import Path

import pytest
from random_scripts import Writer, run_with_bash

from ingot.errors import ConfigError
from ingot.migrate.shell.script import read_script, without_effect
from ingot.migrate.shell.values import Fragment


def with_effect(words: list[str]) -> list[str]:
    """Without the options that change nothing, which are dropped where a condition decides them."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    kept = (group for group in groups if not (group and without_effect([(Fragment(word, ""),) for word in group])))
    return [word for group in kept for word in group]


def converted(path: Path) -> list[str] | None:
    """The arguments of the training program; None if the script is refused."""
    try:
        found = read_script(path)
    except ConfigError:
        return None
    words = [word for word, _ in found.words]
    while words[:1] in (["--nproc_per_node"], ["--nnodes"]):  # from the launcher
        del words[:2]
    return None if found.unsettled else words


def compare(folder: Path, seeds: range) -> int:
    """How many scripts convert; fails at the first that converts to other arguments than bash passes."""
    scripts = [Writer(seed).script() for seed in seeds]
    count = 0
    for seed, script, runs, i in zip(seeds, scripts, run_with_bash(folder, scripts), range(len(scripts)), strict=True):
        if (words := converted(folder / f"s{i}.sh")) is not None:
            count += 1
            wrong = [run for run in runs if run != words and with_effect(run) != with_effect(words)]
            assert not wrong, f"seed {seed}: bash passes {wrong[0]}, converted to {words}:\n{script}"
    return count


def test_random_scripts_convert_to_what_bash_passes_or_are_refused(tmp_path: Path) -> None:
    assert compare(tmp_path, range(500)) >= 250


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_random_scripts_convert_to_what_bash_passes_or_are_refused(tmp_path: Path, part: int) -> None:
    assert compare(tmp_path, range(1000 * (part + 1), 1000 * (part + 2))) >= 500


def test_the_comparison_sees_a_wrong_argument(tmp_path: Path) -> None:
    (runs,) = run_with_bash(tmp_path, ["A=1\nA=2\ntorchrun x/pretrain_gpt.py --seed $A 'a b' ''\n"])
    assert runs == [["--seed", "2", "a b", ""]] and with_effect(runs[0]) == runs[0]
