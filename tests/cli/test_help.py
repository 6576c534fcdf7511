"""The help of every command: short, within 80 columns, with examples that the command line accepts."""

import shlex
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from ingot.cli.main import VERBS, all_commands, app

COMMANDS = dict(all_commands())
LEAVES = sorted(name for name, command in COMMANDS.items() if not getattr(command, "commands", None))


def summary(command: Any) -> str:
    return (command.help or "").partition("\n\n")[0].replace("\n", " ").strip()


def examples(text: str) -> list[str]:
    """The command lines after `Examples:`; a backslash continues one."""
    lines = text.partition("Examples:\n")[2].replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip()]


def test_every_command_is_summed_up_in_under_70_characters() -> None:
    listed = {name: text for verbs in VERBS.values() for name, text in verbs.items()}
    for name, command in COMMANDS.items():
        assert 0 < len(summary(command)) < 70, name
        verb = name.removeprefix("ingot ")
        assert summary(command) == listed.get(verb, summary(command)), name


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_has_two_examples_that_it_accepts(name: str) -> None:
    found = examples(COMMANDS[name].help)
    assert len(found) >= 2, name
    path = name.split()
    for line in found:
        words = shlex.split(line.partition(" > ")[0])
        assert words[:2] == path[:2] and words[: len(path)] == path[: len(words)], line
        COMMANDS[name].make_context(name, words[len(path) :])  # refuses what it does not know


@pytest.mark.parametrize("name", sorted(COMMANDS))
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_fits_80_columns(name: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, [*name.split()[1:], flag])
    assert done.exit_code == 0 and "Usage:" in done.output
    assert max(map(len, done.output.splitlines())) <= 80
    assert "…" not in done.output  # nothing is cut off


def test_help_lists_the_verbs_by_purpose_and_imports_no_large_library() -> None:
    code = (
        "import sys\nfrom ingot.cli.main import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "print('loaded:', *sorted({'torch', 'transformers', 'pyarrow', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *help_text, loaded = done.stdout.splitlines()
    assert loaded == "loaded:"
    positions = [help_text.index(line) for title in VERBS for line in help_text if f"─ {title} ─" in line]
    assert positions == sorted(positions) and len(positions) == len(VERBS)


def test_the_version_is_printed() -> None:
    from ingot.version import __version__

    assert CliRunner().invoke(app, ["--version"]).output == f"ingot {__version__}\n"


def test_options_are_taken_with_hyphens_and_with_underscores() -> None:
    for words in (["--out_root", "a"], ["--out-root", "a"], ["--output_folder", "a"], ["--output-folder", "a"]):
        context = COMMANDS["ingot prepare"].make_context("prepare", ["--path", "x", *words])
        assert str(context.params["out_root"]) == "a"
    for words in (["--world_size", "2"], ["--world-size=2"]):
        assert COMMANDS["ingot train"].make_context("train", ["demo", *words]).params["world_size"] == 2
