"""`ingot quickstart`: one command from text to a model, made of public commands that give the same model by hand."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Ingot
from warm_process import WarmProcess

from ingot.cli.quickstart import _save
from ingot.errors import DiskError
from ingot.report.metrics_file import read_rows

TINY = ["--minutes", "0.01"]
PARAGRAPHS = [f"The {a} {b} {c} the {d}.\nIt was {e}." for a in ("old", "young", "wise") for b in ("fox", "smith", "sea")
              for c in ("saw", "left", "sang to") for d in ("river", "mill") for e in ("late", "spring", "over")]  # fmt: skip


def printed_commands(output: str) -> list[list[str]]:
    """The commands after `The same by hand:`."""
    lines = output.partition("The same by hand:\n")[2].splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("  ingot ")]


def weights(run: Path) -> bytes:
    return (max((run / "checkpoints").iterdir(), key=lambda p: int(p.name)) / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as people have them: text of many kinds, odd names, and what is not text."""
    folder = tmp_path_factory.mktemp("mixed")
    texts = folder / "my texts – 文"
    (texts / "sub folder").mkdir(parents=True)
    (texts / ".git").mkdir()
    parts = iter(PARAGRAPHS)
    for name in ("a.md", "sub folder/b.rst", "sub folder/ü n.html", "c.py", "-d.txt", "README"):
        (texts / name).write_text("\n\n".join(next(parts) for _ in range(8)), encoding="utf-8")
    (texts / "windows.txt").write_bytes("\ufeffOne\r\n\r\nTwo\r\n".encode())
    (texts / "lines.jsonl").write_text("".join(json.dumps({"text": next(parts)}) + "\n" for _ in range(8)))
    (texts / "table.csv").write_text("id,text\n" + "".join(f'{n},"{next(parts)}"\n' for n in range(8)))
    (texts / "numbers.csv").write_text("x,y\n1,2\n")
    (texts / "package.json").write_text('{"name": "x"}')
    (texts / "empty.txt").write_text("")
    (texts / "binary.txt").write_bytes(b"\0\1\2" * 100)
    (texts / "photo.png").write_bytes(b"\x89PNG")
    (texts / ".git" / "config.txt").write_text("hidden")
    (texts / "loop").symlink_to(texts)
    return texts


def test_a_folder_of_mixed_files_becomes_a_model_that_the_printed_commands_repeat(
    ingot: Ingot, mixed: Path, tmp_path: Path
) -> None:
    done = ingot("quickstart", str(mixed), "-o", "out dir", *TINY)
    assert "skipped 2 files: 1 hidden folder, 1 .png" in done.stderr.replace(
        "1 .png, 1 hidden folder", "1 hidden folder, 1 .png"
    )
    assert "skipped: 3 bad records, 1 empty document" in done.stdout  # package.json, numbers.csv, binary.txt
    for made in ("loss.png", "hf/model.safetensors", "hf/tokenizer.json", "run/metrics.jsonl", "data/val/index.json"):
        assert (tmp_path / "out dir" / made).is_file(), made
    rows = read_rows(tmp_path / "out dir" / "run")
    assert any("metrics/eval/LanguageCrossEntropy" in row for row in rows)
    assert rows[-1]["loss/train/total"] < rows[0]["loss/train/total"]
    (tmp_path / "out dir").rename(tmp_path / "first")
    commands = printed_commands(done.stdout)
    assert [command[0] for command in commands] == ["prepare", "train", "eval", "generate", "export", "eval"]
    for command in commands[:2]:
        ingot(*command)
    assert weights(tmp_path / "out dir" / "run") == weights(tmp_path / "first" / "run")


def test_interrupted_it_continues_with_what_was_decided(ingot: Ingot, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n\n".join(PARAGRAPHS))
    command = [sys.executable, "-m", "ingot.cli.main", "quickstart", "book.txt", *TINY]
    process = WarmProcess(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    metrics = tmp_path / "quickstart" / "run" / "metrics.jsonl"
    while not metrics.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    decided = json.loads((tmp_path / "quickstart" / "quickstart.json").read_text())
    done = ingot("quickstart", "book.txt", *TINY)
    assert "continuing with what was decided before" in done.stdout
    assert json.loads((tmp_path / "quickstart" / "quickstart.json").read_text()) == decided
    assert (tmp_path / "quickstart" / "hf" / "model.safetensors").is_file()
    message = ingot("quickstart", "book.txt", "--minutes", "5", check=False).stderr
    assert "holds a quickstart with other options (minutes was 0.01)" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such file"),
        (["empty"], "no text, JSON, CSV or Parquet file in this folder, it is empty"),
        (["texts", "-o", "texts/out"], "would be read as text; choose one elsewhere"),
        ([".", "-o", "."], "would be read as text; choose one elsewhere"),
        (["texts", "-o", "taken"], "already there, and not from quickstart"),
        (["texts", "-o", "empty.txt/out"], "cannot write to empty.txt/out: Not a directory"),
        (["texts", "--minutes", "0"], "--minutes 0: must be above 0"),
        (["texts", "--minutes", "-1"], "--minutes -1: must be above 0"),
        (["texts", "--minutes", "nan"], "--minutes nan: must be above 0"),
        (["texts/one.txt"], "one document without line breaks"),
        (["empty.txt"], "no text in the input"),
        (["binary.txt"], "NUL bytes"),
    ],
    ids=str,
)
def test_what_cannot_become_a_model_is_one_sentence_and_leaves_nothing(
    arguments: list[str], message: str, ingot_here: Ingot, tmp_path: Path
) -> None:
    for folder in ("texts", "empty", "taken"):
        (tmp_path / folder).mkdir()
    (tmp_path / "texts" / "a.txt").write_text("\n\n".join(PARAGRAPHS))
    (tmp_path / "texts" / "one.txt").write_text("one line")
    (tmp_path / "taken" / "file").write_text("mine")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\0" * 100)
    before = sorted(tmp_path.rglob("*"))
    done = ingot_here("quickstart", *arguments, check=False)
    assert done.returncode in (1, 2) and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"cannot write to .*file/out"):
        _save(tmp_path / "file" / "out", {})
