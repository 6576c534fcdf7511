"""Every command of the documentation runs as written, and prints what the page shows."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from commands import Block, blocks, ingot_calls, missing_line, run

from ingot.cli.main import all_commands

ROOT = Path(__file__).parents[2]
COMMANDS = dict(all_commands())
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LONG = {
    name: page for page in PAGES if any(not b.not_run for b in blocks(page)) for name in [str(page.relative_to(ROOT))]
}
ELSEWHERE = [*PAGES, *ROOT.glob("examples/*/README.md"), ROOT / "README.md", ROOT / "containers" / "README.md"]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the pages assume it: after `make demo` (cut short), with some texts and the examples."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my-texts").mkdir()
    for split, names in (("train", ["ast", "os", "json/decoder"]), ("val", ["shlex"])):
        documents = [(Path(os.__file__).parent / f"{name}.py").read_text() for name in names]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
        (folder / "my-texts" / f"{split}.jsonl").write_text(lines)
    (folder / "examples").symlink_to(ROOT / "examples")
    run("ingot demo --out demo max_duration=12ba eval_subset_num_batches=2", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", LONG)
def test_the_commands_of_a_page_run_in_order(page: str, reader: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    shutil.copytree(reader, folder, symlinks=True)
    for block in blocks(LONG[page]):
        for command, shown in [] if block.not_run else block.commands:
            printed = run(command, folder, python=block.language == "python")
            missing = missing_line(shown, printed)
            assert missing is None, f"{page}:{block.line}: $ {command}\ndid not print\n{missing}\nbut\n{printed}"


def test_a_block_that_is_not_run_says_what_it_needs() -> None:
    reasons = {block.not_run for page in ELSEWHERE for block in blocks(page) if block.not_run}
    assert reasons and all(re.match(r"(needs|shows|runs|downloads|takes) ", reason) for reason in reasons), reasons


@pytest.mark.parametrize("page", ELSEWHERE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_one_that_ingot_takes(page: Path) -> None:
    """Also those that need a cluster, a GPU or a network: their verbs and options exist."""
    for block in blocks(page):
        for command, _ in block.commands if block.language != "python" else []:
            for arguments in ingot_calls(command):
                check_call(arguments, block)


def check_call(words: list[str], block: Block) -> None:
    """Parse a call of ingot without running it."""
    words = ["ingot", *(word for word in words if word != "--debug")]
    length = max(n for n in range(1, len(words) + 1) if " ".join(words[:n]) in COMMANDS)
    name, arguments = " ".join(words[:length]), words[length:]
    if {"--help", "-h", "--version"} & set(arguments):
        return
    command = COMMANDS[name]
    assert not (arguments and getattr(command, "commands", None)), (
        f"{block.page}:{block.line}: {name} has no {arguments[0]}"
    )
    try:
        command.make_context(name, list(arguments))
    except Exception as error:
        pytest.fail(f"{block.page}:{block.line}: ingot {' '.join(words[1:])}: {error}")


def test_a_here_document_belongs_to_its_command(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\ncat > a.yaml <<'END'\nmodel:\n  n_layers: 6\nEND\nls\n```\n")
    (block,) = blocks(page)
    assert [command for command, _ in block.commands] == ["cat > a.yaml <<'END'\nmodel:\n  n_layers: 6\nEND", "ls"]


def test_a_transcript_is_compared_by_shape() -> None:
    assert missing_line(["saved 12 files in 0.3 s"], "saving\nsaved 9 files in 1.2 s\n") is None
    assert missing_line(["loss 9.3 | ... | eval loss 5"], "loss 1.0 | grad 3 | x | eval loss 2.5e-3") is None
    assert missing_line(["saved 12 files"], "wrote 12 files") == "saved 12 files"
    assert missing_line(["b", "a"], "a\nb") == "a"  # in order
