"""`ingot generate`: prompts from options, files, standard input and a terminal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY, Ingot
from terminal import Terminal

from ingot.api import train
from ingot.config.load import load_config
from ingot.config.run import RunConfig

ALIBI = ["model.positions=alibi", "model.no_bias=true"]
GREEDY = ["--temperature", "0", "--max-new-tokens", "6"]
LONG = "The miller counted every ingot twice by the river. " * 4


@pytest.fixture(scope="module")
def place(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two checkpoints, and one without learned positions."""
    root = tmp_path_factory.mktemp("generate")
    for name, extra in (("run", []), ("alibi", ALIBI)):
        options = [*TINY, *extra, "save_interval=2ba", "max_duration=4ba", f"data={data}", f"save_folder={root / name}"]
        train(load_config(RunConfig, options))
    (root / "one.txt").write_text("My aunt\n")
    (root / "two.txt").write_text("Nobody\nA young smith\n")
    return root


def texts(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    return [(row["prompt"], row["text"]) for row in map(json.loads, done.stdout.splitlines())]


def test_several_prompts_give_what_each_gives_alone(ingot_here: Ingot, place: Path) -> None:
    alone = [ingot_here("generate", "run", "--prompt", p, *GREEDY, cwd=place).stdout for p in ("My aunt", "Nobody")]
    both = ingot_here("generate", "run", "--prompt", "My aunt", "--prompt", "Nobody", *GREEDY, cwd=place).stdout
    assert both == f"--- 1 of 2\n{alone[0]}\n--- 2 of 2\n{alone[1]}"


def test_prompts_come_from_files_and_lines(ingot_here: Ingot, place: Path) -> None:
    files = ["-f", "one.txt", "--file", "two.txt"]
    whole = texts(ingot_here("generate", "run", *files, "--json", *GREEDY, cwd=place))
    assert [prompt for prompt, _ in whole] == ["My aunt", "Nobody\nA young smith"]
    lines = texts(ingot_here("generate", "run", *files, "--lines", "--json", *GREEDY, cwd=place))
    assert [prompt for prompt, _ in lines] == ["My aunt", "Nobody", "A young smith"] and lines[0] == whole[0]


def test_prompts_come_from_standard_input_whatever_the_locale(place: Path) -> None:
    command = [sys.executable, "-X", "utf8=0", "-m", "ingot.cli.main", "generate", "run", "--json", *GREEDY]
    env = {"PATH": "/usr/bin", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, env=env, input="Café".encode(), capture_output=True, check=True)
    assert json.loads(done.stdout.decode("ascii", "replace").replace("\ufffd", "?"))["prompt"].startswith("Caf")
    spoilt = subprocess.run(command, cwd=place, env=env, input=b"\xff\xfe", capture_output=True)
    assert spoilt.returncode == 2 and b"error: a prompt is not UTF-8 text" in spoilt.stderr


def test_a_step_chooses_the_weights(ingot_here: Ingot, place: Path) -> None:
    by_step = ingot_here("generate", "run", "--step", "2", "--prompt", "Nobody", *GREEDY, cwd=place).stdout
    by_path = ingot_here("generate", "run/checkpoints/2", "--prompt", "Nobody", *GREEDY, cwd=place).stdout
    assert by_step == by_path
    missing = ingot_here("generate", "run", "--step", "3", "--prompt", "x", check=False, cwd=place).stderr
    assert "has no checkpoint of step 3; it has 2, 4" in missing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "Nobody", "--prompt", LONG], "and this model reads 32 at most; shorten it to 31 or fewer"),
        (["--prompt", ""], "a prompt is empty"),
        (["--file", "nowhere.txt"], "cannot read the prompt nowhere.txt: No such file"),
        (["--prompt", "x", "--device", "gpu"], "--device gpu: write auto, cpu or cuda"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_one_sentence(
    ingot_here: Ingot, place: Path, options: list[str], words: str
) -> None:
    done = ingot_here("generate", "run", *options, check=False, cwd=place)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1 and words in done.stderr


def test_a_model_without_learned_positions_warns_beyond_its_length(ingot_here: Ingot, place: Path) -> None:
    done = ingot_here("generate", "alibi", "--prompt", LONG, *GREEDY, cwd=place)
    assert "tokens; the model was trained on 32" in done.stderr and done.stdout.startswith(LONG)


def test_on_a_terminal_it_asks_for_texts_until_the_end_of_input(ingot_here: Ingot, place: Path) -> None:
    expected = ingot_here("generate", "run", "--prompt", "My aunt", *GREEDY, cwd=place).stdout.strip()
    terminal = Terminal("generate", "run", *GREEDY, cwd=place)
    terminal.wait_for(r"Ctrl-D ends\.\s+> ")
    terminal.type("My aunt\n")
    terminal.wait_for(r"> [^>]*> ")
    terminal.type(LONG + "\n")
    terminal.wait_for(r"this model reads 32 at most[^>]*> ")  # the prompt: before it, Ctrl-D would be lost
    terminal.type("\x04")
    assert terminal.end() == 0 and expected in terminal.plain.replace("\r\n", "\n")
