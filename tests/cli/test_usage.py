"""The command line is consistent: what is mistyped is named with the right spelling, listings have JSON, outputs -o."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Ingot

from ingot.cli.main import all_commands
from ingot.config.base import known_keys
from ingot.config.load import load_config
from ingot.config.run import RunConfig

COMMANDS = dict(all_commands())


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ingot.api import train

    folder = tmp_path_factory.mktemp("usage") / "run"
    train(load_config(RunConfig, [*TINY, "save_interval=5ba", f"data={data}", f"save_folder={folder}"]))
    return folder


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train demo --data wt2", "--data; config keys are written without dashes: data=wt2"),
        ("train demo -data wt2", "-data; config keys are written without dashes: data=wt2"),
        ("train demo --lr=3", "--lr; config keys are written without dashes: optimizer.lr=3"),
        ("train demo --max-duration 5ba", "without dashes: max_duration=5ba"),
        ("launch slurm demo --model.n_layer 3", "without dashes: model.n_layers=3"),
        ("eval run --data.eval.path x", "without dashes: data.eval.path=x"),
        ("train demo --frehs", "did you mean --fresh?"),
        ("generate run --promt x", "did you mean --prompt?"),
        ("trian demo", "ingot has no command 'trian'; did you mean `ingot train`?"),
        ("config kyes", "ingot config has no command 'kyes'; did you mean `ingot config keys`?"),
        ("config zzz", "ingot config has no command 'zzz'; see `ingot config -h`"),
        ("train", "ingot train: missing argument"),
        ("generate run --top-p 3 --prompt x", "top_p = 3.0: must be at most 1"),
        ("train demo --nproc x", "invalid value for '--nproc' / '-n': it must be a whole number; see `ingot train -h`"),
    ],
)
def test_a_mistyped_command_line_is_one_sentence_with_the_right_spelling(
    ingot_here: Ingot, command: str, words: str
) -> None:
    done = ingot_here(*command.split(), check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr


def test_config_keys_lists_every_key_with_default_and_meaning(ingot_here: Ingot) -> None:
    rows = json.loads(ingot_here("config", "keys", "--json").stdout)
    keys = {row["key"]: row for row in rows}
    leaves = {k for k in known_keys(RunConfig) if not any(other.startswith(f"{k}.") for other in known_keys(RunConfig))}
    assert leaves <= {key.partition(".NAME")[0] for key in keys}
    assert all(row["meaning"] for row in rows)
    assert keys["optimizer.lr"]["default"] == RunConfig().optimizer.lr and keys["max_duration"]["default"] == "1ep"


def test_config_keys_shows_a_section_within_80_columns(ingot_here: Ingot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = ingot_here("config", "keys", "optimizer").stdout.splitlines()
    shown = [line for line in lines if not line.startswith(" ")]
    assert "optimizer.lr=0.0006" in shown and all(line.startswith("optimizer.") for line in shown)
    assert max(map(len, lines)) <= 80
    load_config(RunConfig, shown)  # what is shown can be typed
    assert ingot_here("config", "keys", "optimizer.lr").stdout.splitlines()[0] == "optimizer.lr=0.0006"
    assert "did you mean optimizer?" in ingot_here("config", "keys", "optimiser", check=False).stderr


@pytest.mark.parametrize(
    "command",
    ["recipes list", "checkpoint list RUN", "checkpoint verify RUN", "checkpoint show RUN", "checkpoint size demo",
     "config keys model", "doctor", "launch profiles", "launch profiles show cpu", "eval --list", "status RUN"],
)  # fmt: skip
def test_every_listing_is_printed_as_json(ingot_here: Ingot, run: Path, command: str) -> None:
    assert json.loads(ingot_here(*command.replace("RUN", str(run)).split(), "--json").stdout)


def test_a_listing_has_the_same_numbers_for_programs(ingot_here: Ingot, run: Path) -> None:
    rows = json.loads(ingot_here("checkpoint", "list", str(run), "--json").stdout)
    assert [(row["step"], row["tokens"], row["training_state"]) for row in rows] == [
        (5, 5 * 8 * 32, True), (10, 10 * 8 * 32, True), (12, 12 * 8 * 32, True)
    ]  # fmt: skip
    assert json.loads(ingot_here("checkpoint", "show", str(run), "--step", "5", "--json").stdout)["step"] == 5


def test_verify_as_json_names_the_damaged_checkpoint(ingot_here: Ingot, run: Path, tmp_path: Path) -> None:
    ingot_here("checkpoint", "copy", str(run), "-o", "copy")
    (weights,) = (tmp_path / "copy").glob("checkpoints/*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    done = ingot_here("checkpoint", "verify", "copy", "--json", check=False)
    (row,) = json.loads(done.stdout)
    assert done.returncode == 2 and not row["intact"] and "is corrupt" in row["problem"]


def test_outputs_are_given_by_position_as_released_or_with_o(ingot_here: Ingot, run: Path, tmp_path: Path) -> None:
    ingot_here("export", str(run), "--to", "hf", "by-position")
    ingot_here("export", str(run), "-o", "by-option")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("by-position", "by-option")]
    assert files[0] == files[1]
    ingot_here("import", "by-option", "--out", "imported")
    ingot_here("checkpoint", "consolidate", str(run), "-o", "whole")
    assert (tmp_path / "imported" / "config.yaml").is_file() and (tmp_path / "whole" / "checkpoints").is_dir()
    assert "give one" in ingot_here("export", str(run), "a", "-o", "b", check=False).stderr
    assert "add -o FOLDER" in ingot_here("export", str(run), check=False).stderr


def test_a_step_chooses_the_checkpoint(ingot_here: Ingot, run: Path, tmp_path: Path) -> None:
    ingot_here("export", str(run), "-o", "by-step", "--step", "5")
    ingot_here("export", str(run / "checkpoints" / "5"), "by-path")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("by-step", "by-path")]
    assert files[0] == files[1]
    losses = [
        json.loads(ingot_here("eval", *arguments, "--json").stdout)["metrics/eval/LanguageCrossEntropy"]
        for arguments in ([str(run)], [str(run), "--step", "5"], [str(run / "checkpoints" / "5")])
    ]
    assert losses[1] == losses[2] > losses[0]
    missing = ingot_here("eval", str(run), "--step", "6", check=False).stderr
    assert "has no checkpoint of step 6; it has 5, 10, 12" in missing
    assert "leave out --step" in ingot_here("export", "by-step", "-o", "x", "--step", "5", check=False).stderr


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_exported_files_have_the_mode_of_the_umask(ingot_here: Ingot, run: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        ingot_here("export", str(run), "-o", f"out-{umask:o}", "--max-shard-gb", "0.001")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / f"out-{umask:o}").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {0o666 & ~umask}, modes


def completions(words: str) -> list[str]:
    """What bash is offered for the last word."""
    variables = {"_INGOT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'ingot'; from ingot.cli.main import main; main()"],
        env={**os.environ, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [("ingot chec", {"checkpoint"}), ("ingot checkpoint con", {"consolidate"}), ("ingot train --fr", {"--fresh"}),
     ("ingot train pythia-1", {"pythia-14m", "pythia-1b"}), ("ingot train demo optimizer.l", {"optimizer.lr="}),
     ("ingot launch slurm mpt-12", {"mpt-125m"})],
)  # fmt: skip
def test_the_shell_completes_verbs_options_recipes_and_keys(words: str, offered: set[str]) -> None:
    found = set(completions(words))
    assert offered <= found and all(word.startswith(words.split()[-1]) for word in found)


def test_the_completion_script_is_printed(ingot: Ingot) -> None:
    assert "_INGOT_COMPLETE=complete_bash" in ingot("--show-completion", "bash").stdout


def option_names(command: Any) -> set[str]:
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")}


@pytest.mark.parametrize("name", sorted(name for name, c in COMMANDS.items() if hasattr(c, "parse_args")))
def test_both_spellings_of_every_option_of_every_command_are_taken(name: str) -> None:
    """An option that is not known is refused by name, before its value is looked at."""
    command = COMMANDS[name]
    if getattr(command, "commands", None):
        return
    for flag in option_names(command) - {"--help"}:
        body = flag.removeprefix("--")
        for spelled in (body.replace("_", "-"), body.replace("-", "_")):
            try:
                command.make_context(name, [f"--{spelled}"], resilient_parsing=False)
            except Exception as error:
                assert "No such option" not in str(error), (name, spelled)


@pytest.mark.parametrize(
    ("redirection", "words"),
    [(">&-", ""), (">/dev/full", "error: cannot use standard output: No space left on device")],
)
def test_a_closed_or_full_standard_output_ends_in_one_sentence(tmp_path: Path, redirection: str, words: str) -> None:
    command = f"{sys.executable} -m ingot.cli.main config keys optimizer {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert "internal error" not in done.stderr and words in done.stderr and (done.returncode == 0) == (not words)
